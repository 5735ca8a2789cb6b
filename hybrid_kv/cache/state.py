"""The cache state: a pytree of a few packed arrays, and the names of their columns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache.config import BANDS, RING_FACTOR, CacheConfig, Placement
from hybrid_kv.cache.eviction import Eviction
from hybrid_kv.hashing import KEY_WORDS

T = TypeVar("T")

FREE, WAITING, RUNNING = 0, 1, 2
# What a waiting request has of an external store: the store has not answered; a load is under way; it is through and
# its blocks are held for the request; it is under way for nobody.
NOTHING, UNDECIDED, LOADING, BROUGHT, ABANDONED = range(5)

# Columns of `CacheState.blocks`; the cells of the index that name the block follow, by unit (0: none), see
# `index.cell`.
REF, STAMP, BITS, PENDING_STEP, PENDING_FROM, PLACES = 0, 1, 2, 3, 4, 5
# `BITS`: content worth finding after it left its window; a hit was served from it; a state; a rung of a ladder. Then
# two bits of what a state saves, see `eviction.saving`, and its kind, see `cache.earnings`.
KEPT, REUSED, STATE, SPARE = 1, 2, 4, 8
SAVING_SHIFT, KIND_SHIFT = 4, 8
# Columns of `CacheState.entries` behind the key; from OWNERS on one for every group.
CHILD, OWNERS = KEY_WORDS, KEY_WORDS + 1
# Kinds of states besides the rungs of the ladder, see `cache.earnings`.
STATE_KINDS = 4
# Words of an event in `CacheState.log`, see `cache.log`.
LOG_WORDS = 4 + 2 * KEY_WORDS
# Columns of `CacheState.pools`; the heads and tails of the rings of every band follow.
STACK_TOP, FREE_BLOCKS, USABLE, RESERVED = range(4)
HEADS, TAILS = slice(4, 4 + BANDS), slice(4 + BANDS, 4 + 2 * BANDS)
# Entries of `CacheState.counters`. PLANNED, DONE: steps planned and not withdrawn, and committed, so those between them
# are in flight. SHORT: the last step had work that found no blocks. LAST_PREFILL: the last step that had a prefill.
CLOCK, EVICTED, PREEMPTED, OVERFLOWED, SKIPPED_STATES, NEXT_SEQ = range(6)
PLANNED, DONE, SHORT, LAST_PREFILL = range(6, 10)
# TOLD: events of the log, it wraps. From ADMISSIONS on see `cache.statistics`. TOKENS: low words of four totals, then
# their high words. REASONS: one for each `Reason`. RECORDS: for each step in flight, in a ring like `cache.flights`, by
# how much planning it has changed the counters BY_PLAN; what it has evicted and preempted stays so.
TOLD, SAVED_STATES, ADMISSIONS, RESUMES, TOKENS, REASONS, RECORDS = 10, 11, 12, 13, 14, 22, 32
BY_PLAN = (PLANNED, SHORT, LAST_PREFILL, SKIPPED_STATES, *range(ADMISSIONS, RECORDS))
# Entries of `CacheState.policy`; the ladder follows, then the positions.
TAIL, TURN_END, JUNCTIONS, INTERVAL, KEEP_WINDOWS = range(5)
CHUNK, ADAPTIVE, ACTIVE, PREFILL_EVERY, OVERTAKE = range(5, 10)
TIED, EARNED, GUARD, COVERAGE, BANDED = range(10, 15)
STAY = slice(15, 15 + BANDS)
LADDER = STAY.stop


class CacheState(NamedTuple):
    """Packed arrays. Block 0 of every pool is the null block: never counted, keyed or evicted.

    requests i32[F, R]     one lane per request slot, rows named by `RequestLayout`
    keys     u32[R, U, 4]  hash chain of the known tokens of every request
    tables   i32[R, C]     block ids of the groups that have tables, their columns side by side; ids count
                           through all pools, 0 is none
    blocks   i32[B, 5 + K] references, stamp of the last release, `KEPT` and other bits, the step that names units
                           of this block from which unit on, cells of the index that name it
    tags     u32[I]        a word of every key in the prefix index, in buckets of eight (0: an empty place)
    entries  u32[I, 5 + G] the keys themselves, each with a mark of the unit that was filed behind it (`FORKED`: of
                           several) and the block that has this content in every group (0: none)
    ghosts   u32[J]        fingerprints of evicted keys, direct mapped
    stack    i32[B]        free blocks without a key, per pool, last in first out
    ring     i32[30B, 2]   free blocks with keys, per pool and band, see `cache.pool`, least recently released first;
                           (block, stamp), entries whose stamp is not the block's are stale
    pools    i32[P, 14]    stack top, free blocks, blocks there are besides the null, and those of them that an
                           admission leaves free while others run; head and tail of the ring of every band
    counters i32[40 + 24K + 2L] clock and totals, what each of K steps in flight has changed of them, and what kinds of
                           states have earned, see `cache.earnings`
    policy   i32[20 + L]   `Placement`, `Eviction` and limits of the scheduler as data; L is `CacheConfig.rungs`
    log      u32[E, 12]    ring of events, see `cache.log`; E is `CacheConfig.events`
    """

    requests: jax.Array
    keys: jax.Array
    tables: jax.Array
    blocks: jax.Array
    tags: jax.Array
    entries: jax.Array
    ghosts: jax.Array
    stack: jax.Array
    ring: jax.Array
    pools: jax.Array
    counters: jax.Array
    policy: jax.Array
    log: jax.Array


@dataclasses.dataclass(frozen=True)
class RequestLayout:
    """Fields of a request, rows of `CacheState.requests`. Positions and lengths in tokens, cursors in units or columns.

    status, seq (order of arrival), prompt, known (prompt and answer), limit (known tokens it may end with), computed
    (committed), flags (`lookup.SKIP_READ` and others), hit, junction, reason, preemptions, admitted (the step that
    admitted it, until that is committed), priority, drafts (proposed for the next row), load (see `NOTHING`), loaded
    (tokens of the load), overtaken (requests admitted before it that came later).
    Then per group with a table: columns in use, source of a pending copy-on-write, units filed, first column that a
    window has not left; per recurrent group: running and read slot; the lengths that the turn-end slots hold (0: none)
    and the slots, `CacheConfig.turn_slots` for each recurrent group; the points of the request; a record of its row in
    every step in flight, see `cache.flights`.
    """

    paged: int
    recurrent: int
    wanted: int
    emissions: int
    turns: int
    flights: int

    STATUS, SEQ, PROMPT, KNOWN, LIMIT, COMPUTED, FLAGS, HIT, JUNCTION, REASON = range(10)
    PREEMPTIONS, ADMITTED, PRIORITY, DRAFTS, LOAD, LOADED, OVERTAKEN = range(10, 17)
    _FIRST = 17

    @functools.cached_property
    def columns(self) -> slice:
        return slice(self._FIRST, self._FIRST + self.paged)

    @functools.cached_property
    def copy_source(self) -> slice:
        return slice(self.columns.stop, self.columns.stop + self.paged)

    @functools.cached_property
    def published(self) -> slice:
        return slice(self.copy_source.stop, self.copy_source.stop + self.paged)

    @functools.cached_property
    def left(self) -> slice:
        return slice(self.published.stop, self.published.stop + self.paged)

    @functools.cached_property
    def running(self) -> slice:
        return slice(self.left.stop, self.left.stop + self.recurrent)

    @functools.cached_property
    def read(self) -> slice:
        return slice(self.running.stop, self.running.stop + self.recurrent)

    @functools.cached_property
    def turn(self) -> slice:
        return slice(self.read.stop, self.read.stop + self.turns)

    @functools.cached_property
    def turn_slot(self) -> slice:
        """[turns, recurrent] flattened."""
        return slice(self.turn.stop, self.turn.stop + self.turns * self.recurrent)

    @functools.cached_property
    def points(self) -> slice:
        return slice(self.turn_slot.stop, self.turn_slot.stop + self.wanted)

    @functools.cached_property
    def record(self) -> int:
        """Columns of one record of `flight`."""
        return 4 + self.emissions * (1 + self.recurrent)

    @functools.cached_property
    def flight(self) -> slice:
        """[flights, record] flattened."""
        return slice(self.points.stop, self.points.stop + self.flights * self.record)

    @functools.cached_property
    def size(self) -> int:
        return self.flight.stop


def read_first(read: Callable[[CacheState], T], state: CacheState) -> T:
    """`read(state)`, and sure to have been read before the state is written.

    The compiler likes to repeat a small read where its result is used; if the array has been written by then, it makes
    a copy of the whole array for that. It cannot look through a loop, and does not know that this one has one round.
    """
    nothing = jax.tree.map(lambda value: jnp.zeros(value.shape, value.dtype), jax.eval_shape(read, state))
    once = (state.counters[CLOCK] >= 0).astype(jnp.int32)
    return jax.lax.fori_loop(0, once, lambda _, __: read(state), nothing)


def zero_after(*values: Any) -> jax.Array:
    """Zero, i32[], known only when all values (trees of arrays) are, as far as the compiler can tell.

    Added to the place of a write it makes the write wait for them, and with them for all that they were read from: else
    the compiler may put a read behind the write, and then copies the whole array for it.
    """
    heads = [leaf.reshape(-1)[0].astype(jnp.int32) for leaf in jax.tree.leaves(values) if leaf.size]
    return (jnp.stack(heads).sum(dtype=jnp.int32) & 1) >> 1


@functools.cache
def layout(config: CacheConfig) -> RequestLayout:
    """The request columns of a configuration."""
    geometry = config.geometry
    return RequestLayout(
        paged=len(geometry.paged),
        recurrent=len(geometry.recurrent),
        wanted=config.wanted,
        emissions=config.emissions,
        turns=config.turn_slots,
        flights=config.steps_in_flight,
    )


def policy_of(config: CacheConfig, placement: Placement, eviction: Eviction | None = None) -> np.ndarray:
    """A placement, an order of eviction (None: the configuration's) and the limits of a configuration, as the data the
    transitions read: i32[20 + L].

    Raises UserError if there is no room for the placement.
    """
    config.check_placement(placement)
    keep = int(placement.retention is None)
    active = config.max_requests if config.max_active is None else config.max_active
    kept = (placement.tail, placement.turn_end, placement.junctions, config.interval(placement), keep)
    limits = (config.chunk_limit, config.chunk_adaptive, active, config.prefill_interval, config.overtake)
    order = config.eviction if eviction is None else eviction
    bands = (order.is_banded, *order.stays)
    head = (*kept, *limits, order.tied, order.earned, order.guard, order.coverage, *bands)
    ladder = sorted(placement.ladder) + [0] * (len(config.placement.ladder) - len(placement.ladder))
    positions = [*placement.positions] + [0] * (len(config.placement.positions) - len(placement.positions))
    return np.array([*head, *ladder, *positions], np.int32)


def with_positions(config: CacheConfig, policy: jax.Array, positions: jax.Array | np.ndarray) -> jax.Array:
    """A policy (i32[9 + L]) with other positions, i32[M] tokens: as many as there is room for, 0 for none, and all of
    them multiples of the hit unit."""
    first = LADDER + len(config.placement.ladder)
    return policy.at[first:].set(jnp.asarray(positions, jnp.int32))


def initial_state(config: CacheConfig, pool_blocks: tuple[int, ...] | None = None) -> CacheState:
    """An empty cache: every block but the nulls is free, lowest id first.

    pool_blocks: blocks of every pool, the null block included, where there are to be fewer than the configuration has
    room for: the same program serves pools of all sizes then.
    """
    usable = np.array(config.pool_blocks if pool_blocks is None else pool_blocks, np.int32) - 1
    reserved = np.array([int(config.watermark * blocks) for blocks in usable.tolist()], np.int32)
    stack, pools = _all_free(config, jnp.asarray(usable), jnp.asarray(reserved))
    places = config.index_buckets * 8
    return CacheState(
        requests=jnp.zeros((layout(config).size, config.max_requests), jnp.int32),
        keys=jnp.zeros((config.max_requests, config.units, KEY_WORDS), jnp.uint32),
        tables=jnp.zeros((config.max_requests, max(sum(config.columns), 1)), jnp.int32),
        blocks=jnp.zeros((config.total_blocks, PLACES + config.max_units_per_block), jnp.int32),
        tags=jnp.zeros((places,), jnp.uint32),
        entries=jnp.zeros((places, OWNERS + len(config.geometry.groups)), jnp.uint32),
        ghosts=jnp.zeros((places,), jnp.uint32),
        stack=stack,
        ring=jnp.zeros((BANDS * RING_FACTOR * config.total_blocks, 2), jnp.int32),
        pools=pools,
        counters=jnp.zeros((counters_of(config),), jnp.int32),
        policy=jnp.asarray(policy_of(config, config.placement)),
        log=jnp.zeros((config.events, LOG_WORDS), jnp.uint32),
    )


def counters_of(config: CacheConfig) -> int:
    """Counters, records of the steps in flight, and two numbers for every kind of state."""
    return RECORDS + config.steps_in_flight * len(BY_PLAN) + 2 * (STATE_KINDS + len(config.placement.ladder))


def forget_all(config: CacheConfig, state: CacheState) -> CacheState:
    """The state with the same requests, totals, pools, policy and log, and no content. Nothing may be held."""
    stack, pools = _all_free(config, state.pools[:, USABLE], state.pools[:, RESERVED])
    kept = {name: getattr(state, name) for name in ("requests", "keys", "counters", "policy", "log")}
    return initial_state(config)._replace(stack=stack, pools=pools, **kept)


def _all_free(config: CacheConfig, usable: jax.Array, reserved: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Stack and pools when every block is free and has no key, the lowest ids on top. usable, reserved: i32[P]."""
    parts = []
    for pool, (first, room) in enumerate(zip(config.pool_offset, config.capacity, strict=True)):
        lane = jnp.arange(room, dtype=jnp.int32)
        parts.append(jnp.where(lane < usable[pool], first + usable[pool] - lane, 0))
    rings = jnp.zeros((usable.shape[0], 2 * BANDS), jnp.int32)
    return jnp.concatenate(parts), jnp.concatenate([jnp.stack([usable, usable, usable, reserved], 1), rings], 1)
