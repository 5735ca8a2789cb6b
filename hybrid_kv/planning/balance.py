"""The split between pools from a trace: no pool forgets sooner than another.

A hit needs rows and a state. A pool that still holds the rows of the last hundred requests is of no use if the states
of all but the last ten are gone. The horizon of a pool is the number of successive requests whose blocks it can hold
together, wherever in the trace they stand (Denning's working set, at its peak); the split that makes the least of the
horizons as long as possible is the one that lets none starve first.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence, Set

from hybrid_kv.cache.config import Placement
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupKind
from hybrid_kv.planning.layers import check_whole
from hybrid_kv.planning.layout import Layout
from hybrid_kv.planning.sizing import Budget, check_retention, largest, memory_of, pool_need, share_out

Block = tuple[int, int]  # group, and the prefix whose end it holds
Served = tuple[Sequence[int], Sequence[int]]  # prompt, answer
_EVERYWHERE = Placement()


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a trace asks of every pool.

    touched[pool][request]: the blocks a request reads or leaves behind. live: requests in flight at once.
    """

    layout: Layout
    budget: Budget
    live: int
    touched: tuple[tuple[frozenset[Block], ...], ...]

    @property
    def requests(self) -> int:
        return len(self.touched[0])

    def required(self, horizon: int) -> tuple[int, ...]:
        """Blocks of every pool for the cached blocks of any `horizon` successive requests and the live ones.

        A live request needs at least what `max_context` tokens may hold, and besides what it leaves behind its
        running states, or the block it is filling.
        """
        need = pool_need(self.layout, self.budget.max_context, self.budget)
        return tuple(
            max(self.live * most, peak_distinct(touched, horizon) + self.live * self._private(pool))
            for pool, (most, touched) in enumerate(zip(need, self.touched, strict=True))
        )

    def horizon(self, usable: Sequence[int]) -> int:
        """Successive requests of which every pool holds everything, given its blocks besides the null block."""

        def fits(requests: int) -> bool:
            return all(want <= have for want, have in zip(self.required(requests), usable, strict=True))

        return largest(self.requests, fits)

    def _private(self, pool: int) -> int:
        kinds = [self.layout.groups[group].kind for group in self.layout.pools[pool].groups]
        return sum(self.budget.states if kind is GroupKind.RECURRENT else 1 for kind in kinds)


def balance(demand: Demand) -> Budget:
    """The budget with the blocks of every pool that reach the longest horizon; the rest is shared alike.

    Raises UserError if the memory does not hold the live requests.
    """
    budget, sizes = demand.budget, [pool.block_bytes for pool in demand.layout.pools]

    def bytes_for(horizon: int) -> int:
        return memory_of(demand.layout, demand.required(horizon))

    if bytes_for(0) > budget.memory:
        fix = f"{demand.live} live requests of {budget.max_context} tokens take {bytes_for(0)} bytes with null blocks"
        raise UserError("memory", budget.memory, f"{fix}: give that, or plan for fewer or shorter ones")
    horizon = largest(demand.requests, lambda requests: bytes_for(requests) <= budget.memory)
    weights = [n * size for n, size in zip(demand.required(horizon), sizes, strict=True)]
    shares = share_out(sizes, weights, budget.memory)
    blocks = {pool.name: 1 + count for pool, count in zip(demand.layout.pools, shares, strict=True)}
    return dataclasses.replace(budget, split=None, blocks=blocks)


