"""The cache state: a pytree of a few packed arrays, and the names of their columns."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache.config import RING_FACTOR, CacheConfig
from hybrid_kv.hashing import KEY_WORDS

FREE, WAITING, RUNNING = 0, 1, 2

# Columns of `CacheState.blocks`; the index places of the block's keys follow (0: none).
REF, STAMP, PLACES = 0, 1, 2
# Rows of `CacheState.pools`.
STACK_TOP, RING_HEAD, RING_TAIL, FREE_BLOCKS = 0, 1, 2, 3
# Entries of `CacheState.counters`.
CLOCK, EVICTED, PREEMPTED, OVERFLOWED, SKIPPED_STATES, NEXT_SEQ, N_COUNTERS = 0, 1, 2, 3, 4, 5, 6


class CacheState(NamedTuple):
    """Packed arrays. Block 0 of every pool is the null block: never counted, keyed or evicted.

    requests i32[R, F]     one row per request slot, columns named by `RequestLayout`
    keys     u32[R, U, 4]  hash chain of the known tokens of every request
    tables   i32[R, C]     block ids of the append-only groups, their columns side by side; ids count
                           through all pools, 0 is none
    blocks   i32[B, 2 + K] references, stamp of the last release, index places of the keys
    entries  u32[I, 5]     the prefix index, buckets of eight: key tagged with its group, block id (0: empty)
    ghosts   u32[J]        fingerprints of evicted keys, direct mapped
    stack    i32[B]        free blocks without a key, per pool, last in first out
    ring     i32[4B, 2]    free blocks with keys, per pool, least recently released first;
                           (block, stamp), entries whose stamp is not the block's are stale
    pools    i32[P, 4]     stack top, ring head, ring tail, free blocks
    counters i32[6]        clock and totals
    """

    requests: jax.Array
    keys: jax.Array
    tables: jax.Array
    blocks: jax.Array
    entries: jax.Array
    ghosts: jax.Array
    stack: jax.Array
    ring: jax.Array
    pools: jax.Array
    counters: jax.Array


@dataclasses.dataclass(frozen=True)
class RequestLayout:
    """Columns of a request row. Positions and lengths in tokens, cursors in hash units.

    status, seq (order of arrival), prompt, known (prompt and answer), computed (committed),
    scheduled (in flight), flags (1: skip the cache, 2: salted), hit, junction, reason,
    published (units of this request already filed), preemptions, turn (length the turn-end state
    holds; 0: none), emit_turn (length the turn-end state is overwritten with in this step),
    admitted (no step since its admission is committed).
    Then per append-only group: columns in use and the source of a pending copy-on-write; per
    recurrent group: running, read and turn-end slot; the wanted boundaries; the emissions of
    the step in flight: positions, then a slot for each recurrent group.
    """

    attention: int
    recurrent: int
    wanted: int

    STATUS, SEQ, PROMPT, KNOWN, COMPUTED, SCHEDULED, FLAGS = range(7)
    HIT, JUNCTION, REASON, PUBLISHED, PREEMPTIONS, TURN, EMIT_TURN, ADMITTED = range(7, 15)
    _FIRST = 15

    @property
    def columns(self) -> slice:
        return slice(self._FIRST, self._FIRST + self.attention)

    @property
    def copy_source(self) -> slice:
        return slice(self.columns.stop, self.columns.stop + self.attention)

    @property
    def running(self) -> slice:
        return slice(self.copy_source.stop, self.copy_source.stop + self.recurrent)

    @property
    def read(self) -> slice:
        return slice(self.running.stop, self.running.stop + self.recurrent)

    @property
    def turn_slot(self) -> slice:
        return slice(self.read.stop, self.read.stop + self.recurrent)

    @property
    def boundaries(self) -> slice:
        return slice(self.turn_slot.stop, self.turn_slot.stop + self.wanted)

    @property
    def emit_position(self) -> slice:
        return slice(self.boundaries.stop, self.boundaries.stop + self.wanted)

    @property
    def emit_slot(self) -> slice:
        """[wanted, recurrent] flattened."""
        return slice(self.emit_position.stop, self.emit_position.stop + self.wanted * self.recurrent)

    @property
    def size(self) -> int:
        return self.emit_slot.stop


@functools.cache
def layout(config: CacheConfig) -> RequestLayout:
    """The request columns of a configuration."""
    return RequestLayout(len(config.geometry.attention), len(config.geometry.recurrent), config.wanted)


def initial_state(config: CacheConfig) -> CacheState:
    """An empty cache: every block but the nulls is free, lowest id first."""
    stack = np.zeros(config.total_blocks, np.int32)
    pools = np.zeros((len(config.pool_blocks), 4), np.int32)
    for pool, (first, count) in enumerate(zip(config.pool_offset, config.pool_blocks, strict=True)):
        stack[first : first + count - 1] = np.arange(first + count - 1, first, -1)
        pools[pool, [STACK_TOP, FREE_BLOCKS]] = count - 1
    places = config.index_buckets * 8
    return CacheState(
        requests=jnp.zeros((config.max_requests, layout(config).size), jnp.int32),
        keys=jnp.zeros((config.max_requests, config.units, KEY_WORDS), jnp.uint32),
        tables=jnp.zeros((config.max_requests, max(sum(config.columns), 1)), jnp.int32),
        blocks=jnp.zeros((config.total_blocks, PLACES + config.max_units_per_block), jnp.int32),
        entries=jnp.zeros((places, KEY_WORDS + 1), jnp.uint32),
        ghosts=jnp.zeros((places,), jnp.uint32),
        stack=jnp.asarray(stack),
        ring=jnp.zeros((RING_FACTOR * config.total_blocks, 2), jnp.int32),
        pools=jnp.asarray(pools),
        counters=jnp.zeros((N_COUNTERS,), jnp.int32),
    )
