"""Block pools: least recently used first, or least useful, without a sort.

Free blocks without a key lie on a stack and are reused first, newest first. Free blocks with keys lie in rings, one for
each band of `cache.eviction`, in the order they were released; touching one leaves a stale entry behind that is
recognised by its stamp and skipped later. What is to go first goes to the front of the first band. All blocks of a band
stay equally longer than their age says, so its order of release is its order of utility, and only the heads of the
bands are compared: what an eviction costs does not grow with the pool, and with one band it is exactly the order of
release.

Another order of blocks with keys is a utility: `CacheConfig.utility(config, state, pool)` gives every block of a pool a
number, i32[capacity], and the lowest go first, of equals the one with the lower id. It is computed anew whenever blocks
are taken; only the numbers of blocks that are free and have a key count. `by_release` is the order of the ring.

Every function takes and returns the whole state and is
meant to be inlined in a jitted transition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import eviction, index
from hybrid_kv.cache.config import BANDS, RING_FACTOR, CacheConfig
from hybrid_kv.cache.ranks import ranks
from hybrid_kv.cache.state import (
    BANDED,
    BITS,
    CLOCK,
    EVICTED,
    FREE_BLOCKS,
    HEADS,
    PLACES,
    REF,
    REUSED,
    SAVING_SHIFT,
    SPARE,
    STACK_TOP,
    STAMP,
    STATE,
    STAY,
    TAILS,
    TIED,
    CacheState,
    read_first,
)

# Free blocks enter a ring twice in one transition at most, so after compaction it holds no more than four entries per
# block; a refresh may fill it up to here, which leaves room for the former.
_REFRESH_ROOM = RING_FACTOR - 2
# Entries of every band that are looked at together.
_WINDOW = 64
# Stamps there are, from 1 on: as many as a signed word holds.
_STAMPS = np.uint32((1 << 31) - 1)
_MOST = jnp.iinfo(jnp.int32).max
# Number of a pool, known when a program is traced or when it runs.
Pool = int | jax.Array
# Reference, and neither stamp nor bits nor pending names.
_TAKEN = np.array([1] + [0] * (PLACES - 1), np.int32)


def free_blocks(state: CacheState, pool: int) -> jax.Array:
    """Blocks of a pool that an allocation may take, cached ones included."""
    return state.pools[pool, FREE_BLOCKS]


def fits(state: CacheState, need: list[jax.Array], reserved: jax.Array | int = 0) -> jax.Array:
    """Whether every pool can give so many blocks and keep `reserved` (i32[P]) free."""
    return (jnp.stack(need) + reserved <= state.pools[:, FREE_BLOCKS]).all()


def take_each(
    config: CacheConfig, state: CacheState, pools: Sequence[int], count: jax.Array, most: int
) -> tuple[CacheState, jax.Array]:
    """`take` from one pool after the other, which may repeat: (state, i32[len(pools), most])."""
    ids = jnp.zeros((len(pools), most), jnp.int32)
    if config.utility is not None or len(pools) == 1:
        for nth, pool in enumerate(pools):
            state, taken = take(config, state, pool, count, most)
            ids = ids.at[nth].set(taken)
        return state, ids
    numbers = jnp.array(pools, jnp.int32)

    def one(nth, carry):
        state, ids = carry
        state, taken = take(config, state, numbers[nth], count, most)
        return state, ids.at[nth].set(taken)

    # A program is as large as its text: one for all.
    return jax.lax.fori_loop(0, len(pools), one, (state, ids))


def take(
    config: CacheConfig, state: CacheState, pool: Pool, count: jax.Array, most: int
) -> tuple[CacheState, jax.Array]:
    """Take `count` <= `most` blocks with one reference each: (state, int32[most], 0 beyond count).

    The caller has checked that `count` blocks are free. Keys of reused blocks are dropped.
    """
    first = _of(config.pool_offset, pool)
    lane = jnp.arange(most, dtype=jnp.int32)
    top = state.pools[pool, STACK_TOP]
    from_stack = jnp.minimum(count, top)
    ids = jnp.where(lane < from_stack, state.stack[first + jnp.maximum(top - 1 - lane, 0)], 0)
    if isinstance(pool, int) and config.utility is not None:
        ids = _least_useful(config.utility, config, state, pool, ids, from_stack, count)
        heads = state.pools[pool, HEADS]
    else:
        ids, heads, _ = _in_order(config, state, pool, ids, from_stack, count)
    rows = read_first(lambda state: state.blocks[ids], state)
    evicted = ((ids > 0) & (rows[:, PLACES:] > 0).any(-1)).sum(dtype=jnp.int32)
    # True of every id; it makes the writes below wait for the rows to be read, see `read_first`.
    ids = jnp.where(rows[:, REF] == 0, ids, 0)
    taken = jnp.where(lane < from_stack, 0, ids)
    some = (evicted > 0).astype(jnp.int32)
    state = jax.lax.fori_loop(0, some, lambda _, state: index.remove_blocks(state, taken), state)
    pools = state.pools.at[pool, STACK_TOP].add(-from_stack).at[pool, FREE_BLOCKS].add(-count)
    state = state._replace(
        pools=pools.at[pool, HEADS].set(heads),
        blocks=state.blocks.at[jnp.where(ids > 0, ids, config.total_blocks), :PLACES].set(_TAKEN, mode="drop"),
        counters=state.counters.at[EVICTED].add(evicted),
    )
    return state, ids


def _in_order(
    config: CacheConfig, state: CacheState, pool: Pool, ids: jax.Array, got: jax.Array, count: jax.Array,
    before: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Fill ids i32[most], of which `got` are there, up to `count` from the rings, the least useful first: (ids, heads
    i32[bands], how many there are).

    before: bits of a block (0: none) in front of which it stops, should there be one that has them all.
    """
    most, capacity = ids.shape[0], RING_FACTOR * _of(config.capacity, pool)
    window = min(max(most, 8), _WINDOW, RING_FACTOR * min(config.capacity))
    ahead, bands = jnp.arange(window, dtype=jnp.int32), jnp.arange(BANDS, dtype=jnp.int32)
    ring_first = _ring_first(config, pool)
    tails, stays = state.pools[pool, TAILS], state.policy[STAY]

    def unfinished(carry):
        _, heads, got, met = carry
        return ~met & (got < count) & (heads < tails).any()

    def scan_window(carry):
        ids, heads, got, _ = carry
        at = heads[:, None] + ahead
        entries = state.ring[ring_first[:, None] + at % capacity]
        rows = state.blocks[entries[..., 0], :PLACES]
        live = (rows[..., REF] == 0) & (rows[..., STAMP] == entries[..., 1]) & (entries[..., 0] > 0)
        live &= at < tails[:, None]
        worth = jnp.where(bands[:, None] == eviction.FIRST, -_MOST, stays[:, None] - _age(state, entries[..., 1]))
        heads_worth = jnp.where(live, worth, _MOST).min(1)
        band = jnp.argmin(heads_worth)
        rival = jnp.where(bands == band, _MOST, heads_worth).min()
        # Bands of which nothing live is seen yet are looked through before anything is taken.
        unseen = ~live.any(1) & (heads + window < tails)
        there = live[band]
        taken = there & (worth[band] <= rival) & ~unseen.any()
        stop = taken & (rows[band, :, BITS] & before == before) & (before > 0)
        taken &= ahead < jnp.where(stop.any(), jnp.argmax(stop), window)
        nth = ranks(taken)
        taken &= nth < count - got
        ids = ids.at[jnp.where(taken, got + nth, most)].set(entries[band, :, 0], mode="drop")
        # What is stale at the head of a band is passed for good.
        passed = jnp.where(live.any(1), jnp.argmax(live, 1), jnp.minimum(window, tails - heads)).astype(jnp.int32)
        used = jnp.where(taken.any(), window - jnp.argmax(taken[::-1]), passed[band]).astype(jnp.int32)
        return ids, heads + jnp.where(bands == band, used, passed), got + taken.sum(dtype=jnp.int32), stop.any()

    start = (ids, state.pools[pool, HEADS], got, jnp.zeros((), bool))
    ids, heads, got, _ = jax.lax.while_loop(unfinished, scan_window, start)
    return ids, heads, got


