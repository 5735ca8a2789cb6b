"""One token for every decoding request, all of them at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_kv.cache import pool
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import RUNNING, SKIPPED_STATES, CacheState, layout
from hybrid_kv.cache.transitions import preempt


def newest_running(config: CacheConfig, state: CacheState) -> jax.Array:
    """The running request that arrived last: the first to be preempted."""
    fields = layout(config)
    running = state.requests[:, fields.STATUS] == RUNNING
    return jnp.argmax(jnp.where(running, state.requests[:, fields.SEQ], -1)).astype(jnp.int32)


def schedule_decodes(config: CacheConfig, state: CacheState) -> CacheState:
    """Schedule one token of every request whose prompt is done, preempting the newest while blocks lack."""

    def short(state):
        need = _new_columns(config, state)
        return jnp.stack([count > pool.free_blocks(state, p) for p, count in enumerate(need)]).any()

    def make_room(state):
        return preempt(config, state, newest_running(config, state))

    state = jax.lax.while_loop(short, make_room, state)
    state = _extend_tables(config, state)
    state = _keep_turn_end(config, state)
    fields = layout(config)
    return state._replace(
        requests=state.requests.at[:, fields.SCHEDULED].add(_decoding(config, state).astype(jnp.int32))
    )


def _decoding(config: CacheConfig, state: CacheState) -> jax.Array:
    fields = layout(config)
    requests = state.requests
    computed = requests[:, fields.COMPUTED]
    last_token = (computed == requests[:, fields.KNOWN] - 1) & (computed >= requests[:, fields.PROMPT])
    return (requests[:, fields.STATUS] == RUNNING) & last_token & (requests[:, fields.SCHEDULED] == 0)


def _lacks_column(config: CacheConfig, state: CacheState, position: int) -> jax.Array:
    """Which decoding requests step into a new block of an append-only group: bool[R]."""
    fields = layout(config)
    block = config.group(config.geometry.attention[position]).block
    column = state.requests[:, fields.COMPUTED] // block
    return _decoding(config, state) & (state.requests[:, fields.columns][:, position] <= column)


def _new_columns(config: CacheConfig, state: CacheState) -> list[jax.Array]:
    """Blocks every pool has to give for the decodes of this step."""
    need = [jnp.int32(0)] * len(config.pool_blocks)
    for position, group in enumerate(config.geometry.attention):
        lacking = _lacks_column(config, state, position).sum(dtype=jnp.int32)
        need[config.group_pool[group]] += lacking
    return need


def _extend_tables(config: CacheConfig, state: CacheState) -> CacheState:
    fields = layout(config)
    rows = jnp.arange(config.max_requests)
    for position, group in enumerate(config.geometry.attention):
        lacks = _lacks_column(config, state, position)
        column = state.requests[:, fields.COMPUTED] // config.group(group).block
        state, ids = pool.take(config, state, config.group_pool[group], lacks.sum(dtype=jnp.int32), config.max_requests)
        nth = jnp.maximum(jnp.cumsum(lacks.astype(jnp.int32)) - 1, 0)
        at = jnp.where(lacks, config.column_offset[position] + column, state.tables.shape[1])
        state = state._replace(
            tables=state.tables.at[rows, at].set(ids[nth], mode="drop"),
            requests=state.requests.at[:, fields.columns.start + position].add(lacks.astype(jnp.int32)),
        )
    return state


def _keep_turn_end(config: CacheConfig, state: CacheState) -> CacheState:
    """Let decodes that complete a hash unit save their state in their own turn-end slot.

    The slot is overwritten at every boundary and filed once, when the request ends: only then is
    the last boundary known. A slot is optional: it is given only if a state stays free for every
    request slot that runs nothing, so nobody ever waits for one; else the boundary is skipped.
    """
    fields = layout(config)
    if not (config.placement.turn_end and config.prefix_caching and config.geometry.recurrent):
        return state
    after = state.requests[:, fields.COMPUTED] + 1
    crossing = _decoding(config, state) & (after % config.unit == 0)
    lacks = crossing & (state.requests[:, fields.turn_slot.start] == 0)
    idle = (state.requests[:, fields.STATUS] != RUNNING).sum(dtype=jnp.int32)
    granted = lacks & (jnp.cumsum(lacks.astype(jnp.int32)) <= spare_states(config, state) - idle)
    count = granted.sum(dtype=jnp.int32)
    nth = jnp.maximum(jnp.cumsum(granted.astype(jnp.int32)) - 1, 0)
    for position, group in enumerate(config.geometry.recurrent):
        state, ids = pool.take(config, state, config.group_pool[group], count, config.max_requests)
        column = fields.turn_slot.start + position
        slots = jnp.where(granted, ids[nth], state.requests[:, column])
        state = state._replace(requests=state.requests.at[:, column].set(slots))
    saved = crossing & (granted | ~lacks)
    return state._replace(
        requests=state.requests.at[:, fields.EMIT_TURN].set(
            jnp.where(saved, after, state.requests[:, fields.EMIT_TURN])
        ),
        counters=state.counters.at[SKIPPED_STATES].add((lacks & ~granted).sum(dtype=jnp.int32)),
    )


def spare_states(config: CacheConfig, state: CacheState) -> jax.Array:
    """States, one slot in each recurrent group, that could be taken now without preempting anyone."""
    pools = [config.group_pool[group] for group in config.geometry.recurrent]
    spare = [pool.free_blocks(state, p) // pools.count(p) for p in set(pools)]
    return jnp.stack(spare).min()
