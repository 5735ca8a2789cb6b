"""Which recurrent states are saved: at points a later request may resume from, and at the end of a turn.

A row saves a state if it gets as far with tokens that stand, so drafts that are refused save nothing, and a name is
filed only for a state that was saved.
"""

from __future__ import annotations

import math

from hybrid_kv.cache.reference import publishing
from hybrid_kv.cache.reference.core import Core
from hybrid_kv.cache.reference.lookup import Hit
from hybrid_kv.cache.reference.plan import Emission, Row
from hybrid_kv.cache.reference.pool import Block
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.cache.reference.rules import Rules


def points(core: Core, request: Request, hit: Hit) -> None:
    """Decide at admission where the request should leave what resuming there needs."""
    rules, unit = core.rules, core.rules.unit
    wanted = rules.resume_points(request.prompt, len(request.tokens)) if rules.tail else set()
    request.shared = set()
    if rules.junctions and hit.depth > hit.tokens:
        step = rules.geometry.hit_unit
        forks = [i * unit for i in range(hit.tokens // unit + 1, hit.depth // unit)
                 if i * unit % step == 0 and core.prefixes.forks(request.chain[i - 1])]  # fmt: skip
        request.shared = {hit.depth // step * step, *forks[len(forks) - min(rules.junctions - 1, len(forks)) :]}
        wanted |= request.shared
    rungs = {(request.prompt - 1) // grid * grid for grid in rules.ladder}
    request.rungs = (rungs | {position for position in rules.positions if position < request.prompt}) - wanted
    request.points = {point for point in wanted | request.rungs if point > hit.tokens}


def cut(core: Core, request: Request, end: int) -> int:
    """Where a chunk that could go on to `end` has to stop, so that the states at the request's points can be saved.

    A back end that saves any number of states anywhere needs no cut. Another one saves the state at the end of a chunk,
    and inside it what `Rules.can_save` allows: the chunk ends at the first point that is neither.
    """
    rules, start = core.rules, request.planned
    if rules.saves_anywhere or not (rules.geometry.recurrent and rules.caching):
        return end
    if end < request.known and end // rules.unit * rules.unit > start:
        end = end // rules.unit * rules.unit  # the next chunk can save more from a start at a unit
    stops = sorted(point for point in request.points - request.rungs if start < point < end)
    stops = [point for point in stops if not _is_filed(core, request, point)]
    while (stop := _first_unsaved(rules, start, end, stops)) is not None:
        end, stops = stop, [point for point in stops if point < stop]
    return end


def _first_unsaved(rules: Rules, start: int, end: int, stops: list[int]) -> int | None:
    """The first of some points that a chunk [start, end) cannot save the state of."""
    left = rules.emission.max_per_chunk
    for point in stops:
        if not left or not rules.can_save(start, end, point):
            return point
        left -= 1
    return None


def _is_filed(core: Core, request: Request, boundary: int) -> bool:
    names = [core.state_name(request, group, boundary) for group in core.rules.geometry.recurrent]
    return all(name is not None and core.find_soon(name) for name in names)


def plan(core: Core, row: Row) -> None:
    """States to save inside a row, most wanted first, as long as blocks are free; then those of the turn."""
    if not (core.rules.geometry.recurrent and core.rules.caching):
        return
    request = row.request
    inside = 0
    for boundary in sorted(_wanted(core, row), key=lambda b: (b not in request.points, b in request.rungs, -b)):
        if _is_filed(core, request, boundary):
            continue
        interior = row.fixed and boundary < row.end
        if interior and not (
            inside < core.rules.emission.max_per_chunk and core.rules.can_save(row.start, row.end, boundary)
        ):
            continue
        optional = boundary in request.rungs or boundary not in request.points
        if not (core.short and optional) and _room(core, boundary in request.shared):
            row.emissions.append(Emission(boundary, _take(core)))
            inside += interior
        else:
            core.statistics.skipped_states += 1
    _plan_turns(core, row)


def _wanted(core: Core, row: Row) -> set[int]:
    """Boundaries a row may reach whose state is worth a block of its own and will have a name."""
    request, rules = row.request, core.rules
    named = len(request.chain) * rules.unit
    if row.samples:
        named = max(named, row.end + 1 - rules.lookahead)
    first, last = row.start - row.slack, min(row.end, named)
    wanted = {point for point in request.points if first < point <= last}
    for every in _grids(rules):
        wanted |= set(range(first // every * every + every, last + 1, every))
    return wanted


def _grids(rules: Rules) -> set[int]:
    """Distances at which retention keeps states, one for each recurrent group at most."""
    geometry, retention = rules.geometry, rules.retention
    if retention is None:
        return {math.lcm(geometry.groups[group].block, geometry.hit_unit) for group in geometry.recurrent}
    return {retention} if retention and geometry.recurrent else set()


def _first_to_go(rules: Rules, request: Request, boundary: int) -> bool:
    """Whether a state is taken again before everything else: a rung of a ladder, or one of a grid, but for those at
    1, 2, 4, 8, ... times its distance. However many go, a fork still finds one more than half way to it."""
    if boundary in request.points:
        return boundary in request.rungs
    return all(boundary % every or (boundary // every).bit_count() > 1 for every in _grids(rules))


def _plan_turns(core: Core, row: Row) -> None:
    """While decoding, the state at each boundary goes to the next slot of the request's ring."""
    request, ring = row.request, row.request.turns
    if not core.rules.turn_end or row.end <= request.prompt:
        return
    unit = core.rules.geometry.hit_unit
    first = max(row.start - row.slack, request.prompt - 1)
    boundaries = list(range(first // unit * unit + unit, row.end + 1, unit))
    if row.fixed:
        boundaries = boundaries[-1:]  # all of the row stands, so it passes the others
        if not core.rules.saves_anywhere:
            boundaries = [boundary for boundary in boundaries if boundary == row.end]
    for boundary in boundaries:
        slot = ring.slot(boundary, unit)
        if slot not in ring.blocks:
            if core.short or not _room(core, False):
                return
            ring.blocks[slot] = _take(core)
        row.turns.append(Emission(boundary, ring.blocks[slot]))


def turn_end(rules: Rules, request: Request) -> int:
    """The last boundary of what is computed at which a later request can resume."""
    step = rules.geometry.hit_unit
    named = (len(request.chain) - rules.longest_lag) * rules.unit
    return min(request.computed, named) // step * step


def file(core: Core, row: Row, start: int) -> None:
    """After a row that began at `start` has run: name the states it saved, remember those of the turn."""
    request, recurrent = row.request, core.rules.geometry.recurrent
    for boundary, blocks in row.emissions:
        for group, block in zip(recurrent, blocks, strict=True):
            if saved(core.rules, row, start, request.computed, boundary):
                publishing.file_state(core, request, group, boundary, block)
            block.spare = _first_to_go(core.rules, request, boundary)
            block.pool.drop(block)
    for boundary, _ in row.turns:
        if saved(core.rules, row, start, request.computed, boundary):
            request.turns.saved[request.turns.slot(boundary, core.rules.geometry.hit_unit)] = boundary


def saved(rules: Rules, row: Row, start: int, end: int, boundary: int) -> bool:
    """Whether a row that turned out to compute [start, end) has saved the state at a boundary it was planned to save.

    Where a row's tokens may not all stand, a back end that cannot save anywhere saves the state at their end alone.
    """
    return start < boundary <= end and (row.fixed or rules.saves_anywhere or boundary == end)


def end_turn(core: Core, request: Request) -> None:
    """File the state the turn leaves, the last one that can be found and that no row in flight writes over."""
    unit = core.rules.geometry.hit_unit
    doomed, last = written_over(request, unit), turn_end(core.rules, request)
    left = {boundary: slot for slot, boundary in request.turns.saved.items() if slot not in doomed and boundary <= last}
    if left:
        boundary = max(left)
        for group, block in zip(core.rules.geometry.recurrent, request.turns.blocks[left[boundary]], strict=True):
            publishing.file_state(core, request, group, boundary, block)
    for block in request.turns.held():
        block.pool.drop(block)


def leave_prefill(core: Core, request: Request) -> None:
    """A request that goes in the middle of its prefill leaves the state it has reached, to be resumed from: its running
    state, if that ends at a boundary and no row in flight takes it further."""
    rules = core.rules
    reached = request.hit < request.computed < len(request.tokens) - 1
    if not (rules.caching and reached) or request.computed % rules.geometry.hit_unit or under_way(request):
        return
    for group in rules.geometry.recurrent:
        publishing.file_state(core, request, group, request.computed, request.tables[group][0])


def under_way(request: Request) -> bool:
    """Whether rows in flight move the running state on."""
    return bool(request.rows)


def written_over(request: Request, unit: int) -> set[int]:
    """Slots of its ring that rows in flight may write to. They begin where what is computed ends, or later."""
    turns = [turn for row in request.rows for turn in row.turns if turn.boundary > request.computed]
    return {request.turns.slot(turn.boundary, unit) for turn in turns}


def refresh(core: Core, request: Request) -> None:
    """States of the prefix count as used now, like its rows: one is worth nothing without the other."""
    for boundary in sorted(request.points | {request.hit}):
        if 0 < boundary <= request.computed:
            for group in core.rules.geometry.recurrent:
                name = core.state_name(request, group, boundary)
                if name and (state := core.index.find(name)) is not None:
                    state.pool.refresh(state)


def _room(core: Core, proven: bool) -> bool:
    """Whether a state of every recurrent group can be taken. One that nobody is known to share must not take the
    place of one that was reused."""
    recurrent = core.rules.geometry.recurrent
    pools = [core.pool(group) for group in recurrent]
    for pool in pools:
        victims = pool.next(pools.count(pool))
        reused = [one for one in victims if one.reused and any(group in recurrent for group, _ in one.names)]
        if len(victims) < pools.count(pool) or (reused and not proven):
            return False
    return True


def _take(core: Core) -> list[Block]:
    return [core.pool(group).take() for group in core.rules.geometry.recurrent]
