"""Blocks of windowed groups that no later token reads: given back, and findable only where resuming needs them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_kv.cache import index, pool
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.lookup import named_units, window_start
from hybrid_kv.cache.loops import for_rows
from hybrid_kv.cache.publish import file_again
from hybrid_kv.cache.state import BITS, INTERVAL, KEEP_WINDOWS, KEPT, REF, TURN_END, CacheState, layout
from hybrid_kv.geometry import GroupGeometry


def leave_windows(config: CacheConfig, state: CacheState, rows: jax.Array) -> CacheState:
    """Give back, for the marked requests (bool[R]), the blocks that their next token does not read."""
    fields = layout(config)
    for position, group in enumerate(config.geometry.paged):
        geometry = config.group(group)
        if not geometry.kind.windowed:
            continue
        column = fields.left.start + position
        first = window_start(geometry, state.requests[fields.COMPUTED]) // geometry.block
        leaving = rows & (first > state.requests[column])

        def leave(config, state, row, first=first, position=position):
            return part(config, state, row, position, first[row])

        state = for_rows(config, leaving, leave, state)
    return state


def part(config: CacheConfig, state: CacheState, row: jax.Array, position: int, stop: jax.Array) -> CacheState:
    """Drop a request's windowed blocks before column `stop`, last column first.

    Content that nobody will look for loses its keys, unless another request holds it too. A block that somebody will
    look for owns its keys from now on: a copy that was filed later could forget them.
    """
    fields, group = layout(config), config.geometry.paged[position]
    offset, number = config.column_offset[position], config.group_pool[group]
    request = state.requests[:, row]
    first = request[fields.left][position]
    # Columns in use; the table is blank from here on.
    stop = jnp.minimum(stop, request[fields.columns][position])

    def drop(i, state):
        column = stop - 1 - i
        block = state.tables[row, offset + column]
        needed = _needed(config, state, state.requests[:, row], config.group(group), column)
        if config.prefix_caching:
            state = file_again(config, state, row, position, column, needed & (block > 0))
        bits = state.blocks[block, BITS] | jnp.where(needed, KEPT, 0)
        at = jnp.where(block > 0, block, config.total_blocks)
        state = state._replace(
            blocks=state.blocks.at[at, BITS].set(bits, mode="drop"),
            tables=state.tables.at[row, offset + column].set(0),
        )
        forgotten = (block > 0) & (state.blocks[block, REF] == 1) & (bits & KEPT == 0)
        units = jnp.arange(config.units_per_block(group), dtype=jnp.int32)
        state = index.forget(state, jnp.full_like(units, block), units, forgotten & (units >= 0))
        return pool.release(config, state, number, block)

    state = jax.lax.fori_loop(0, jnp.maximum(stop - first, 0), drop, state)
    column = fields.left.start + position
    return state._replace(requests=state.requests.at[column, row].set(jnp.maximum(first, stop)))


def _needed(
    config: CacheConfig, state: CacheState, request: jax.Array, group: GroupGeometry, column: jax.Array
) -> jax.Array:
    """Whether resuming at one of a request's points reads rows of a windowed block.

    Points: those of the placement, where a hit was served, the turn's end, and what retention adds. Where no state ties
    a hit to them, also one hit unit before: a prompt that is edited there resumes there.
    """
    fields, policy, step = layout(config), state.policy, config.geometry.hit_unit
    computed = request[fields.COMPUTED]
    named = (named_units(config, request[fields.KNOWN]) - config.longest_lag) * config.unit
    end_of_turn = jnp.minimum(computed, named) // step * step * policy[TURN_END]
    every = policy[INTERVAL]
    begin = column * group.block
    retained = (begin // jnp.maximum(every, 1) + 1) * every
    retained = jnp.where(retained <= computed, retained, 0)
    placed = request[fields.points]
    if not config.geometry.recurrent:
        placed = jnp.concatenate([placed, jnp.maximum(placed - step, 0)])
    points = jnp.concatenate([placed, jnp.stack([request[fields.HIT], end_of_turn, retained])])
    starts = window_start(group, points) // config.unit * config.unit
    reads = (points > begin) & (starts < begin + group.block)
    return reads.any() | (policy[KEEP_WINDOWS] > 0)
