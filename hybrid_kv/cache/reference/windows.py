"""Blocks that leave a window: findable while some point needs them, nameless otherwise.

They leave when the step that moved the window is committed. A step still in flight starts there or later, so it reads
none of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_kv.cache.reference import states
from hybrid_kv.cache.reference.core import Core
from hybrid_kv.cache.reference.lookup import window_units
from hybrid_kv.cache.reference.request import Request


def leave(core: Core, request: Request) -> None:
    """Drop the blocks that no later token of the request reads."""
    for group, geometry in enumerate(core.rules.geometry.groups):
        if geometry.kind.windowed:
            first = window_units(geometry, request.computed, 1).start
            left = [column for column in request.tables[group] if (column + 1) * geometry.block <= first]
            part(core, request, group, sorted(left))


def part(core: Core, request: Request, group: int, columns: Sequence[int]) -> None:
    """Drop windowed blocks, last column first; content nobody will look for loses its names."""
    unit, geometry = core.rules.unit, core.rules.geometry.groups[group]
    table = request.tables[group]
    needed = _needed_units(core, request, group)
    for column in reversed(columns):
        block = table.pop(column)
        units = range(column * geometry.block // unit, (column + 1) * geometry.block // unit)
        block.kept |= needed is None or not needed.isdisjoint(units)
        if block.holders == 1 and not block.kept:
            block.pool.forget(block)
        block.pool.drop(block)


def _needed_units(core: Core, request: Request, group: int) -> set[int] | None:
    """Units of a windowed group that resuming at one of the request's points reads; None for all."""
    rules = core.rules
    if rules.retention is None:
        return None
    # Where one request resumed, the next may.
    points = request.points | {request.hit}
    if not rules.geometry.recurrent:
        # No states tie a hit to the points: a prompt that is edited in the unit before one resumes there.
        points |= {point - rules.geometry.hit_unit for point in request.points}
    if rules.turn_end:
        points.add(states.turn_end(rules, request))
    if rules.retention:
        points |= set(range(rules.retention, request.computed + 1, rules.retention))
    units: set[int] = set()
    for point in points:
        units |= set(window_units(rules.geometry.groups[group], point, rules.unit))
    return units