def _ring_first(config: CacheConfig, pool: Pool) -> jax.Array:
    """Where the ring of every band of a pool begins: i32[bands]."""
    each = RING_FACTOR * _of(config.capacity, pool)
    return BANDS * RING_FACTOR * _of(config.pool_offset, pool) + each * jnp.arange(BANDS, dtype=jnp.int32)


def _of(values: tuple[int, ...], pool: Pool) -> jax.Array | int:
    """A pool's value, also where its number is known only when the program runs."""
    return values[pool] if isinstance(pool, int) else jnp.array(values, jnp.int32)[pool]


def _age(state: CacheState, stamps: jax.Array) -> jax.Array:
    """Releases since these stamps were given: i32[...], 2**30 at most."""
    clock = state.counters[CLOCK].astype(jnp.uint32)
    age = (clock + _STAMPS - stamps.astype(jnp.uint32)) % _STAMPS
    return jnp.minimum(age, np.uint32(1 << 30)).astype(jnp.int32)


def _least_useful(
    utility: Callable[..., jax.Array], config: CacheConfig, state: CacheState, pool: int, ids: jax.Array,
    got: jax.Array, count: jax.Array,
) -> jax.Array:  # fmt: skip
    """The same by a utility; their entries in the rings turn stale."""
    most, first, capacity = ids.shape[0], config.pool_offset[pool], config.capacity[pool]

    def pick(_, ids):
        rows = state.blocks[first : first + capacity]
        offered = (rows[:, REF] == 0) & (rows[:, STAMP] > 0)
        worth = jnp.where(offered, utility(config, state, pool), _MOST)
        order = jnp.argsort(worth, stable=True)[:most].astype(jnp.int32)
        nth = jnp.arange(order.shape[0], dtype=jnp.int32)
        at = jnp.where(nth < count - got, got + nth, most)
        return ids.at[at].set(first + order, mode="drop")

    return jax.lax.fori_loop(0, (got < count).astype(jnp.int32), pick, ids)


