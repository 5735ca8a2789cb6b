"""Filing keys: under which key a block is found from now on, many at once.

Equal content is filed once. A later copy takes a key over unless it holds less of the block than
the first: the longest copy owns the keys, among equals the one used last, so evicting an old copy
never hides a newer one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_kv.cache import index, log
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.pool import free_keyless
from hybrid_kv.cache.state import (
    BITS,
    DONE,
    KEPT,
    OVERFLOWED,
    PENDING_FROM,
    PENDING_STEP,
    PLACES,
    PLANNED,
    CacheState,
    read_first,
)


class Items(NamedTuple):
    """Keys to file, [n] each. pool: of the group. key, parent: u32[n, 4], that of the unit before (zeros: none).
    block: 0 for nothing to file. unit: the how many-th of the block. covered: units that the block will hold. ok: bool.
    """

    group: jax.Array
    pool: jax.Array
    key: jax.Array
    parent: jax.Array
    block: jax.Array
    unit: jax.Array
    covered: jax.Array
    ok: jax.Array


class _Before(NamedTuple):
    """What is true before a round of filing."""

    place: jax.Array
    new: jax.Array
    former: jax.Array
    better: jax.Array
    told: jax.Array
    kept: jax.Array
    first: jax.Array


def file(config: CacheConfig, state: CacheState, items: Items, pending: bool) -> tuple[CacheState, jax.Array]:
    """File keys: (state, which were). pending: the content is not written yet; then it takes over nothing.

    In rounds that each go by what is filed when they begin: where two want one place, the latter has its turn in the
    next one.
    """

    def more(carry):
        return carry[1].any()

    def one_round(carry):
        state, left, filed = carry
        before = read_first(lambda state: _before(state, items, pending), state)
        wanted = left & (items.block > 0)
        full = (wanted & (before.place < 0)).sum(dtype=jnp.int32)
        wanted &= (before.place >= 0) & before.better
        now = wanted & ~_taken_by_earlier(items, before.place, wanted)
        state = state._replace(counters=state.counters.at[OVERFLOWED].add(full))
        state = _file_round(config, state, items, before, now, pending)
        return state, wanted & ~now, filed | now

    state, _, filed = jax.lax.while_loop(more, one_round, (state, items.ok, jnp.zeros_like(items.ok)))
    return state, filed


def _before(state: CacheState, items: Items, pending: bool) -> _Before:
    found, place = index.locate(state, items.key)
    former = jnp.take_along_axis(found.blocks, items.group[:, None], 1)[:, 0]
    units = jnp.arange(1, state.blocks.shape[1] - PLACES + 1, dtype=jnp.int32)
    rows = state.blocks[former]
    held = jnp.where(rows[:, PLACES:] > 0, units, 0).max(1)
    takes_over = (former != items.block) & (items.covered >= held)
    flying = state.blocks[items.block, PENDING_STEP] > state.counters[DONE]
    return _Before(
        place=place,
        new=found.place < 0,
        former=former,
        better=(former == 0) if pending else (former == 0) | takes_over,
        told=index.told(state, former, items.unit),
        kept=state.blocks[items.block, BITS] | (rows[:, BITS] & KEPT),
        # Names of several steps in flight: all are of the last of them, until a commit confirms some.
        first=jnp.where(flying, state.blocks[items.block, PENDING_FROM], jnp.iinfo(jnp.int32).max),
    )


def _taken_by_earlier(items: Items, place: jax.Array, wanted: jax.Array) -> jax.Array:
    """Whether an earlier item wants the same place, be it for another key or for another block of the same group."""
    lane = jnp.arange(place.shape[0])
    same = (place[:, None] == place[None, :]) & wanted[None, :] & (lane[None, :] < lane[:, None])
    one_key = (items.key[:, None] == items.key[None, :]).all(-1)
    return (same & ~(one_key & (items.group[:, None] != items.group[None, :]))).any(1)


def _file_round(
    config: CacheConfig, state: CacheState, items: Items, before: _Before, now: jax.Array, pending: bool
) -> CacheState:
    former = jnp.where(now, before.former, 0)
    if log.is_kept(state):
        state = log.removed(state, items.group, items.key, former, items.unit, (former > 0) & before.told)
    state = index.put(state, items.key, items.group, before.place, before.new, former, items.block, items.unit, now)
    if log.is_kept(state) and not pending:
        state = log.stored(state, items.group, items.key, items.parent, items.block, items.unit, now)
    at = jnp.where(now, items.block, config.total_blocks)
    if pending:
        blocks = state.blocks.at[at, PENDING_FROM].set(before.first, mode="drop")
        blocks = blocks.at[at, PENDING_FROM].min(items.unit, mode="drop")
        return state._replace(blocks=blocks.at[at, PENDING_STEP].set(state.counters[PLANNED], mode="drop"))
    if any(group.kind.windowed for group in config.geometry.groups):
        # Content that somebody keeps stays kept.
        state = state._replace(blocks=state.blocks.at[at, BITS].set(before.kept, mode="drop"))
    losers = (former > 0).any().astype(jnp.int32)
    return jax.lax.fori_loop(0, losers, lambda _, state: free_keyless(config, state, items.pool, former), state)
