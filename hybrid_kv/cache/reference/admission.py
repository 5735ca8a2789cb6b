"""What a waiting request is served: its hit, the blocks of it, and making them its own."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference import states, why
from hybrid_kv.cache.reference.core import Core
from hybrid_kv.cache.reference.external import Load
from hybrid_kv.cache.reference.lookup import Find, Hit, lookup, window_units
from hybrid_kv.cache.reference.pool import Block
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.geometry import GroupKind


def find_hit(core: Core, request: Request) -> tuple[Hit | None, Find]:
    """(hit, where its blocks are found), or (None, ...) if the request should wait for content in the making."""
    if not core.rules.caching:
        return Hit(0, 0, Reason.CACHING_OFF), core.index.find
    if not request.read_cache:
        return Hit(0, 0, Reason.SKIPPED), core.index.find
    known = len(request.tokens)
    now = lookup(core.rules, request.chain, known, core.index.find)
    soon = lookup(core.rules, request.chain, known, core.find_soon)
    if soon.tokens <= now.tokens:
        return _explained(core, request, now._replace(depth=max(now.depth, soon.depth))), core.index.find
    last = soon.tokens // core.rules.unit - 1
    for group, geometry in enumerate(core.rules.geometry.groups):
        recurrent = geometry.kind is GroupKind.RECURRENT
        if (recurrent or soon.tokens % geometry.block) and core.index.find(core.name(request, group, last)) is None:
            return None, core.find_soon
    return _explained(core, request, soon), core.find_soon


def _explained(core: Core, request: Request, hit: Hit) -> Hit:
    if request.refused and hit.tokens < core.rules.longest_hit(len(request.tokens)):
        return hit._replace(reason=Reason.STORE_FAILURE)
    return hit._replace(reason=why.reason(core, request.chain, request.tokens, request.salt, hit))


def served(core: Core, request: Request, hit: int, find: Find) -> list[dict[int, Block]]:
    """Per group the blocks that serve a hit: {column: block}, the state as column 0."""
    unit = core.rules.unit
    tables: list[dict[int, Block]] = []
    for group, geometry in enumerate(core.rules.geometry.groups):
        table: dict[int, Block] = {}
        if geometry.kind is GroupKind.RECURRENT:
            units = range(hit // unit - 1, hit // unit) if hit else range(0)
        elif geometry.kind.append_only:
            units = range(hit // unit)
        else:
            units = window_units(geometry, hit, unit)
        for i in units:
            block = find(core.name(request, group, i))
            assert block is not None, "lookup promised this unit"
            # The unit found last in a column has the block that holds all before it as well.
            table[0 if geometry.kind is GroupKind.RECURRENT else i * unit // geometry.block] = block
        tables.append(table)
    return tables


def adopt(core: Core, request: Request, hit: Hit, adopted: Sequence[dict[int, Block]]) -> None:
    """Hold all blocks of the hit in every group, then take the ones to copy into."""
    for table in adopted:
        for block in table.values():
            block.pool.hold(block)
    for group, geometry in enumerate(core.rules.geometry.groups):
        table = dict(adopted[group])
        if geometry.kind is GroupKind.RECURRENT:
            request.state_read[group] = table.pop(0, None)
        elif hit.tokens % geometry.block:
            column = hit.tokens // geometry.block
            request.copy[group] = (table[column], column)
            table[column] = core.pool(group).take()
        request.tables[group] = table
    # A block that was copied into holds the units before the hit as well.
    groups = core.rules.geometry.groups
    first = min((hit.tokens // groups[g].block * groups[g].block for g in core.row_groups), default=hit.tokens)
    _start(core, request, hit, [first] * len(groups))


def adopt_load(core: Core, request: Request, hit: Hit, load: Load) -> None:
    """Begin with what a load of this step brings, and the blocks in front of it."""
    for group, geometry in enumerate(core.rules.geometry.groups):
        table = load.kept[group] | load.tables[group]
        if geometry.kind is GroupKind.RECURRENT:
            request.state_read[group] = table.pop(0)
        request.tables[group] = table
    request.unproven = load
    _start(core, request, hit, load.first)


def _start(core: Core, request: Request, hit: Hit, first: Sequence[int]) -> None:
    """first: per group, the token from which on its blocks hold what has to be filed."""
    request.computed = request.planned = request.hit = hit.tokens
    request.published = [-(-token // core.rules.unit) for token in first]
    states.points(core, request, hit)
