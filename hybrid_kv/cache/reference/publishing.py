"""Names of what a row writes: announced to later rows with its step, filed when the step is committed."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_kv.cache.reference.core import Core
from hybrid_kv.cache.reference.events import Stored
from hybrid_kv.cache.reference.plan import Row, Step
from hybrid_kv.cache.reference.pool import Block, Name
from hybrid_kv.cache.reference.request import Request


def announce(core: Core, step: Step, row: Row) -> None:
    """Content that exists once this step has run, for requests admitted before it is committed."""
    request = row.request
    if not core.rules.caching or request.unproven:
        return
    for group in core.row_groups:
        stop = core.nameable(request, group, row.end - row.drafts)
        for name, block in core.parts(request, group, row.start // core.rules.unit, stop):
            step.pending.setdefault(name, block)
    for boundary, blocks in row.emissions:
        for group, block in zip(core.rules.geometry.recurrent, blocks, strict=True):
            state = core.state_name(request, group, boundary)
            if state and row.fixed:
                step.pending.setdefault(state, block)


def publish(core: Core, request: Request) -> None:
    """File the units that are computed and have a name."""
    if not core.rules.caching:
        return
    for group in core.row_groups:
        done = core.nameable(request, group, request.computed)
        first = request.published[group]
        file_units(core, request, group, range(first, done), request.tables[group])
        request.published[group] = max(done, first)


def file_units(core: Core, request: Request, group: int, units: range, table: dict[int, Block]) -> None:
    """File units of a request that blocks of a table hold, those the table still has."""
    for parts in _by_block(core, request, group, units, table):
        fresh = [unit for unit, name, block in parts if core.index.add(name, block)]
        tell(core, request, group, fresh)


def file_state(core: Core, request: Request, group: int, boundary: int, block: Block) -> None:
    """File a state that was saved, if the tokens its name covers are known."""
    name = core.state_name(request, group, boundary)
    if name and core.index.add(name, block):
        core.statistics.states += 1
        tell(core, request, group, [boundary // core.rules.unit - 1])


def report_hit(core: Core, request: Request) -> None:
    """Tell of the blocks a hit is served from, as if they were filed now."""
    if not core.rules.event_hits:
        return
    units = range(request.hit // core.rules.unit)
    for group in core.row_groups:
        for parts in _by_block(core, request, group, units, request.tables[group]):
            tell(core, request, group, [unit for unit, _, _ in parts])
    for group in core.rules.geometry.recurrent:
        tell(core, request, group, list(units[-1:]))


def tell(core: Core, request: Request, group: int, units: Sequence[int]) -> None:
    """One event for units, one after the other, of one block."""
    if not units or core.index.events is None:
        return
    unit, lag, first = core.rules.unit, core.rules.lag(group), units[0]
    keys = tuple(request.chain[one + lag] for one in units)
    parent = request.chain[first + lag - 1] if first else None
    block = core.rules.geometry.groups[group].block
    core.index.tell(Stored(group, keys, first * unit, (units[-1] + 1) * unit, parent, block))


def _by_block(
    core: Core, request: Request, group: int, units: range, table: dict[int, Block]
) -> list[list[tuple[int, Name, Block]]]:
    """The units that a table holds as (unit, name, block), those of a block together."""
    per_block = core.rules.geometry.groups[group].block // core.rules.unit
    columns: dict[int, list[tuple[int, Name, Block]]] = {}
    for unit in units:
        if (block := table.get(unit // per_block)) is not None:
            columns.setdefault(unit // per_block, []).append((unit, core.name(request, group, unit), block))
    return list(columns.values())
