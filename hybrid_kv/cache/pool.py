"""Block pools: exact least-recently-used order without a sort.

Free blocks without a key lie on a stack and are reused first, newest first. Free blocks with keys
lie in a ring in the order they were released; touching one leaves a stale entry behind that is
recognised by its stamp and skipped later. A rung of a ladder that nobody asked for goes to the ring's front, so it is
taken before everything else that has a key.

Another order of blocks with keys is a utility: `CacheConfig.utility(config, state, pool)` gives every block of a pool a
number, i32[capacity], and the lowest go first, of equals the one with the lower id. It is computed anew whenever blocks
are taken; only the numbers of blocks that are free and have a key count. `by_release` is the order of the ring.

Every function takes and returns the whole state and is
meant to be inlined in a jitted transition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import index
from hybrid_kv.cache.config import RING_FACTOR, CacheConfig
from hybrid_kv.cache.state import (
    BITS,
    CLOCK,
    EVICTED,
    FREE_BLOCKS,
    PLACES,
    REF,
    REUSED,
    RING_HEAD,
    RING_TAIL,
    SPARE,
    STACK_TOP,
    STAMP,
    STATE,
    TIED,
    USABLE,
    CacheState,
    read_first,
)

# Free blocks enter a ring twice in one transition at most, so after compaction it holds no more than four entries per
# block; a refresh may fill it up to here, which leaves room for the former.
_REFRESH_ROOM = RING_FACTOR - 2
# Stamps there are, from 1 on: as many as a signed word holds.
_STAMPS = np.uint32((1 << 31) - 1)
_MOST = jnp.iinfo(jnp.int32).max
# Reference, and neither stamp nor bits nor pending names.
_TAKEN = np.array([1] + [0] * (PLACES - 1), np.int32)


def free_blocks(state: CacheState, pool: int) -> jax.Array:
    """Blocks of a pool that an allocation may take, cached ones included."""
    return state.pools[pool, FREE_BLOCKS]


def fits(state: CacheState, need: list[jax.Array], reserved: jax.Array | int = 0) -> jax.Array:
    """Whether every pool can give so many blocks and keep `reserved` (i32[P]) free."""
    return (jnp.stack(need) + reserved <= state.pools[:, FREE_BLOCKS]).all()


def take(
    config: CacheConfig, state: CacheState, pool: int, count: jax.Array, most: int
) -> tuple[CacheState, jax.Array]:
    """Take `count` <= `most` blocks with one reference each: (state, int32[most], 0 beyond count).

    The caller has checked that `count` blocks are free. Keys of reused blocks are dropped.
    """
    first = config.pool_offset[pool]
    lane = jnp.arange(most, dtype=jnp.int32)
    top = state.pools[pool, STACK_TOP]
    from_stack = jnp.minimum(count, top)
    ids = jnp.where(lane < from_stack, state.stack[first + jnp.maximum(top - 1 - lane, 0)], 0)
    order = _least_recent if config.utility is None else functools.partial(_least_useful, config.utility)
    ids, head = order(config, state, pool, ids, from_stack, count)
    rows = read_first(lambda state: state.blocks[ids], state)
    evicted = ((ids > 0) & (rows[:, PLACES:] > 0).any(-1)).sum(dtype=jnp.int32)
    # True of every id; it makes the writes below wait for the rows to be read, see `read_first`.
    ids = jnp.where(rows[:, REF] == 0, ids, 0)
    state = index.remove_blocks(state, jnp.where(lane < from_stack, 0, ids))
    row = jnp.stack([top - from_stack, head, state.pools[pool, RING_TAIL], state.pools[pool, FREE_BLOCKS] - count])
    state = state._replace(
        pools=state.pools.at[pool, :USABLE].set(row),
        blocks=state.blocks.at[jnp.where(ids > 0, ids, config.total_blocks), :PLACES].set(_TAKEN, mode="drop"),
        counters=state.counters.at[EVICTED].add(evicted),
    )
    return state, ids


def _least_recent(
    config: CacheConfig, state: CacheState, pool: int, ids: jax.Array, got: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Fill ids i32[most], of which `got` are there, up to `count` from the ring: (ids, ring head)."""
    most, capacity = ids.shape[0], RING_FACTOR * config.capacity[pool]
    ring_first = RING_FACTOR * config.pool_offset[pool]
    window = min(max(most, 8), capacity)
    ahead = jnp.arange(window, dtype=jnp.int32)

    def unfinished(carry):
        _, _, got = carry
        return got < count

    def scan_window(carry):
        ids, head, got = carry
        entries = state.ring[ring_first + (head + ahead) % capacity]
        blocks = state.blocks[entries[:, 0]]
        live = (blocks[:, REF] == 0) & (blocks[:, STAMP] == entries[:, 1]) & (entries[:, 0] > 0)
        live &= head + ahead < state.pools[pool, RING_TAIL]
        nth = jnp.cumsum(live.astype(jnp.int32))
        taken = live & (nth <= count - got)
        ids = ids.at[jnp.where(taken, got + nth - 1, most)].set(entries[:, 0], mode="drop")
        used = jnp.where(taken.any(), window - jnp.argmax(taken[::-1]), 0)
        more = got + taken.sum(dtype=jnp.int32)
        return ids, head + jnp.where(more < count, window, used.astype(jnp.int32)), more

    ids, head, _ = jax.lax.while_loop(unfinished, scan_window, (ids, state.pools[pool, RING_HEAD], got))
    return ids, head


