"""The next token of every decoding request, and the drafts it verifies, all requests at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_kv.cache import earnings, flights, pool
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import GUARD, RUNNING, SHORT, SKIPPED_STATES, TURN_END, WAITING, CacheState, layout


def decodes_fit(config: CacheConfig, state: CacheState) -> jax.Array:
    """Whether the free blocks suffice for all decodes of this step."""
    return _fit(config, state, _drafts(config, state))


def schedule_decodes(config: CacheConfig, state: CacheState) -> CacheState:
    """Schedule every request whose prompt is done, if blocks suffice for all of them.

    Drafts are verified as far as the budget goes, lowest slot first, and not at all in a step in which their rows would
    find no blocks; the tokens themselves always fit the budget.
    """
    fields = layout(config)
    drafts = _drafts(config, state)
    rows = _decoding(config, state) & _fit(config, state, drafts)
    drafts = jnp.where(rows, drafts, 0)
    state = _extend_tables(config, state, rows, drafts)
    state, emit = _keep_turn_end(config, state, rows, drafts)
    requests, place = state.requests, flights.newest(config, state)
    before, one = flights.at(config, requests, place), rows.astype(jnp.int32)
    row = before._replace(scheduled=one + drafts, verifying=drafts, promised=one + drafts, emit_turn=emit)
    row = jax.tree.map(lambda new, old: jnp.where(rows.reshape((-1,) + (1,) * (old.ndim - 1)), new, old), row, before)
    asked = jnp.where(rows, 0, requests[:, fields.DRAFTS])
    requests = flights.put(config, requests, place, row).at[:, fields.DRAFTS].set(asked)
    return state._replace(requests=requests)


def _decoding(config: CacheConfig, state: CacheState) -> jax.Array:
    fields = layout(config)
    requests = state.requests
    start = flights.planned(config, requests)
    last_token = (start == flights.expected(config, requests) - 1) & (start >= requests[:, fields.PROMPT])
    return last_token & flights.has_work(config, state)


def _drafts(config: CacheConfig, state: CacheState) -> jax.Array:
    """Draft tokens that every decoding request verifies: i32[R]."""
    fields = layout(config)
    rows = _decoding(config, state)
    if not config.max_drafts:
        return jnp.zeros(rows.shape, jnp.int32)
    room = config.max_context - flights.expected(config, state.requests)
    asked = jnp.where(rows, jnp.clip(jnp.minimum(state.requests[:, fields.DRAFTS], room), 0, config.max_drafts), 0)
    newest = flights.at(config, state.requests, flights.newest(config, state))
    taken = newest.scheduled.sum(dtype=jnp.int32) + rows.sum(dtype=jnp.int32)
    before = jnp.cumsum(asked) - asked
    drafts = jnp.clip(config.token_budget - taken - before, 0, asked)
    return jnp.where(_fit(config, state, drafts), drafts, 0)


def _fit(config: CacheConfig, state: CacheState, drafts: jax.Array) -> jax.Array:
    """Whether the free blocks suffice for all decodes and these drafts."""
    fields = layout(config)
    need = [jnp.int32(0)] * len(config.pool_blocks)
    for position, group in enumerate(config.geometry.paged):
        fresh = _upto(config, state, position, drafts) - state.requests[:, fields.columns][:, position]
        need[config.group_pool[group]] += fresh.sum(dtype=jnp.int32)
    return pool.fits(state, need)


def _upto(config: CacheConfig, state: CacheState, position: int, drafts: jax.Array) -> jax.Array:
    """Columns that every decoding request must have in a group with a table: i32[R]."""
    fields = layout(config)
    block = config.group(config.geometry.paged[position]).block
    end = jnp.minimum(flights.planned(config, state.requests) + 1 + drafts + config.slots_ahead, config.max_context)
    held = state.requests[:, fields.columns][:, position]
    return jnp.where(_decoding(config, state), jnp.maximum(-(-end // block), held), held)


def _extend_tables(config: CacheConfig, state: CacheState, rows: jax.Array, drafts: jax.Array) -> CacheState:
    fields = layout(config)
    lane = jnp.arange(config.max_requests)
    uptos = [_upto(config, state, position, drafts) for position in range(len(config.geometry.paged))]
    for position, group in enumerate(config.geometry.paged):
        held = state.requests[:, fields.columns][:, position]
        fresh = jnp.where(rows, uptos[position] - held, 0)
        each = -(-(config.max_append + config.slots_ahead) // config.group(group).block) + 1
        count, most = fresh.sum(dtype=jnp.int32), each * config.max_requests
        state, ids = pool.take(config, state, config.group_pool[group], count, most)
        before = jnp.cumsum(fresh) - fresh
        tables = state.tables
        for nth in range(each):
            at = jnp.where(nth < fresh, config.column_offset[position] + held + nth, tables.shape[1])
            tables = tables.at[lane, at].set(ids[jnp.minimum(before + nth, most - 1)], mode="drop")
        requests = state.requests.at[:, fields.columns.start + position].add(fresh)
        state = state._replace(tables=tables, requests=requests)
    return state


def _keep_turn_end(
    config: CacheConfig, state: CacheState, rows: jax.Array, drafts: jax.Array
) -> tuple[CacheState, jax.Array]:
    """Let decodes that may complete a hit unit save their state in their own turn-end slots: (state, i32[R] last
    boundary to save, 0: none).

    Boundaries overwrite the slots in turn, and one is filed when the request ends: only then is the last boundary
    known. Slots are optional: they displace no state that was reused, and are given only if a
    state stays free for each request that waits, and for one that may come; else the boundary is skipped.
    """
    fields = layout(config)
    if not (config.prefix_caching and config.geometry.recurrent):
        return state, jnp.zeros_like(drafts)
    end = flights.planned(config, state.requests) + 1 + drafts
    # Where the row starts if all drafts in flight are refused.
    start = end - 1 - drafts - flights.every(config, state.requests).verifying.sum(-1)
    boundary = end // config.geometry.hit_unit * config.geometry.hit_unit
    crossing = rows & (boundary > start) & (state.policy[TURN_END] > 0)
    without = state.requests[:, fields.turn_slot.start] == 0
    crossing &= ~without | earnings.is_worth_saving(config, state, earnings.TURN, state.requests[:, fields.SEQ])
    lacks = crossing & without
    waiting = (state.requests[:, fields.STATUS] == WAITING).sum(dtype=jnp.int32)
    idle = (state.requests[:, fields.STATUS] != RUNNING).any().astype(jnp.int32)
    most = fields.turns * config.max_requests
    wanted = fields.turns * lacks.sum(dtype=jnp.int32)
    unreused = unreused_states(config, state, wanted, most)
    room = jnp.minimum(spare_states(config, state) - jnp.maximum(waiting, idle), unreused)
    room = jnp.where(state.counters[SHORT] > 0, 0, room)
    granted = lacks & (fields.turns * jnp.cumsum(lacks.astype(jnp.int32)) <= room)
    count = fields.turns * granted.sum(dtype=jnp.int32)
    nth = fields.turns * jnp.maximum(jnp.cumsum(granted.astype(jnp.int32)) - 1, 0)
    for position, group in enumerate(config.geometry.recurrent):
        state, ids = pool.take(config, state, config.group_pool[group], count, most)
        for turn in range(fields.turns):
            column = fields.turn_slot.start + turn * fields.recurrent + position
            slots = jnp.where(granted, ids[nth + turn], state.requests[:, column])
            state = state._replace(requests=state.requests.at[:, column].set(slots))
    saved = crossing & (granted | ~lacks)
    skipped = (lacks & ~granted).sum(dtype=jnp.int32)
    counters = state.counters.at[SKIPPED_STATES].add(skipped)
    return state._replace(counters=counters), jnp.where(saved, boundary, 0)


def spare_states(config: CacheConfig, state: CacheState) -> jax.Array:
    """States, one slot in each recurrent group, that could be taken now without preempting anyone."""
    pools = [config.group_pool[group] for group in config.geometry.recurrent]
    spare = [pool.free_blocks(state, p) // pools.count(p) for p in sorted(set(pools))]
    return jnp.stack(spare).min()


def unreused_states(config: CacheConfig, state: CacheState, count: jax.Array, most: int) -> jax.Array:
    """States, `count` <= `most` at most, that could be taken without displacing one that a hit was served from, if
    those are guarded."""
    pools = [config.group_pool[group] for group in config.geometry.recurrent]
    guarded, free = state.policy[GUARD] > 0, []
    for p in sorted(set(pools)):
        wanted, times = jnp.where(guarded, count, 0), pools.count(p)
        free.append(pool.before_reused_state(config, state, p, wanted * times, most * times) // times)
    return jnp.where(guarded, jnp.stack(free).min(), count)
