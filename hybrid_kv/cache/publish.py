"""Filing keys for content that a committed step has written."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_kv.cache import index
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.pool import free_keyless
from hybrid_kv.cache.state import OVERFLOWED, PLACES, CacheState, RequestLayout, layout


def publish_units(config: CacheConfig, state: CacheState) -> CacheState:
    """File every hash unit that requests have computed since the last commit, in all append-only groups.

    Equal content is filed once. A later copy takes a key over unless it holds less of the block than
    the first: the longest copy owns the keys, among equals the one used last, so evicting an old copy
    never hides a newer one. Work grows with the number of new units only.
    """
    fields = layout(config)
    if not (config.prefix_caching and config.geometry.attention):
        return state
    done = state.requests[:, fields.COMPUTED] // config.unit
    fresh = jnp.maximum(done - state.requests[:, fields.PUBLISHED], 0)
    ends = jnp.cumsum(fresh)

    def file_unit(i, state):
        row = jnp.searchsorted(ends, i, side="right").astype(jnp.int32)
        unit = state.requests[row, fields.PUBLISHED] + i - (ends[row] - fresh[row])
        for position, group in enumerate(config.geometry.attention):
            per_block = config.units_per_block(group)
            column = unit // per_block
            block = state.tables[row, config.column_offset[position] + column]
            covered = jnp.minimum(done[row] - column * per_block, per_block)
            key = index.tag(state.keys[row, unit], group)
            state = _file(config, state, config.group_pool[group], key, block, unit % per_block, covered)
        return state

    state = jax.lax.fori_loop(0, ends[-1], file_unit, state)
    published = jnp.maximum(done, state.requests[:, fields.PUBLISHED])
    return state._replace(requests=state.requests.at[:, fields.PUBLISHED].set(published))


def publish_state(
    config: CacheConfig, state: CacheState, row: jax.Array, length: jax.Array, slots: jax.Array
) -> CacheState:
    """File a recurrent state of `length` tokens of a request, one slot per recurrent group.

    Nothing happens at length 0, or where the same prefix already has a state.
    """
    if not config.prefix_caching:
        return state
    unit = jnp.maximum(length // config.unit - 1, 0)
    for position, group in enumerate(config.geometry.recurrent):
        slot = jnp.where(length > 0, slots[position], 0)
        key = index.tag(state.keys[row, unit], group)
        state = _file(config, state, config.group_pool[group], key, slot, jnp.int32(0), jnp.int32(0))
    return state


def publish_turn_end(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """File the state of the last hash boundary of the generated text, if the request holds one.

    Not while a step in flight overwrites the slot: what it holds is then settled by nobody.
    """
    fields: RequestLayout = layout(config)
    request = state.requests[row]
    length = jnp.where(request[fields.EMIT_TURN] > 0, 0, request[fields.TURN])
    return publish_state(config, state, row, length, request[fields.turn_slot])


def _file(
    config: CacheConfig,
    state: CacheState,
    pool: int,
    key: jax.Array,
    block: jax.Array,
    unit: jax.Array,
    covered: jax.Array,
) -> CacheState:
    """File one key as the unit-th of `block` (0: nothing) unless another block holds more units."""
    found = index.locate(state.entries, key)
    units = jnp.arange(1, state.blocks.shape[1] - PLACES + 1, dtype=jnp.int32)
    held = jnp.where(state.blocks[found.block, PLACES:] > 0, units, 0).max()
    better = (found.block == 0) | ((found.block != block) & (covered >= held))
    full = (block > 0) & (found.place < 0)
    state = state._replace(counters=state.counters.at[OVERFLOWED].add(full.astype(jnp.int32)))
    ok = (block > 0) & (found.place >= 0) & better
    state = index.put(state, key, found.place, block, unit, ok)
    return free_keyless(config, state, pool, jnp.where(ok, found.block, 0))