def trace_demand(
    layout: Layout,
    budget: Budget,
    requests: Sequence[Served],
    *,
    placement: Placement = _EVERYWHERE,
    live: int = 1,
) -> Demand:
    """What requests, as (prompt, answer) tokens in the order served, would touch if nothing were ever evicted.

    placement and `budget.retention` say where states, and the rows of windows, are kept. Raises UserError for no
    requests, an empty prompt, or a request longer than `max_context`.
    """
    check_whole("live", live)
    check_retention(layout.geometry, budget.retention)
    if not requests:
        raise UserError("trace", [], "give at least one request")
    unit, steps = layout.geometry.hit_unit, layout.geometry.hit_unit // layout.geometry.hash_unit
    nodes, states = dict[tuple[int, tuple[int, ...]], int](), set[int]()
    touched: list[list[set[Block]]] = [[] for _ in layout.pools]
    for number, (prompt, answer) in enumerate(requests):
        length = len(prompt) + len(answer)
        if not len(prompt) or length > budget.max_context:
            fix = f"prompts need a token, prompt and answer at most max_context, {budget.max_context}"
            raise UserError(f"trace[{number}]", f"{len(prompt)} + {len(answer)} tokens", fix)
        before = len(nodes)
        # The last token of an answer is returned and never computed on.
        path = _path([*prompt, *answer][: max(length - 1, len(prompt))], layout.geometry.hash_unit, nodes)
        hits = path[steps - 1 :: steps]
        known = sum(node <= before for node in hits)
        hit = _hit(layout, hits, min(known, (len(prompt) - 1) // unit), states)
        kept = _kept(len(prompt), length, hit, min(known, len(prompt) // unit), unit, placement, budget.retention)
        states.update(hits[boundary - 1] for boundary in kept)
        kept = frozenset(boundary * steps for boundary in kept)
        for pool, members in zip(touched, layout.pools, strict=True):
            pool.append({(g, path[end - 1]) for g in members.groups for end in _ends(layout, g, len(path), kept)})
    return Demand(layout, budget, live, tuple(tuple(map(frozenset, pool)) for pool in touched))


def peak_distinct(touched: Sequence[Set[Block]], horizon: int) -> int:
    """The most distinct blocks that any `horizon` successive requests touch."""
    held: Counter[Block] = Counter()
    most = 0
    for number, blocks in enumerate(touched if horizon else ()):
        held.update(blocks)
        if number >= horizon:
            for block in touched[number - horizon]:
                held[block] -= 1
                if not held[block]:
                    del held[block]
        most = max(most, len(held))
    return most


def _path(tokens: Sequence[int], unit: int, nodes: dict[tuple[int, tuple[int, ...]], int]) -> list[int]:
    """The number of the prefix that ends with each whole hash unit; equal prefixes, equal numbers from 1."""
    path, node = [], 0
    for start in range(0, len(tokens) // unit * unit, unit):
        node = nodes.setdefault((node, tuple(map(int, tokens[start : start + unit]))), len(nodes) + 1)
        path.append(node)
    return path


def _hit(layout: Layout, path: Sequence[int], top: int, states: Set[int]) -> int:
    """Hit units of the longest hit: the deepest kept state where there are states, else all that is known."""
    if all(group.kind.append_only for group in layout.groups):
        return top
    return next((depth for depth in range(top, 0, -1) if path[depth - 1] in states), 0)


def _kept(
    prompt: int, length: int, hit: int, known: int, unit: int, placement: Placement, retention: int | None
) -> frozenset[int]:
    """Boundaries, in hit units, that a request resumes from or keeps: those of `cache.checkpoints`."""
    tails = [(prompt - 1) // unit, prompt // unit] if placement.tail else []
    turn = [(length - 1) // unit] if placement.turn_end else []
    junction = [known] if placement.junctions else []
    ladder = [(prompt - 1) // grid * grid // unit for grid in placement.ladder]
    positions = [position // unit for position in placement.positions if position < prompt]
    grid = range(retention, prompt, retention) if retention else ()
    wanted = {*tails, *turn, *junction, *ladder, *positions, *(tokens // unit for tokens in grid)}
    return frozenset({boundary for boundary in wanted if boundary > hit} | ({hit} - {0}))


def _ends(layout: Layout, group: int, units: int, kept: Iterable[int]) -> set[int]:
    """Ends, in hash units, of the blocks of one group that a request of so many units touches."""
    geometry = layout.geometry.groups[group]
    if geometry.kind is GroupKind.RECURRENT:
        return set(kept)
    width = geometry.block // layout.geometry.hash_unit
    ends = {min(end, units) for end in range(width, units + width, width)}
    if geometry.kind.append_only:
        return ends
    window = -(-geometry.spec.window // layout.geometry.hash_unit)
    return {end for end in ends if any(boundary - window < end < boundary + width for boundary in kept)}
