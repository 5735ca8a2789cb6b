"""Static configuration of the cache and scheduler: hashable, checked where it is made."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax

from hybrid_kv.cache.drafts import Draft
from hybrid_kv.cache.emission import SEVERAL, EmissionCapability, Tokens, Truth
from hybrid_kv.cache.eviction import LRU, Eviction
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupGeometry, GroupKind, SystemGeometry

# Ring entries per block: live ones, and stale ones until the next compaction.
RING_FACTOR = 6
# Queues of free blocks with keys, by what they are worth, see `cache.pool`.
BANDS = 5
# Blocks the arrays of a pool have room for at least; beyond it they grow in powers of two.
_LEAST_CAPACITY = 64


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which boundaries of a request keep what resuming there needs, as data.

    tail: the last hit boundaries of the prompt. turn_end: the last one of the generated text.
    junctions: most of a request, where other requests are seen to share a prefix no state covers: the deepest
    and the last forks before it. ladder: coarser grids in tokens; the last multiple of each inside the prompt
    is kept too. positions: tokens at which every prompt that is longer keeps a state, 0 for none, see `cache.budgeted`.
    retention: 0 for these points only, n > 0 for every n tokens as well, None for every block.
    """

    tail: bool = True
    turn_end: bool = True
    junctions: int = 5
    ladder: tuple[int, ...] = ()
    retention: int | None = 0
    positions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Everything a transition may depend on besides its state.

    pool_blocks: blocks of every pool, the null block 0 included. group_pool: pool of every group.
    max_requests: request slots. max_context: tokens a request may reach.
    token_budget: tokens of a step. chunk_limit: tokens of one prefill chunk while several requests live.
    chunk_adaptive: it may be as long as a fair share of the step's tokens. max_active: requests that run at once, None
    for as many as there are slots. prefill_interval: steps from one with a prefill to the next, while others decode.
    watermark: share of every pool that an admission leaves free while others run.
    overtake: how often a waiting request may be overtaken by one of which more is cached; 0: the oldest goes first.
    steps_in_flight: steps that may be planned and not yet committed. 2: one is planned while the one before it runs.
    max_prefills: prefill rows of a step at most. max_drafts: draft tokens a row verifies at most.
    slots_ahead: rows taken beyond the scheduled tokens, where a drafter writes.
    draft, lookahead: see `Draft`; lookahead: tokens beyond a unit that its key covers.
    whole_prompts: admit a request once all its known tokens fit, not already when its first chunk does.
    priority: requests of a lower priority number go first, else the oldest.
    loads: a store outside the pools may bring content, see `cache.external`.
    emission: states that the back end can save inside a chunk; where it cannot save what is wanted, the chunk ends.
    eviction: which blocks that nobody holds are taken first, see `cache.eviction`.
    utility: what blocks that nobody holds are worth, so that the least of them are taken first, see `cache.pool`; None:
    the least recently released.
    events: entries of the log that `cache.events` reads, a power of two; 0: no log.
    placement, eviction: what a new state starts with; other values that need no more room may be set in the state, as
    those from chunk_limit to overtake may (another limit for overtake, not one where there was none).
    """

    geometry: SystemGeometry
    pool_blocks: tuple[int, ...]
    group_pool: tuple[int, ...]
    max_requests: int
    max_context: int
    token_budget: int
    chunk_limit: int = 1 << 30
    chunk_adaptive: bool = False
    max_active: int | None = None
    prefill_interval: int = 1
    watermark: float = 0.0
    overtake: int = 0
    steps_in_flight: int = 1
    max_prefills: int = 8
    max_drafts: int = 0
    slots_ahead: int = 0
    draft: Draft = Draft.NONE
    lookahead: int = 0
    whole_prompts: bool = True
    priority: bool = False
    loads: bool = False
    emission: EmissionCapability = SEVERAL
    placement: Placement = Placement()
    eviction: Eviction = LRU
    prefix_caching: bool = True
    events: int = 0
    utility: Callable[..., jax.Array] | None = None

    def __post_init__(self) -> None:
        if len(self.group_pool) != len(self.geometry.groups):
            raise UserError(
                "group_pool", self.group_pool, f"name one pool for each of {len(self.geometry.groups)} groups"
            )
        if set(self.group_pool) != set(range(len(self.pool_blocks))):
            raise UserError("group_pool", self.group_pool, f"use every pool 0..{len(self.pool_blocks) - 1}")
        for pool, blocks in enumerate(self.pool_blocks):
            if blocks < 2:
                raise UserError(f"pool_blocks[{pool}]", blocks, "block 0 is the null block: use at least 2")
        if RING_FACTOR * sum(self.capacity) >= 1 << 31:
            raise UserError("pool_blocks", self.pool_blocks, f"use at most {1 << 28} blocks in all, in powers of two")
        if self.token_budget >= 1 << 30:
            raise UserError("token_budget", self.token_budget, "use fewer than 2**30 tokens")
        counts = ("max_requests", "max_context", "chunk_limit", "max_prefills", "prefill_interval", "steps_in_flight")
        for field in counts:
            if getattr(self, field) < 1:
                raise UserError(field, getattr(self, field), "use at least 1")
        if self.max_active is not None and self.max_active < 1:
            raise UserError("max_active", self.max_active, "use at least 1, or None")
        if not 0 <= self.watermark < 1:
            raise UserError("watermark", self.watermark, "use a share of the pool, from 0 to below 1")
        for field in ("max_drafts", "slots_ahead", "overtake"):
            if getattr(self, field) < 0:
                raise UserError(field, getattr(self, field), "use 0 or more")
        if self.events < 0 or self.events & (self.events - 1) or self.events > 1 << 24:
            raise UserError("events", self.events, "use 0, or a power of two up to 2**24")
        if self.token_budget < self.max_requests:
            fix = f"every one of {self.max_requests} requests may decode in one step: use at least as many tokens"
            raise UserError("token_budget", self.token_budget, fix)
        if self.lookahead < 0 or (self.lookahead > 0) != (self.draft is Draft.LOOKAHEAD):
            raise UserError("lookahead", self.lookahead, "give at least 1 with draft=lookahead, 0 otherwise")
        if self.emission.max_per_chunk < 0 or self.emission.alignment < 1:
            fix = "use 0 or more states a chunk, at multiples of 1 or more tokens"
            raise UserError("emission", self.emission, fix)
        self.check_placement(self.placement)

    def check_placement(self, placement: Placement) -> None:
        """Raises UserError for points that are no hit boundaries, or more of them than there is room for."""
        step = self.geometry.hit_unit
        for grid in placement.ladder:
            if grid < 1 or grid % step:
                raise UserError("placement.ladder", grid, f"hits end at multiples of {step} tokens: use such")
        for position in placement.positions:
            if not 0 <= position < 1 << 30 or position % step:
                fix = f"hits end at multiples of {step} tokens: use such below 2**30, or 0 for none"
                raise UserError("placement.positions", position, fix)
        if placement.junctions < 0:
            raise UserError("placement.junctions", placement.junctions, "use 0 or more")
        if placement.retention is not None and (placement.retention < 0 or placement.retention % step):
            raise UserError("placement.retention", placement.retention, f"use None, 0 or a multiple of {step} tokens")
        room = self.placement
        if (
            len(placement.ladder) > len(room.ladder)
            or len(placement.positions) > len(room.positions)
            or placement.junctions > room.junctions
        ):
            most = f"{len(room.ladder)} rungs, {len(room.positions)} positions and {room.junctions} junctions"
            raise UserError("placement", placement, f"this configuration has room for {most}")
        if self._retained_per_chunk(placement) > self._retained_per_chunk(self.placement):
            fix = f"this configuration has room for a state every {self.interval(self.placement)} tokens (0: none)"
            raise UserError("placement.retention", placement.retention, fix)

    @functools.cached_property
    def program(self) -> CacheConfig:
        """The configuration whose transitions serve this one too: how many blocks a pool has, which states are
        kept, and who may start stands in the state."""
        ladder = (self.geometry.hit_unit,) * len(self.placement.ladder)
        room = Placement(
            junctions=self.placement.junctions,
            ladder=ladder,
            retention=self.interval(self.placement),
            positions=(0,) * len(self.placement.positions),
        )
        return dataclasses.replace(
            self,
            geometry=self.geometry.unsharded(),
            placement=room,
            pool_blocks=self.capacity,
            chunk_limit=1 << 30,
            chunk_adaptive=False,
            max_active=None,
            prefill_interval=1,
            watermark=0.0,
            # Without overtaking nobody is looked up but who starts.
            overtake=min(self.overtake, 1),
            eviction=LRU,
        )

    def interval(self, placement: Placement) -> int:
        """Tokens between the states that retention alone asks for; 0 for none."""
        if placement.retention is not None or not self.geometry.recurrent:
            return placement.retention or 0
        step = self.geometry.hit_unit
        return min(math.lcm(self.group(group).block, step) for group in self.geometry.recurrent)

    def _retained_per_chunk(self, placement: Placement) -> int:
        every = self.interval(placement)
        return -(-self.longest_chunk // every) if every else 0

    @property
    def unit(self) -> int:
        """Tokens of a hash unit."""
        return self.geometry.hash_unit

    @property
    def longest_chunk(self) -> int:
        """Tokens of the longest prefill chunk."""
        return min(self.token_budget, self.max_context)

    @property
    def max_append(self) -> int:
        """Tokens a row may gain in one step."""
        return 1 + self.max_drafts

    @functools.cached_property
    def units(self) -> int:
        """Hash units a request may have."""
        return max(self.max_context // self.unit, 1)

    def lag(self, group: int) -> int:
        """Units that must be known beyond one before this group's part of it has a name, see `Draft.DROP`."""
        spec = self.group(group).spec
        return int(self.draft is Draft.DROP and spec.draft and spec.kind is not GroupKind.RECURRENT)

    @functools.cached_property
    def longest_lag(self) -> int:
        return max(self.lag(group) for group in range(len(self.geometry.groups)))

    @functools.cached_property
    def pool_offset(self) -> tuple[int, ...]:
        """First row of every pool in the packed block array."""
        return tuple(sum(self.capacity[:i]) for i in range(len(self.capacity)))

    @functools.cached_property
    def capacity(self) -> tuple[int, ...]:
        """Blocks that the arrays of every pool have room for, so that pools of like sizes share programs."""
        return tuple(max(1 << (blocks - 1).bit_length(), _LEAST_CAPACITY) for blocks in self.pool_blocks)

    @functools.cached_property
    def total_blocks(self) -> int:
        """Rows of the packed block array."""
        return sum(self.capacity)

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
        """Block-table columns of every group that has a table, in the order of `geometry.paged`."""
        return tuple(self.group(g).columns(self.max_context) for g in self.geometry.paged)

    @functools.cached_property
    def column_offset(self) -> tuple[int, ...]:
        return tuple(sum(self.columns[:i]) for i in range(len(self.columns)))

    def units_per_block(self, group: int) -> int:
        """Keys one block may carry: one for each hash unit of a block of rows, one for a state."""
        return self.group(group).block // self.unit if group in self.geometry.paged else 1

    @functools.cached_property
    def max_units_per_block(self) -> int:
        return max(self.units_per_block(g) for g in range(len(self.geometry.groups)))

    @functools.cached_property
    def wanted(self) -> int:
        """Points a request may have: four of its prompt and of what it resumed with, junctions, ladder, positions."""
        return 4 + self.placement.junctions + self.rungs

    @property
    def rungs(self) -> int:
        """Points that no resume needs: of the ladder, and positions."""
        return len(self.placement.ladder) + len(self.placement.positions)

    @functools.cached_property
    def emissions(self) -> int:
        """States one prefill chunk saves at most."""
        return self.wanted + self._retained_per_chunk(self.placement)

    @property
    def saves_anywhere(self) -> bool:
        """Whether a row can save any number of states at any boundary."""
        return self.emission.everywhere(self.max_context)

    def can_save(self, start: Tokens, end: Tokens, boundary: Tokens) -> Truth:
        """Whether the back end can save a state inside a chunk [start, end)."""
        blocks = [self.group(group).block for group in self.geometry.recurrent]
        return self.emission.can_save(start, end, boundary, self.unit, blocks)

    @functools.cached_property
    def turn_slots(self) -> int:
        """Slots in which a decoding request keeps its last boundaries in turn.

        One; more where tokens beyond a boundary must be known before anyone can resume there; and one for every further
        step in flight, since a request may turn out to have ended before it.
        """
        beyond = self.longest_lag * self.unit + max(self.lookahead - 1, 0)
        return 1 + -(-beyond // self.geometry.hit_unit) + self.steps_in_flight - 1

    @functools.cached_property
    def turn_candidates(self) -> int:
        """Hit boundaries that one verified row may cross, wherever drafts in flight let it start."""
        return -(-(self.max_append + self.most_slack) // self.geometry.hit_unit)

    @property
    def most_slack(self) -> int:
        """Tokens that a row may start earlier than planned: the drafts of the steps in flight before it."""
        return (self.steps_in_flight - 1) * self.max_drafts

    @functools.cached_property
    def index_buckets(self) -> int:
        """Two-choice buckets of eight; at most a quarter of the places can ever be taken."""
        most = sum(self.capacity[self.group_pool[g]] * self.units_per_block(g) for g in range(len(self.group_pool)))
        return max(1 << (most * 4 // 8).bit_length(), 16)

    def window_columns(self, group: int) -> int:
        """Blocks a windowed group of one request holds at most: it gives them back as it goes."""
        geometry = self.group(group)
        rows = self.steps_in_flight * (self.longest_chunk + self.max_drafts)
        most = geometry.columns(geometry.spec.window - 1 + rows + self.slots_ahead) + 1
        return min(most, geometry.columns(self.max_context))

    def blocks_of(self, tokens: int) -> tuple[int, ...]:
        """Blocks of every pool that one request of `tokens` tokens may hold at once, at most.

        Append-only groups: the columns, and the source of one copy-on-write. Windowed groups: a window and a
        chunk. Recurrent groups: the running state and the state it resumes from.
        """
        need = [0] * len(self.pool_blocks)
        end = min(tokens + self.slots_ahead, self.max_context)
        for index, group in enumerate(self.geometry.groups):
            if group.kind.append_only:
                need[self.group_pool[index]] += group.columns(end) + (self.units_per_block(index) > 1)
            elif group.kind.windowed:
                need[self.group_pool[index]] += min(group.columns(end), self.window_columns(index))
            else:
                need[self.group_pool[index]] += 2
        return tuple(need)
