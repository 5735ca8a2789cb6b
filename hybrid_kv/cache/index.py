"""The prefix index: tagged key -> block, in buckets of eight with two choices.

Overflow rule: a key may lie in either of two buckets chosen by its own words; if both are full it
is not filed (the block stays usable, the prefix is not found) and the overflow counter rises. The
size chosen by `CacheConfig.index_buckets` keeps the load at a quarter at most. Places never move,
so a block remembers where its keys are and eviction clears them without a search. An entry also remembers whether the
units filed behind it differ: there the requests that share its prefix have parted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import log
from hybrid_kv.cache.state import CHILD, DONE, OWNER, PENDING_FROM, PENDING_STEP, PLACES, CacheState, read_first
from hybrid_kv.hashing import KEY_WORDS

WAYS = 8
FORKED = np.uint32(0xFFFFFFFF)
_GROUP_TAG = 0x9E3779B9


def tag(keys: jax.Array, group: int | jax.Array) -> jax.Array:
    """Keys as filed for one group: uint32[..., 4]. Equal content in two groups never meets."""
    mark = mark_of(jnp.asarray(group).astype(jnp.uint32))
    return keys.at[..., KEY_WORDS - 1].set(keys[..., KEY_WORDS - 1] ^ mark)


def mark_of(groups: Any) -> Any:
    """What the last word of a key is marked with, by exclusive or: uint32[...] -> uint32[...], host or device."""
    return (groups + np.uint32(1)) * np.uint32(_GROUP_TAG)


class Found(NamedTuple):
    """What is filed under tagged keys. block: 0 where there is none. forked: requests part behind the unit."""

    block: jax.Array
    forked: jax.Array


def _candidates(index: jax.Array, key: jax.Array) -> jax.Array:
    """The sixteen places a tagged key may lie in: int32[..., 16]."""
    buckets = np.uint32(index.shape[0] // WAYS)
    first = (key[..., 0] % buckets).astype(jnp.int32)
    second = (key[..., 1] % buckets).astype(jnp.int32)
    ways = jnp.arange(WAYS, dtype=jnp.int32)
    return jnp.concatenate([first[..., None] * WAYS + ways, second[..., None] * WAYS + ways], -1)


def _matches(entries: jax.Array, key: jax.Array) -> jax.Array:
    return (entries[..., :KEY_WORDS] == key[..., None, :]).all(-1) & (entries[..., OWNER] > 0)


def find(index: jax.Array, keys: jax.Array) -> Found:
    """Look tagged keys up: uint32[..., 4] -> `Found` of [...]."""
    entries = index[_candidates(index, keys)]
    matches = _matches(entries, keys)
    block = jnp.where(matches, entries[..., OWNER].astype(jnp.int32), 0).max(-1)
    return Found(block, (matches & (entries[..., CHILD] == FORKED)).any(-1))


class Place(NamedTuple):
    """Where a key lies or could be put."""

    place: jax.Array
    block: jax.Array


def locate(index: jax.Array, key: jax.Array) -> Place:
    """Place of one tagged key and its block; block 0 and an empty place if it is not filed yet.

    place is -1 when the key is absent and both buckets are full.
    """
    places = _candidates(index, key)
    entries = index[places]
    matches = _matches(entries, key)
    empty = entries[:, OWNER] == 0
    present = matches.any()
    pick = jnp.where(present, jnp.argmax(matches), jnp.argmax(empty))
    place = jnp.where(present | empty.any(), places[pick], -1)
    return Place(place, jnp.where(present, entries[pick, OWNER].astype(jnp.int32), 0))


def put(
    state: CacheState, key: jax.Array, group: jax.Array | int, place: jax.Array, block: jax.Array, unit: jax.Array,
    ok: jax.Array,
) -> CacheState:  # fmt: skip
    """File `key` of a group at `place` for `block` as its unit-th key; drops the place of a former owner.

    Nothing happens unless `ok`.
    """

    def read(state):
        before = state.entries[place]
        return before, _told(state, before[OWNER].astype(jnp.int32), unit)

    before, told = read_first(read, state)
    former = before[OWNER].astype(jnp.int32)
    outside = state.blocks.shape[0]
    if log.is_kept(state):
        state = log.removed(state, before, unit, ok & (former > 0) & told)
    blocks = state.blocks.at[jnp.where(ok & (former > 0), former, outside), PLACES + unit].set(0, mode="drop")
    blocks = blocks.at[jnp.where(ok, block, outside), PLACES + unit].set(place + 1, mode="drop")
    child = jnp.where(former > 0, before[CHILD], 0)
    words = [block.astype(jnp.uint32), child]
    if log.is_kept(state):
        words.append(jnp.asarray(group).astype(jnp.uint32))
    entry = jnp.concatenate([key, jnp.stack(words)])
    entries = state.entries.at[jnp.where(ok, place, state.entries.shape[0])].set(entry, mode="drop")
    return state._replace(entries=entries, blocks=blocks)


def note_child(state: CacheState, parent: jax.Array, child: jax.Array, ok: jax.Array) -> CacheState:
    """Remember at the tagged key `parent`, if it is filed, that the unit `child` follows; a second one is a fork."""
    mark = jnp.clip(child[1], 1, FORKED - 1)

    def read(state):
        found = locate(state.entries, parent)
        before = state.entries[found.place, CHILD]
        after = jnp.where((before == 0) | (before == mark), mark, FORKED)
        return jnp.where(ok & (found.block > 0), found.place, state.entries.shape[0]), after

    at, after = read_first(read, state)
    return state._replace(entries=state.entries.at[at, CHILD].set(after, mode="drop"))


def pending(state: CacheState, blocks: jax.Array, units: jax.Array) -> jax.Array:
    """Whether the unit-th key of a block names content that a step still in flight writes: bool[...]."""

    return read_first(lambda state: _pending(state, blocks, units), state)


def _pending(state: CacheState, blocks: jax.Array, units: jax.Array) -> jax.Array:
    row = state.blocks[blocks]
    return (row[..., PENDING_STEP] > state.counters[DONE]) & (units >= row[..., PENDING_FROM])


def _told(state: CacheState, blocks: jax.Array, units: jax.Array) -> jax.Array:
    """Whether the log has told of these keys, should they be filed. Read together with what decides about the write
    that follows, see `read_first`."""
    return ~_pending(state, blocks, units) if log.is_kept(state) else jnp.zeros((), bool)


def forget(state: CacheState, block: jax.Array, unit: jax.Array, ok: jax.Array) -> CacheState:
    """Drop the unit-th key of a block, if it has one."""

    def read(state):
        place = state.blocks[block, PLACES + unit] - 1
        entry = state.entries[jnp.maximum(place, 0)] if log.is_kept(state) else place
        return place, entry, _told(state, block, unit)

    place, entry, told = read_first(read, state)
    ok &= place >= 0
    if log.is_kept(state):
        state = log.removed(state, entry, unit, ok & told)
    entries = state.entries.at[jnp.where(ok, place, state.entries.shape[0])].set(np.uint32(0), mode="drop")
    blocks = state.blocks.at[jnp.where(ok, block, state.blocks.shape[0]), PLACES + unit].set(0, mode="drop")
    return state._replace(entries=entries, blocks=blocks)


def remove_blocks(state: CacheState, blocks: jax.Array) -> CacheState:
    """Drop every key of the given blocks (int32[n], 0: none) and remember them as evicted."""
    outside = state.entries.shape[0]
    units = jnp.arange(state.blocks.shape[1] - PLACES)

    def read(state):
        places = jnp.where(blocks[:, None] > 0, state.blocks[blocks, PLACES:], 0).reshape(-1) - 1
        # Two words make the fingerprint; a log is told of whole entries.
        keys = state.entries[jnp.maximum(places, 0), : None if log.is_kept(state) else 2]
        return places, keys, _told(state, blocks[:, None], units)

    places, keys, told = read_first(read, state)
    by_block = places.reshape(blocks.shape[0], -1) >= 0
    keyed = by_block.any(-1)
    if log.is_kept(state):
        told &= by_block
        state = log.removed(state, keys.reshape(*told.shape, -1), units, told)
    ghost_at = jnp.where(places >= 0, (keys[:, 0] % np.uint32(state.ghosts.shape[0])).astype(jnp.int32), outside)
    return state._replace(
        ghosts=state.ghosts.at[ghost_at].set(keys[:, 1] | np.uint32(1), mode="drop"),
        entries=state.entries.at[jnp.where(places >= 0, places, outside)].set(np.uint32(0), mode="drop"),
        blocks=state.blocks.at[jnp.where(keyed, blocks, state.blocks.shape[0]), PLACES:].set(0, mode="drop"),
    )


def was_evicted(state: CacheState, key: jax.Array) -> jax.Array:
    """Whether a tagged key (uint32[..., 4]) was evicted lately, as far as the ghosts remember."""
    size = np.uint32(state.ghosts.shape[0])
    return state.ghosts[(key[..., 0] % size).astype(jnp.int32)] == (key[..., 1] | np.uint32(1))