def _least_useful(
    utility: Callable[..., jax.Array], config: CacheConfig, state: CacheState, pool: int, ids: jax.Array,
    got: jax.Array, count: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The same by a utility; their entries in the ring turn stale."""
    most, first, capacity = ids.shape[0], config.pool_offset[pool], config.capacity[pool]

    def pick(_, ids):
        rows = state.blocks[first : first + capacity]
        offered = (rows[:, REF] == 0) & (rows[:, STAMP] > 0)
        worth = jnp.where(offered, utility(config, state, pool), _MOST)
        order = jnp.argsort(worth, stable=True)[:most].astype(jnp.int32)
        nth = jnp.arange(order.shape[0], dtype=jnp.int32)
        at = jnp.where(nth < count - got, got + nth, most)
        return ids.at[at].set(first + order, mode="drop")

    ids = jax.lax.fori_loop(0, (got < count).astype(jnp.int32), pick, ids)
    return ids, state.pools[pool, RING_HEAD]


def by_release(config: CacheConfig, state: CacheState, pool: int) -> jax.Array:
    """The order of the ring as a utility: spare blocks, the last released first, then the others, the first released
    first. i32[capacity]."""
    first, capacity = config.pool_offset[pool], config.capacity[pool]
    rows = state.blocks[first : first + capacity]
    return jnp.where(rows[:, BITS] & SPARE > 0, -rows[:, STAMP], rows[:, STAMP])


def unreferenced(state: CacheState, ids: jax.Array) -> jax.Array:
    """How many of the given distinct blocks (0: none) would leave the free lists when touched."""
    return ((ids > 0) & (state.blocks[ids, REF] == 0)).sum(dtype=jnp.int32)


def touch(config: CacheConfig, state: CacheState, pool: int, ids: jax.Array) -> CacheState:
    """Add one reference to every given distinct block of a pool (0: none): a hit is served from it."""
    at = jnp.where(ids > 0, ids, config.total_blocks)
    woken, rows = read_first(lambda state: (unreferenced(state, ids), state.blocks[ids]), state)
    changed = jnp.stack([rows[:, REF] + 1, rows[:, BITS] & ~SPARE | REUSED], 1)
    return state._replace(
        blocks=state.blocks.at[at[:, None], np.array([REF, BITS])].set(changed, mode="drop"),
        pools=state.pools.at[pool, FREE_BLOCKS].add(-woken),
    )


def release(
    config: CacheConfig, state: CacheState, pool: int, ids: jax.Array, first: jax.Array | None = None,
    drop: jax.Array | None = None,
) -> CacheState:  # fmt: skip
    """Drop one reference of every given block of a pool (0: none), or only count it as used just now.

    Those reaching zero become free in the given order: without a key to the front of the reuse
    order (the first given is reused first), with keys to its back; those marked with `first` (bool[n]), and rungs that
    were never reused unless the policy ties states to rows, before all others with keys.

    drop: bool[n], None: all; the others keep their references and count as used where they are free and keyed. Rungs
    that were never reused stay where they are then, unless tied; and all do while the ring has no room to spare. Blocks
    to drop are distinct, and so are the others.
    """
    start, count = config.pool_offset[pool], config.capacity[pool]
    capacity = RING_FACTOR * count
    ids = jnp.atleast_1d(ids)
    rows = read_first(lambda state: state.blocks[ids], state)
    rung = (rows[:, BITS] & SPARE > 0) & (state.policy[TIED] == 0)
    top, head, tail = (state.pools[pool, part] for part in (STACK_TOP, RING_HEAD, RING_TAIL))
    freed = (ids > 0) & (rows[:, REF] == 1)
    again = jnp.zeros_like(freed)
    if drop is not None:
        freed &= drop
        again = ~drop & (ids > 0) & (rows[:, REF] == 0) & (rows[:, STAMP] > 0) & ~rung
        again &= tail - head + (~drop).sum() <= _REFRESH_ROOM * count
    keyed = freed & (rows[:, PLACES:].max(-1, initial=0) > 0)
    bare = freed & ~keyed
    spare = keyed & (rung if first is None else rung | first)
    last = (keyed & ~spare) | again
    bare_count, last_count, spare_count = (part.sum(dtype=jnp.int32) for part in (bare, last, spare))
    stack_at = start + top + bare_count - jnp.cumsum(bare.astype(jnp.int32))
    listed = spare | last
    nth = jnp.cumsum(listed.astype(jnp.int32)) - 1
    place = jnp.where(spare, head - jnp.cumsum(spare.astype(jnp.int32)), tail + jnp.cumsum(last.astype(jnp.int32)) - 1)
    ring_at = RING_FACTOR * start + place % capacity
    counters, stamps = _stamps(state, nth, last_count + spare_count)
    none_block, none_ring = config.total_blocks, state.ring.shape[0]
    # A keyless block forgets its stamp, or an entry from when it had keys would look live again.
    stamped = jnp.where(bare, 0, jnp.where(listed, stamps, rows[:, STAMP]))
    dropped = ids > 0 if drop is None else (ids > 0) & drop
    at = jnp.where(dropped | again, ids, none_block)
    changed = jnp.stack([rows[:, REF] - dropped, stamped], 1)
    blocks = state.blocks.at[at[:, None], np.array([REF, STAMP])].set(changed, mode="drop")
    freed_count = freed.sum(dtype=jnp.int32)
    change = jnp.stack([bare_count, -spare_count, last_count, freed_count])
    return state._replace(
        blocks=blocks,
        stack=state.stack.at[jnp.where(bare, stack_at, none_block)].set(ids, mode="drop"),
        ring=state.ring.at[jnp.where(listed, ring_at, none_ring)].set(jnp.stack([ids, stamps], -1), mode="drop"),
        pools=state.pools.at[pool, :USABLE].add(change),
        counters=counters,
    )


def _stamps(state: CacheState, nth: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The counters with the clock moved on by `count`, and the stamps of the releases numbered `nth` from 0.

    Stamps are only compared for equality, with that of a block still in the ring, so the clock may begin anew; none is
    0, which a block without a key has.
    """
    clock = state.counters[CLOCK].astype(jnp.uint32)
    stamps = (clock + nth.astype(jnp.uint32)) % _STAMPS + 1
    after = (clock + count.astype(jnp.uint32)) % _STAMPS
    return state.counters.at[CLOCK].set(after.astype(jnp.int32)), stamps.astype(jnp.int32)


def before_reused_state(config: CacheConfig, state: CacheState, pool: int, most: int) -> jax.Array:
    """How many blocks, `most` at most, can be taken before a state that a hit was served from would be."""
    first, capacity = config.pool_offset[pool], RING_FACTOR * config.capacity[pool]
    window = min(max(most, 8), capacity)
    ahead = jnp.arange(window, dtype=jnp.int32)
    tail = state.pools[pool, RING_TAIL]

    def unfinished(carry):
        head, got, met = carry
        return ~met & (got < most) & (head < tail)

    def scan_window(carry):
        head, got, _ = carry
        entries = state.ring[RING_FACTOR * first + (head + ahead) % capacity]
        rows = state.blocks[entries[:, 0]]
        live = (rows[:, REF] == 0) & (rows[:, STAMP] == entries[:, 1]) & (entries[:, 0] > 0) & (head + ahead < tail)
        reused = live & (rows[:, BITS] & (STATE | REUSED) == STATE | REUSED)
        got += (live & (jnp.cumsum(reused.astype(jnp.int32)) == 0)).sum(dtype=jnp.int32)
        return head + window, got, reused.any()

    start = (state.pools[pool, RING_HEAD], state.pools[pool, STACK_TOP], jnp.zeros((), bool))
    return jnp.minimum(jax.lax.while_loop(unfinished, scan_window, start)[1], most)


def free_keyless(config: CacheConfig, state: CacheState, pool: jax.Array, block: jax.Array) -> CacheState:
    """Move a free block (0: none) that has lost its last key from the ring to the stack."""
    row = read_first(lambda state: state.blocks[block], state)
    bare = (block > 0) & (row[REF] == 0) & (row[STAMP] > 0) & (row[PLACES:].max(initial=0) == 0)
    top = jnp.array(config.pool_offset, jnp.int32)[pool] + state.pools[pool, STACK_TOP]
    outside = config.total_blocks
    return state._replace(
        blocks=state.blocks.at[jnp.where(bare, block, outside), STAMP].set(0, mode="drop"),
        stack=state.stack.at[jnp.where(bare, top, outside)].set(block, mode="drop"),
        pools=state.pools.at[pool, STACK_TOP].add(bare.astype(jnp.int32)),
    )


def compact(config: CacheConfig, state: CacheState) -> CacheState:
    """Drop stale ring entries of pools whose ring holds more than two per block; keep cursors small.

    A block becomes free at most twice in one transition, so called at the head of each transition
    this keeps the ring from overrunning.
    """
    for pool, (first, count) in enumerate(zip(config.pool_offset, config.capacity, strict=True)):
        capacity, ring_first = RING_FACTOR * count, RING_FACTOR * first

        def crowded(carry, pool=pool, capacity=capacity):
            pools, _ = carry
            return pools[pool, RING_TAIL] - pools[pool, RING_HEAD] > 2 * (capacity // RING_FACTOR)

        def squeeze(carry, pool=pool, capacity=capacity, ring_first=ring_first):
            pools, ring = carry
            lane = jnp.arange(capacity, dtype=jnp.int32)
            head, tail = pools[pool, RING_HEAD], pools[pool, RING_TAIL]
            entries = ring[ring_first + (head + lane) % capacity]
            rows = state.blocks[entries[:, 0]]
            live = (lane < tail - head) & (rows[:, REF] == 0) & (rows[:, STAMP] == entries[:, 1])
            nth = jnp.cumsum(live.astype(jnp.int32)) - 1
            ring = ring.at[jnp.where(live, ring_first + nth, ring.shape[0])].set(entries, mode="drop")
            return pools.at[pool, RING_HEAD].set(0).at[pool, RING_TAIL].set(live.sum(dtype=jnp.int32)), ring

        pools, ring = jax.lax.while_loop(crowded, squeeze, (state.pools, state.ring))
        laps = pools[pool, RING_HEAD] // capacity * capacity
        pools = pools.at[pool, RING_HEAD].add(-laps).at[pool, RING_TAIL].add(-laps)
        state = state._replace(pools=pools, ring=ring)
    return state
