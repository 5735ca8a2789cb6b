"""Static configuration of the cache and scheduler: hashable, checked where it is made."""

from __future__ import annotations

import dataclasses
import functools

from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupGeometry, SystemGeometry

# Ring entries per block: live ones, and stale ones until the next compaction.
RING_FACTOR = 4


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which boundaries of a request keep a recurrent state, as data.

    tail: the last hash boundaries of the prompt. turn_end: the last one of the generated text.
    junction: where another request is seen to share a prefix no state covers.
    ladder: coarser grids in tokens; the last multiple of each inside the prompt is kept too.
    """

    tail: bool = True
    turn_end: bool = True
    junction: bool = True
    ladder: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Everything a transition may depend on besides its state.

    pool_blocks: blocks of every pool, the null block 0 included. group_pool: pool of every group.
    max_requests: request slots. max_context: tokens a request may reach.
    token_budget: tokens of a step. chunk_limit: tokens of one prefill chunk at most.
    max_prefills: prefill rows of a step at most. max_append: tokens a row may gain in one step.
    whole_prompts: admit a request once all its known tokens fit, not already when its first chunk does.
    """

    geometry: SystemGeometry
    pool_blocks: tuple[int, ...]
    group_pool: tuple[int, ...]
    max_requests: int
    max_context: int
    token_budget: int
    chunk_limit: int = 1 << 30
    max_prefills: int = 8
    max_append: int = 1
    whole_prompts: bool = True
    placement: Placement = Placement()
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        geometry = self.geometry
        for index, group in enumerate(geometry.groups):
            if index not in geometry.attention and index not in geometry.recurrent:
                raise UserError(f"{group.name}.kind", group.kind.value, "the scheduler serves MLA, full and recurrent")
        if len(self.group_pool) != len(geometry.groups):
            raise UserError("group_pool", self.group_pool, f"name one pool for each of {len(geometry.groups)} groups")
        if set(self.group_pool) != set(range(len(self.pool_blocks))):
            raise UserError("group_pool", self.group_pool, f"use every pool 0..{len(self.pool_blocks) - 1}")
        for pool, blocks in enumerate(self.pool_blocks):
            if blocks < 2:
                raise UserError(f"pool_blocks[{pool}]", blocks, "block 0 is the null block: use at least 2")
        if RING_FACTOR * sum(self.pool_blocks) >= 1 << 31:
            raise UserError("pool_blocks", self.pool_blocks, f"use fewer than {(1 << 31) // RING_FACTOR} blocks in all")
        if self.token_budget >= 1 << 30:
            raise UserError("token_budget", self.token_budget, "use fewer than 2**30 tokens")
        if self.max_requests < 1:
            raise UserError("max_requests", self.max_requests, "use at least 1")
        if self.token_budget < self.max_requests:
            fix = f"every one of {self.max_requests} requests may decode in one step: use at least as many tokens"
            raise UserError("token_budget", self.token_budget, fix)
        for field in ("max_context", "chunk_limit", "max_prefills", "max_append"):
            if getattr(self, field) < 1:
                raise UserError(field, getattr(self, field), "use at least 1")
        for grid in self.placement.ladder:
            if grid < 1 or grid % geometry.hash_unit:
                fix = f"states are filed at hash boundaries: use multiples of {geometry.hash_unit} tokens"
                raise UserError("placement.ladder", grid, fix)

    @property
    def unit(self) -> int:
        """Tokens of a hash unit."""
        return self.geometry.hash_unit

    @functools.cached_property
    def units(self) -> int:
        """Hash units a request may have."""
        return max(self.max_context // self.unit, 1)

    @functools.cached_property
    def pool_offset(self) -> tuple[int, ...]:
        """First row of every pool in the packed block array."""
        return tuple(sum(self.pool_blocks[:i]) for i in range(len(self.pool_blocks)))

    @functools.cached_property
    def total_blocks(self) -> int:
        return sum(self.pool_blocks)

    def pool_name(self, pool: int) -> str:
        """Names of the groups that draw from a pool."""
        return "+".join(g.name for i, g in enumerate(self.geometry.groups) if self.group_pool[i] == pool)

    def group(self, index: int) -> GroupGeometry:
        return self.geometry.groups[index]

    def offset(self, group: int) -> int:
        """First row of a group's pool in the packed block array."""
        return self.pool_offset[self.group_pool[group]]

    @functools.cached_property
    def columns(self) -> tuple[int, ...]:
        """Block-table columns of every append-only group, in the order of `geometry.attention`."""
        return tuple(self.group(g).columns(self.max_context) for g in self.geometry.attention)

    @functools.cached_property
    def column_offset(self) -> tuple[int, ...]:
        return tuple(sum(self.columns[:i]) for i in range(len(self.columns)))

    def units_per_block(self, group: int) -> int:
        """Keys one block may carry: one for each hash unit of an append-only block, one for a state."""
        return self.group(group).block // self.unit if group in self.geometry.attention else 1

    @functools.cached_property
    def max_units_per_block(self) -> int:
        return max(self.units_per_block(g) for g in range(len(self.geometry.groups)))

    @functools.cached_property
    def wanted(self) -> int:
        """Boundaries a prefill may want a state at: two tails, junction, two resume tails, the ladder."""
        return 5 + len(self.placement.ladder)

    @functools.cached_property
    def index_buckets(self) -> int:
        """Two-choice buckets of eight; at most a quarter of the places can ever be taken."""
        most = sum(self.pool_blocks[self.group_pool[g]] * self.units_per_block(g) for g in range(len(self.group_pool)))
        return max(1 << (most * 4 // 8).bit_length(), 16)

    def blocks_of(self, tokens: int) -> tuple[int, ...]:
        """Blocks of every pool that one request of `tokens` tokens may hold at once, at most.

        Append-only groups: the columns, and the source of one copy-on-write. Recurrent groups:
        the running state and the state it resumes from.
        """
        need = [0] * len(self.pool_blocks)
        for index, group in enumerate(self.geometry.groups):
            if index in self.geometry.attention:
                need[self.group_pool[index]] += group.columns(tokens) + (self.units_per_block(index) > 1)
            else:
                need[self.group_pool[index]] += 2
        return tuple(need)
