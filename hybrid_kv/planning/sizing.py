"""Bytes to blocks: how many blocks of every pool fit into a device, and what they can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupGeometry, GroupKind, SystemGeometry
from hybrid_kv.planning.layers import check_whole
from hybrid_kv.planning.layout import Layout


@dataclasses.dataclass(frozen=True)
class Budget:
    """The memory of one device and what it has to serve.

    memory: bytes for all pools. max_context: tokens of a prompt and its answer. step_tokens: tokens a request may
    gain while its window's blocks are held (all steps in flight). states: states a live request holds, the running
    one and the one it resumed from. retention: tokens between states that are kept besides the usual ones.
    split: fractions of the memory by pool name; None makes every pool run out at the same number of requests of
    `max_context` tokens. blocks: blocks of every pool instead, the null block included.
    """

    memory: int
    max_context: int
    step_tokens: int = 8192
    states: int = 2
    retention: int | None = None
    split: Mapping[str, float] | None = None
    blocks: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        for field in ("memory", "max_context", "step_tokens", "states"):
            check_whole(field, getattr(self, field))
        if self.retention is not None:
            check_whole("retention", self.retention)
        if self.split is not None and self.blocks is not None:
            raise UserError("split", dict(self.split), "give fractions or blocks, not both")


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """Pools with their sizes. blocks: of every pool, block 0 (the null block) included."""

    layout: Layout
    budget: Budget
    blocks: tuple[int, ...]

    @property
    def usable(self) -> tuple[int, ...]:
        """Blocks of every pool that requests can hold."""
        return tuple(count - 1 for count in self.blocks)

    @property
    def need(self) -> tuple[int, ...]:
        """Blocks of every pool that a request of `max_context` tokens may hold at once."""
        return pool_need(self.layout, self.budget.max_context, self.budget)

    @property
    def requests(self) -> float:
        """Requests of `max_context` tokens that can be live at once."""
        return concurrency(self.usable, self.need)

    @property
    def pool_bytes(self) -> tuple[int, ...]:
        return tuple(n * pool.block_bytes for n, pool in zip(self.blocks, self.layout.pools, strict=True))

    @property
    def left_over(self) -> int:
        """Bytes that no whole block fits into."""
        return self.budget.memory - sum(self.pool_bytes)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that one of the pools cuts short, at most `max_context`."""
        return longest_context(self.layout, self.usable, self.budget)

    def request_padding(self) -> int:
        """Bytes of padding in the blocks of one request of `max_context` tokens."""
        need = group_need(self.layout.geometry, self.budget.max_context, self.budget)
        return sum(blocks * self.layout.padding(group) for group, blocks in enumerate(need))

    def request_bytes(self) -> int:
        """Bytes of the blocks of one request of `max_context` tokens."""
        return sum(n * pool.block_bytes for n, pool in zip(self.need, self.layout.pools, strict=True))


def size_pools(layout: Layout, budget: Budget) -> PoolPlan:
    """Blocks of every pool. One null block of each comes first; the split shares out what is left.

    Raises UserError if the memory does not hold two blocks of every pool, or one request of `max_context` tokens,
    if the split or the blocks do not name every pool with a sensible number, or if states kept at the retention
    interval could never be hit.
    """
    check_retention(layout.geometry, budget.retention)
    sizes = [pool.block_bytes for pool in layout.pools]
    if budget.memory < 2 * sum(sizes):
        fix = f"the null block and one more of every pool take {2 * sum(sizes)} bytes: give at least that"
        raise UserError("memory", budget.memory, fix)
    if budget.blocks is not None:
        plan = PoolPlan(layout, budget, _explicit(layout, budget, budget.blocks))
    else:
        plan = PoolPlan(layout, budget, tuple(1 + n for n in share_out(sizes, _weights(layout, budget), budget.memory)))
    _check_request(plan)
    return plan