def by_release(config: CacheConfig, state: CacheState, pool: int) -> jax.Array:
    """The order of the ring as a utility: spare blocks, the last released first, then the others, the first released
    first. i32[capacity]."""
    first, capacity = config.pool_offset[pool], config.capacity[pool]
    rows = state.blocks[first : first + capacity]
    return jnp.where(rows[:, BITS] & SPARE > 0, -rows[:, STAMP], rows[:, STAMP])


def unreferenced(state: CacheState, ids: jax.Array) -> jax.Array:
    """How many of the given distinct blocks (0: none) would leave the free lists when touched."""
    return ((ids > 0) & (state.blocks[ids, REF] == 0)).sum(dtype=jnp.int32)


def touch(config: CacheConfig, state: CacheState, pools: np.ndarray, ids: jax.Array) -> CacheState:
    """Add one reference to every given distinct block i32[n] (0: none) of pools i32[n]: a hit is served from it."""
    if not ids.shape[0]:
        return state
    at = jnp.where(ids > 0, ids, config.total_blocks)
    rows = read_first(lambda state: state.blocks[ids, :PLACES], state)
    woken = (ids > 0) & (rows[:, REF] == 0)
    changed = jnp.stack([rows[:, REF] + 1, rows[:, BITS] & ~SPARE | REUSED], 1)
    number = np.arange(len(config.pool_blocks))[:, None]
    count = (woken & (jnp.asarray(pools) == number)).sum(1, dtype=jnp.int32)
    return state._replace(
        blocks=state.blocks.at[at[:, None], np.array([REF, BITS])].set(changed, mode="drop"),
        pools=state.pools.at[:, FREE_BLOCKS].add(-count),
    )


