"""The prefix index: tagged key -> block, in buckets of eight with two choices.

Overflow rule: a key may lie in either of two buckets chosen by its own words; if both are full it
is not filed (the block stays usable, the prefix is not found) and the overflow counter rises. The
size chosen by `CacheConfig.index_buckets` keeps the load at a quarter at most. Places never move,
so a block remembers where its keys are and eviction clears them without a search.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache.state import PLACES, CacheState
from hybrid_kv.hashing import KEY_WORDS

WAYS = 8
_GROUP_TAG = 0x9E3779B9


def tag(keys: jax.Array, group: int) -> jax.Array:
    """Keys as filed for one group: uint32[..., 4]. Equal content in two groups never meets."""
    mark = np.uint32(_GROUP_TAG * (group + 1) & 0xFFFFFFFF)
    return keys.at[..., KEY_WORDS - 1].set(keys[..., KEY_WORDS - 1] ^ mark)


def _candidates(index: jax.Array, key: jax.Array) -> jax.Array:
    """The sixteen places a tagged key may lie in: int32[..., 16]."""
    buckets = np.uint32(index.shape[0] // WAYS)
    first = (key[..., 0] % buckets).astype(jnp.int32)
    second = (key[..., 1] % buckets).astype(jnp.int32)
    ways = jnp.arange(WAYS, dtype=jnp.int32)
    return jnp.concatenate([first[..., None] * WAYS + ways, second[..., None] * WAYS + ways], -1)


def _matches(entries: jax.Array, key: jax.Array) -> jax.Array:
    return (entries[..., :KEY_WORDS] == key[..., None, :]).all(-1) & (entries[..., KEY_WORDS] > 0)


def find(index: jax.Array, keys: jax.Array) -> jax.Array:
    """Block of every tagged key, 0 where there is none: uint32[..., 4] -> int32[...]."""
    entries = index[_candidates(index, keys)]
    return jnp.where(_matches(entries, keys), entries[..., KEY_WORDS].astype(jnp.int32), 0).max(-1)


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
    empty = entries[:, KEY_WORDS] == 0
    present = matches.any()
    pick = jnp.where(present, jnp.argmax(matches), jnp.argmax(empty))
    place = jnp.where(present | empty.any(), places[pick], -1)
    return Place(place, jnp.where(present, entries[pick, KEY_WORDS].astype(jnp.int32), 0))


def put(
    state: CacheState, key: jax.Array, place: jax.Array, block: jax.Array, unit: jax.Array, ok: jax.Array
) -> CacheState:
    """File `key` at `place` for `block` as its unit-th key; drops the place of a former owner.

    Nothing happens unless `ok`.
    """
    former = state.entries[place, KEY_WORDS].astype(jnp.int32)
    outside = state.blocks.shape[0]
    blocks = state.blocks.at[jnp.where(ok & (former > 0), former, outside), PLACES + unit].set(0, mode="drop")
    blocks = blocks.at[jnp.where(ok, block, outside), PLACES + unit].set(place + 1, mode="drop")
    entry = jnp.concatenate([key, block.astype(jnp.uint32)[None]])
    entries = state.entries.at[jnp.where(ok, place, state.entries.shape[0])].set(entry, mode="drop")
    return state._replace(entries=entries, blocks=blocks)


def remove_blocks(state: CacheState, blocks: jax.Array) -> CacheState:
    """Drop every key of the given blocks (int32[n], 0: none) and remember them as evicted."""
    places = jnp.where(blocks[:, None] > 0, state.blocks[blocks, PLACES:], 0).reshape(-1) - 1
    outside = state.entries.shape[0]
    keys = state.entries[jnp.maximum(places, 0), :2]
    ghost_at = jnp.where(places >= 0, (keys[:, 0] % np.uint32(state.ghosts.shape[0])).astype(jnp.int32), outside)
    return state._replace(
        ghosts=state.ghosts.at[ghost_at].set(keys[:, 1] | np.uint32(1), mode="drop"),
        entries=state.entries.at[jnp.where(places >= 0, places, outside)].set(np.uint32(0), mode="drop"),
        blocks=state.blocks.at[jnp.where(blocks > 0, blocks, state.blocks.shape[0]), PLACES:].set(0, mode="drop"),
    )


def was_evicted(state: CacheState, key: jax.Array) -> jax.Array:
    """Whether a tagged key (uint32[..., 4]) was evicted lately, as far as the ghosts remember."""
    size = np.uint32(state.ghosts.shape[0])
    return state.ghosts[(key[..., 0] % size).astype(jnp.int32)] == (key[..., 1] | np.uint32(1))