def share_out(sizes: Sequence[int], weights: Sequence[int | float], memory: int) -> tuple[int, ...]:
    """Blocks besides the null block when bytes are shared by weight: exact for whole weights, always rounded down."""
    rest, total = memory - sum(sizes), sum(weights)
    return tuple(int(rest * weight // (total * size)) for size, weight in zip(sizes, weights, strict=True))


def memory_of(layout: Layout, usable: Iterable[int]) -> int:
    """Bytes of so many blocks of every pool and their null blocks."""
    return sum((1 + blocks) * pool.block_bytes for blocks, pool in zip(usable, layout.pools, strict=True))


def request_blocks(group: GroupGeometry, unit: int, tokens: int, budget: Budget) -> int:
    """Blocks of one group that a request of `tokens` tokens may hold at once, at most.

    Append-only: the columns, and the source of a copy where a hit may end inside a block. Sliding window: what the
    next token reads and the steps in flight write, which may start inside a block. Chunked local: a chunk and the
    same, starting inside a block only if blocks do not divide the chunk. Recurrent: its states.
    """
    if group.kind is GroupKind.RECURRENT:
        return budget.states
    columns = group.columns(tokens)
    if group.kind.append_only:
        return columns + (group.block > unit)
    if group.kind is GroupKind.SLIDING_WINDOW:
        held = group.columns(group.spec.window - 1 + budget.step_tokens) + 1
    else:
        held = group.columns(group.spec.window + budget.step_tokens) + (group.spec.window % group.block > 0)
    return min(held, columns)


def group_need(geometry: SystemGeometry, tokens: int, budget: Budget) -> tuple[int, ...]:
    """Blocks of every group that a request of `tokens` tokens may hold at once."""
    return tuple(request_blocks(group, geometry.hash_unit, tokens, budget) for group in geometry.groups)


def pool_need(layout: Layout, tokens: int, budget: Budget) -> tuple[int, ...]:
    """Blocks of every pool that a request of `tokens` tokens may hold at once."""
    need = group_need(layout.geometry, tokens, budget)
    return tuple(sum(need[group] for group in pool.groups) for pool in layout.pools)


def concurrency(usable: Iterable[int], need: Iterable[int]) -> float:
    """Requests that every pool has blocks for at once."""
    return min(have / want for have, want in zip(usable, need, strict=True))


def longest_context(layout: Layout, usable: tuple[int, ...], budget: Budget) -> int:
    """Tokens of the longest request that blocks besides the null blocks can hold, at most `max_context`; 0 for none."""
    return largest(budget.max_context, lambda tokens: concurrency(usable, pool_need(layout, tokens, budget)) >= 1)


def check_retention(geometry: SystemGeometry, interval: int | None) -> None:
    """Refuses an interval at which no hit could ever end, and one that finds nothing to retain."""
    if interval is None:
        return
    if all(group.kind.append_only for group in geometry.groups):
        fix = "every group keeps all its rows, so there is nothing to retain: leave it out"
        raise UserError("retention", interval, fix)
    if interval % geometry.hit_unit:
        unit = "schedule block" if geometry.hit_unit != geometry.hash_unit else "hash unit"
        fix = f"hits end at multiples of the {unit}: use a multiple of {geometry.hit_unit}"
        raise UserError("retention", interval, fix)


def _weights(layout: Layout, budget: Budget) -> Sequence[int | float]:
    """What every pool's share is proportional to."""
    if budget.split is None:
        need = pool_need(layout, budget.max_context, budget)
        return [blocks * pool.block_bytes for blocks, pool in zip(need, layout.pools, strict=True)]
    _check_names("split", budget.split, layout)
    for name, fraction in budget.split.items():
        if not 0 < fraction < 1 and len(layout.pools) > 1:
            raise UserError(f"split[{name}]", fraction, "every pool needs a fraction between 0 and 1")
    total = sum(budget.split.values())
    if not abs(total - 1) <= 1e-6:  # refuses nan too
        raise UserError("split", dict(budget.split), f"fractions add up to {total:g}: make them add up to 1")
    return [budget.split[pool.name] for pool in layout.pools]


def _explicit(layout: Layout, budget: Budget, blocks: Mapping[str, int]) -> tuple[int, ...]:
    _check_names("blocks", blocks, layout)
    for name, count in blocks.items():
        check_whole(f"blocks[{name}]", count, least=2)
    total = sum(blocks[pool.name] * pool.block_bytes for pool in layout.pools)
    if total > budget.memory:
        raise UserError("blocks", dict(blocks), f"they take {total} bytes, the memory is {budget.memory}: use fewer")
    return tuple(blocks[pool.name] for pool in layout.pools)


def _check_names(field: str, given: Mapping[str, object], layout: Layout) -> None:
    names = [pool.name for pool in layout.pools]
    if set(given) != set(names):
        raise UserError(field, dict(given), f"name every pool once: {', '.join(names)}")


def _check_request(plan: PoolPlan) -> None:
    """Refuses pools in which one request of `max_context` tokens can never run."""
    budget, layout, context = plan.budget, plan.layout, plan.budget.max_context
    for pool, have, want in zip(layout.pools, plan.usable, plan.need, strict=True):
        if have >= want:
            continue
        if budget.split is None and budget.blocks is None:
            fits = largest(
                context, lambda tokens: memory_of(layout, pool_need(layout, tokens, budget)) <= budget.memory
            )
            taken = memory_of(layout, pool_need(layout, context, budget))
            fix = f"one request of {context} tokens takes {taken} bytes with null blocks: give that"
            raise UserError("memory", budget.memory, fix + _or_shorter(fits))
        field = "split" if budget.blocks is None else "blocks"
        fix = f"one request of {context} tokens needs {want} blocks of it besides the null block: give it more"
        raise UserError(f"{field}[{pool.name}] blocks", have, fix + _or_shorter(plan.longest))


def _or_shorter(tokens: int) -> str:
    return f", or set max_context to at most {tokens}" if tokens else ""


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, where every smaller one does too; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