def release_each(
    config: CacheConfig, state: CacheState, pools: Sequence[int], ids: jax.Array, first: jax.Array, drop: jax.Array
) -> CacheState:
    """`release` of blocks [len(pools), n] of one pool after the other."""
    if len(pools) == 1:
        return release(config, state, pools[0], ids[0], first[0], drop[0])
    numbers = jnp.array(pools, jnp.int32)

    def one(nth, state):
        return release(config, state, numbers[nth], ids[nth], first[nth], drop[nth])

    return jax.lax.fori_loop(0, len(pools), one, state)


def release(
    config: CacheConfig, state: CacheState, pool: Pool, ids: jax.Array, first: jax.Array | None = None,
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
    start, count = _of(config.pool_offset, pool), _of(config.capacity, pool)
    capacity = RING_FACTOR * count
    ids = jnp.atleast_1d(ids)
    rows = read_first(lambda state: state.blocks[ids], state)
    bits = rows[:, BITS]
    rung = (bits & SPARE > 0) & (state.policy[TIED] == 0)
    top, heads, tails = state.pools[pool, STACK_TOP], state.pools[pool, HEADS], state.pools[pool, TAILS]
    freed = (ids > 0) & (rows[:, REF] == 1)
    again = jnp.zeros_like(freed)
    if drop is not None:
        freed &= drop
        again = ~drop & (ids > 0) & (rows[:, REF] == 0) & (rows[:, STAMP] > 0) & ~rung
        again &= (tails - heads).max() + (~drop).sum() <= _REFRESH_ROOM * count
    keyed = freed & (rows[:, PLACES:].max(-1, initial=0) > 0)
    bare = freed & ~keyed
    listed = keyed | again
    front = listed & (rung if first is None else rung | first)
    by_worth = eviction.band(state.policy[BANDED] > 0, bits & STATE > 0, bits >> SAVING_SHIFT & 3, bits & REUSED > 0)
    mine = (listed & ~front)[:, None] & (by_worth[:, None] == jnp.arange(BANDS))
    rank = jax.vmap(ranks, 1, 1)(mine)
    behind = jnp.take_along_axis(tails + rank, by_worth[:, None], 1)[:, 0]
    ahead = heads[eviction.FIRST] - 1 - ranks(front)
    place, band = jnp.where(front, ahead, behind), jnp.where(front, eviction.FIRST, by_worth)
    ring_at = _ring_first(config, pool)[band] + place % capacity
    nth = ranks(listed)
    counters, stamps = _stamps(state, nth, listed.sum(dtype=jnp.int32))
    bare_count, front_count = bare.sum(dtype=jnp.int32), front.sum(dtype=jnp.int32)
    stack_at = start + top + bare_count - 1 - ranks(bare)
    none_block, none_ring = config.total_blocks, state.ring.shape[0]
    # A keyless block forgets its stamp, or an entry from when it had keys would look live again.
    stamped = jnp.where(bare, 0, jnp.where(listed, stamps, rows[:, STAMP]))
    dropped = ids > 0 if drop is None else (ids > 0) & drop
    at = jnp.where(dropped | again, ids, none_block)
    changed = jnp.stack([rows[:, REF] - dropped, stamped], 1)
    pools = state.pools.at[pool, np.array([STACK_TOP, FREE_BLOCKS])].add(
        jnp.stack([bare_count, freed.sum(dtype=jnp.int32)])
    )
    pools = pools.at[pool, HEADS].add(-front_count * (jnp.arange(BANDS) == eviction.FIRST))
    return state._replace(
        blocks=state.blocks.at[at[:, None], np.array([REF, STAMP])].set(changed, mode="drop"),
        stack=state.stack.at[jnp.where(bare, stack_at, none_block)].set(ids, mode="drop"),
        ring=state.ring.at[jnp.where(listed, ring_at, none_ring)].set(jnp.stack([ids, stamps], -1), mode="drop"),
        pools=pools.at[pool, TAILS].add(mine.sum(0, dtype=jnp.int32)),
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


def before_reused_state(config: CacheConfig, state: CacheState, pool: Pool, count: jax.Array, most: int) -> jax.Array:
    """How many of `count` <= `most` blocks can be taken before a state that a hit was served from would be."""
    ids, got = jnp.zeros((most,), jnp.int32), jnp.minimum(state.pools[pool, STACK_TOP], count)
    return _in_order(config, state, pool, ids, got, count, before=STATE | REUSED)[2]


def free_keyless(config: CacheConfig, state: CacheState, pools: jax.Array, blocks: jax.Array) -> CacheState:
    """Move free blocks that have lost their last key from the rings to the stacks. pools, blocks: i32[n], 0: none."""

    def read(state):
        rows = state.blocks[blocks]
        bare = (blocks > 0) & (rows[:, REF] == 0) & (rows[:, STAMP] > 0) & (rows[:, PLACES:].max(1, initial=0) == 0)
        return bare, state.pools[pools, STACK_TOP]

    bare, top = read_first(read, state)
    lane = jnp.arange(blocks.shape[0])
    earlier = lane[None, :] < lane[:, None]
    bare &= ~((blocks[:, None] == blocks[None, :]) & earlier & bare[None, :]).any(1)
    nth = ((pools[:, None] == pools[None, :]) & earlier & bare[None, :]).sum(1, dtype=jnp.int32)
    outside = config.total_blocks
    at = jnp.where(bare, jnp.array(config.pool_offset, jnp.int32)[pools] + top + nth, outside)
    return state._replace(
        blocks=state.blocks.at[jnp.where(bare, blocks, outside), STAMP].set(0, mode="drop"),
        stack=state.stack.at[at].set(blocks, mode="drop"),
        pools=state.pools.at[pools, STACK_TOP].add(bare.astype(jnp.int32)),
    )


def compact(config: CacheConfig, state: CacheState) -> CacheState:
    """Drop the stale entries of rings that hold more than two per block; keep cursors small.

    A block becomes free at most twice in one transition, so called at the head of each transition
    this keeps the rings from overrunning.
    """
    due = is_due(config, state).astype(jnp.int32) * len(config.capacity) * BANDS
    lists = (state.pools, state.ring)
    pools, ring = jax.lax.fori_loop(0, due, lambda nth, lists: _compact(config, state.blocks, nth, *lists), lists)
    return state._replace(pools=pools, ring=ring)


def is_due(config: CacheConfig, state: CacheState) -> jax.Array:
    """Whether `compact` has something to do."""
    rooms = jnp.array(config.capacity, jnp.int32)[:, None]
    heads, tails = state.pools[:, HEADS], state.pools[:, TAILS]
    return ((tails - heads > 2 * rooms) | (heads >= RING_FACTOR * rooms) | (heads < 0)).any()


def _compact(
    config: CacheConfig, blocks: jax.Array, nth: jax.Array, pools: jax.Array, ring: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The nth ring, counted through all pools: what is live moves to its head, a window at a time."""
    pool, band = nth // BANDS, nth % BANDS
    count = jnp.array(config.capacity, jnp.int32)[pool]
    capacity, first = RING_FACTOR * count, _ring_first(config, pool)[band]
    head, tail = pools[pool, HEADS][band], pools[pool, TAILS][band]
    ahead = jnp.arange(_WINDOW, dtype=jnp.int32)

    def squeeze(carry):
        at, kept, ring = carry
        entries = ring[first + (at + ahead) % capacity]
        rows = blocks[entries[:, 0], :PLACES]
        live = (at + ahead < tail) & (rows[:, REF] == 0) & (rows[:, STAMP] == entries[:, 1])
        to = jnp.where(live, first + (kept + ranks(live)) % capacity, ring.shape[0])
        return at + _WINDOW, kept + live.sum(dtype=jnp.int32), ring.at[to].set(entries, mode="drop")

    crowded = tail - head > 2 * count
    start = (jnp.where(crowded, head, tail), jnp.where(crowded, head, tail), ring)
    _, tail, ring = jax.lax.while_loop(lambda carry: carry[0] < tail, squeeze, start)
    laps = head // capacity * capacity
    cursors = jnp.array([HEADS.start, TAILS.start], jnp.int32) + band
    return pools.at[pool, cursors].set(jnp.stack([head, tail]) - laps), ring
