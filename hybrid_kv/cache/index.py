"""The prefix index: key -> the block of every group that has this content, in buckets of eight with two choices.

Overflow rule: a key may lie in either of two buckets chosen by its own words; if both are full it
is not filed (the block stays usable, the prefix is not found) and the overflow counter rises. The
size chosen by `CacheConfig.index_buckets` keeps the load at a quarter at most. A search reads one word of each place of
the two buckets, and whole keys only where that word is right. Entries never move, so a block remembers the cells that
name it and eviction clears them without a search. An entry also remembers whether the
units filed behind it differ: there the requests that share its prefix have parted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import log
from hybrid_kv.cache.state import CHILD, DONE, OWNERS, PENDING_FROM, PENDING_STEP, PLACES, CacheState, read_first
from hybrid_kv.hashing import KEY_WORDS

WAYS = 8
FORKED = np.uint32(0xFFFFFFFF)


class Found(NamedTuple):
    """What is filed under keys [...]. place: -1 where there is nothing. blocks: i32[..., groups], 0: none.
    forked: requests part behind the unit."""

    place: jax.Array
    blocks: jax.Array
    forked: jax.Array


def cell(state: CacheState, place: jax.Array, group: jax.Array | int) -> jax.Array:
    """What a block remembers of the entry and group that name it, never 0."""
    return place * groups_of(state) + group + 1


def groups_of(state: CacheState) -> int:
    return state.entries.shape[-1] - OWNERS


def _tag(keys: jax.Array) -> jax.Array:
    return jnp.maximum(keys[..., 2], np.uint32(1))


def _places(state: CacheState, keys: jax.Array) -> jax.Array:
    """The sixteen places a key may lie in: i32[..., 16]."""
    buckets = np.uint32(state.tags.shape[0] // WAYS)
    both = (keys[..., :2] % buckets).astype(jnp.int32)
    return (both[..., None] * WAYS + jnp.arange(WAYS, dtype=jnp.int32)).reshape(*keys.shape[:-1], 2 * WAYS)


def _bits(marks: jax.Array) -> jax.Array:
    """bool[..., 16] -> u32[...]."""
    return (marks.astype(jnp.uint32) << jnp.arange(2 * WAYS, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def _nth(state: CacheState, keys: jax.Array, bits: jax.Array) -> jax.Array:
    """The place that the lowest bit stands for."""
    low = jax.lax.population_count((bits & (~bits + 1)) - 1).astype(jnp.int32)
    buckets = np.uint32(state.tags.shape[0] // WAYS)
    bucket = jnp.where(low < WAYS, keys[..., 0], keys[..., 1]) % buckets
    return bucket.astype(jnp.int32) * WAYS + (low & (WAYS - 1))


def _search(state: CacheState, keys: jax.Array, bits: jax.Array) -> jax.Array:
    """Place of every key, -1: none. bits: the places whose word is right, seldom more than one."""

    def unsure(carry):
        return (carry[0] > 0).any()

    def look(carry):
        bits, place = carry
        at = _nth(state, keys, bits)
        same = (bits > 0) & (state.entries[jnp.where(bits > 0, at, 0), :KEY_WORDS] == keys).all(-1)
        return jnp.where(same, 0, bits & (bits - 1)), jnp.where(same, at, place)

    return jax.lax.while_loop(unsure, look, (bits, jnp.full(bits.shape, -1, jnp.int32)))[1]


def find(state: CacheState, keys: jax.Array) -> Found:
    """Look keys up: u32[..., 4] -> `Found` of [...]."""
    marks = state.tags[_places(state, keys)] == _tag(keys)[..., None]
    place = _search(state, keys, _bits(marks))
    return _found(state, place)


def _found(state: CacheState, place: jax.Array) -> Found:
    rows = jnp.where((place >= 0)[..., None], state.entries[jnp.maximum(place, 0), CHILD:], 0)
    return Found(place, rows[..., 1:].astype(jnp.int32), rows[..., 0] == FORKED)


def locate(state: CacheState, keys: jax.Array) -> tuple[Found, jax.Array]:
    """What is filed under keys u32[..., 4], and where each lies or could be put: i32[...], -1: its places are full."""
    tags = state.tags[_places(state, keys)]
    place = _search(state, keys, _bits(tags == _tag(keys)[..., None]))
    empty = _bits(tags == 0)
    free = jnp.where(empty > 0, _nth(state, keys, empty), -1)
    return _found(state, place), jnp.where(place >= 0, place, free)


def put(
    state: CacheState, keys: jax.Array, groups: jax.Array, places: jax.Array, new: jax.Array, former: jax.Array,
    blocks: jax.Array, units: jax.Array, ok: jax.Array,
) -> CacheState:  # fmt: skip
    """File keys u32[n, 4] of groups at places for blocks, as the units-th key of each, where `ok`.

    new: the place was empty. former: the block that loses the key, 0: none. What writes to one cell or one empty place
    has to agree.
    """
    outside, none = state.blocks.shape[0], state.tags.shape[0]
    at = jnp.where(ok, places, none)
    fresh = jnp.where(ok & new, places, none)
    head = jnp.concatenate([keys, jnp.zeros_like(keys[:, :1])], 1)
    entries = state.entries.at[fresh, :OWNERS].set(head, mode="drop")
    entries = entries.at[at, OWNERS + groups].set(blocks.astype(jnp.uint32), mode="drop")
    lost = jnp.where(ok & (former > 0), former, outside)
    rows = jnp.concatenate([lost, jnp.where(ok, blocks, outside)])
    cells = jnp.concatenate([jnp.zeros_like(blocks), cell(state, places, groups)])
    named = state.blocks.at[rows, PLACES + jnp.concatenate([units, units])].set(cells, mode="drop")
    return state._replace(tags=state.tags.at[fresh].set(_tag(keys), mode="drop"), entries=entries, blocks=named)


def note_children(state: CacheState, parents: jax.Array, children: jax.Array, ok: jax.Array) -> CacheState:
    """Remember at the keys `parents`, where they are filed, that units `children` follow; a second one is a fork.

    parents, children: u32[n, 4]. ok: bool[n].
    """
    mark = jnp.clip(children[:, 1], 1, FORKED - 1)

    def read(state):
        place = find(state, parents).place
        before = state.entries[jnp.maximum(place, 0), CHILD]
        at = jnp.where(ok & (place >= 0), place, state.tags.shape[0])
        return at, jnp.where((before == 0) | (before == mark), mark, FORKED)

    at, after = read_first(read, state)
    noted = state.entries.at[at, CHILD].max(after, mode="drop")
    # Two that part in these very units.
    other = (at[:, None] == at[None, :]) & (mark[:, None] != mark[None, :])
    fork = jnp.where(other.any(1), at, state.tags.shape[0])
    return state._replace(entries=noted.at[fork, CHILD].set(FORKED, mode="drop"))


def pending(state: CacheState, blocks: jax.Array, units: jax.Array) -> jax.Array:
    """Whether the unit-th key of a block names content that a step still in flight writes: bool[...]."""

    return read_first(lambda state: _pending(state, blocks, units), state)


def _pending(state: CacheState, blocks: jax.Array, units: jax.Array) -> jax.Array:
    flying = state.blocks[blocks, PENDING_STEP] > state.counters[DONE]
    return flying & (units >= state.blocks[blocks, PENDING_FROM])


def told(state: CacheState, blocks: jax.Array, units: jax.Array) -> jax.Array:
    """Whether the log has told of these keys, should they be filed. Read together with what decides about the write
    that follows, see `read_first`."""
    return ~_pending(state, blocks, units) if log.is_kept(state) else jnp.zeros((), bool)


def forget(state: CacheState, blocks: jax.Array, units: jax.Array, ok: jax.Array) -> CacheState:
    """Drop the units-th keys of blocks i32[n], those there are. ok: bool[n]."""
    return _forget(state, blocks, units, ok)[0]


def _forget(
    state: CacheState, blocks: jax.Array, units: jax.Array, ok: jax.Array
) -> tuple[CacheState, jax.Array, jax.Array]:
    """The state, what was dropped bool[n], and first words of its keys u32[n, 4]."""
    groups = groups_of(state)

    def read(state):
        cells = jnp.where(ok, state.blocks[blocks, PLACES + units], 0) - 1
        keys = state.entries[jnp.maximum(cells, 0) // groups, :KEY_WORDS]
        return cells, keys, told(state, blocks, units)

    cells, keys, was_told = read_first(read, state)
    gone, place, group = cells >= 0, cells // groups, cells % groups
    if log.is_kept(state):
        state = log.removed(state, group, keys, blocks, units, gone & was_told)
    none = state.tags.shape[0]
    at = jnp.where(gone, place, none)
    entries = state.entries.at[at, OWNERS + group].set(np.uint32(0), mode="drop")
    empty = gone & (entries[jnp.minimum(at, none - 1), OWNERS:] == 0).all(-1)
    # True of every lane; it makes the writes wait for the reading, see `read_first`.
    at = jnp.where(read_first(lambda _: empty, state), place, none)
    state = state._replace(
        tags=state.tags.at[at].set(np.uint32(0), mode="drop"),
        entries=entries.at[at].set(np.uint32(0), mode="drop"),
        blocks=state.blocks.at[jnp.where(gone, blocks, state.blocks.shape[0]), PLACES + units].set(0, mode="drop"),
    )
    return state, gone, keys


def remove_blocks(state: CacheState, blocks: jax.Array) -> CacheState:
    """Drop every key of the given blocks (i32[n], 0: none) and remember them as evicted."""
    per_block = state.blocks.shape[1] - PLACES
    each = jnp.repeat(blocks, per_block)
    state, gone, keys = _forget(state, each, jnp.tile(jnp.arange(per_block), blocks.shape[0]), each > 0)
    size = state.ghosts.shape[0]
    at = jnp.where(gone, (keys[:, 0] % np.uint32(size)).astype(jnp.int32), size)
    return state._replace(ghosts=state.ghosts.at[at].set(keys[:, 1] | np.uint32(1), mode="drop"))


def was_evicted(state: CacheState, key: jax.Array) -> jax.Array:
    """Whether a key (u32[..., 4]) was evicted lately, as far as the ghosts remember."""
    size = np.uint32(state.ghosts.shape[0])
    return state.ghosts[(key[..., 0] % size).astype(jnp.int32)] == (key[..., 1] | np.uint32(1))
