"""Chunks of prompts: a bounded loop over the prefills of one step, oldest first.

Started prefills go first, then waiting requests in order of arrival. A chunk is as long as the
budget allows; no chunk is cut for a state, since the back end emits at any boundary inside it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_kv.cache import index, pool
from hybrid_kv.cache.checkpoints import wanted_boundaries
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.lookup import Hit, lookup, no_hit
from hybrid_kv.cache.state import PREEMPTED, RUNNING, SKIPPED_STATES, WAITING, CacheState, layout
from hybrid_kv.cache.transitions import preempt
from hybrid_kv.schedule.decode import newest_running, spare_states

_LATE = 1 << 30


class _Loop(NamedTuple):
    state: CacheState
    tried: jax.Array
    rows: jax.Array
    stop: jax.Array


def budget_left(config: CacheConfig, state: CacheState) -> jax.Array:
    """Tokens of this step that nobody was given yet."""
    return config.token_budget - state.requests[:, layout(config).SCHEDULED].sum(dtype=jnp.int32)


def schedule_prefills(config: CacheConfig, state: CacheState, preempted_before: jax.Array) -> CacheState:
    """Give the rest of the budget to prefills.

    preempted_before: the preemption counter at the start of the step; nobody is admitted in a step
    that preempted.
    """

    def more(loop: _Loop):
        return ~loop.stop & (loop.rows < config.max_prefills) & (budget_left(config, loop.state) > 0)

    def one(loop: _Loop):
        fields = layout(config)
        requests = loop.state.requests
        started = (requests[:, fields.STATUS] == RUNNING) & (requests[:, fields.SCHEDULED] == 0) & ~loop.tried
        calm = loop.state.counters[PREEMPTED] == preempted_before
        waiting = (requests[:, fields.STATUS] == WAITING) & ~loop.tried & calm
        order = jnp.where(started, requests[:, fields.SEQ], jnp.where(waiting, _LATE + requests[:, fields.SEQ], -1))
        order = jnp.where(order >= 0, order, jnp.iinfo(jnp.int32).max)
        row = jnp.argmin(order).astype(jnp.int32)
        exists = started.any() | waiting.any()
        admit = exists & ~started.any()
        state, done = _chunk(config, loop.state, row, admit, exists)
        return _Loop(state, loop.tried.at[row].set(True), loop.rows + done, ~exists | (admit & ~done))

    tried = jnp.zeros((config.max_requests,), bool)
    loop = _Loop(state, tried, jnp.int32(0), jnp.zeros((), bool))
    return jax.lax.while_loop(more, one, loop).state


def _chunk(config: CacheConfig, state: CacheState, row: jax.Array, admit: jax.Array, exists: jax.Array):
    """Schedule the next chunk of one request, all or nothing: (state, done)."""
    fields = layout(config)
    request = state.requests[row]
    known = request[fields.KNOWN]
    hit = _lookup_if(config, state, row, admit)
    start = jnp.where(admit, hit.hit, request[fields.COMPUTED])
    length = jnp.minimum(jnp.minimum(known - start, budget_left(config, state)), config.chunk_limit)
    end = start + length
    have = _columns_held(config, request, hit, admit)
    chunk_need = _demand(config, state, have, end, hit, admit)
    admit_need = _demand(config, state, have, known, hit, admit) if config.whole_prompts else chunk_need

    def lacking(state):
        newest = newest_running(config, state)
        later = state.requests[newest, fields.SEQ] > request[fields.SEQ]
        return exists & ~admit & later & ~_fits(state, chunk_need)

    state = jax.lax.while_loop(lacking, lambda s: preempt(config, s, newest_running(config, s)), state)
    done = exists & (length > 0) & jnp.where(admit, _fits(state, admit_need), _fits(state, chunk_need))
    state, request = _adopt(config, state, row, hit, admit & done)
    state, request = _extend(config, state, row, request, have, end, done)
    boundaries = wanted_boundaries(config, request[fields.PROMPT], known, hit.hit, hit.junction)
    boundaries = jnp.where(admit & done, boundaries, request[fields.boundaries])
    request = request.at[fields.boundaries].set(boundaries)
    state, request = _emissions(config, state, row, request, start, end, done)
    request = request.at[fields.SCHEDULED].set(length)
    at = jnp.where(done, row, config.max_requests)
    return state._replace(requests=state.requests.at[at].set(request, mode="drop")), done


def _lookup_if(config: CacheConfig, state: CacheState, row: jax.Array, admit: jax.Array) -> Hit:
    request, fields = state.requests[row], layout(config)
    return jax.lax.cond(
        admit,
        lambda: lookup(config, state, state.keys[row], request[fields.KNOWN], request[fields.FLAGS]),
        lambda: no_hit(config),
    )


def _columns_held(config: CacheConfig, request: jax.Array, hit: Hit, admit: jax.Array) -> list[jax.Array]:
    """Columns of every append-only group that need no new block: shared whole ones, or those in use."""
    fields = layout(config)
    return [
        jnp.where(admit, hit.hit // config.group(group).block, request[fields.columns][position])
        for position, group in enumerate(config.geometry.attention)
    ]


def _hit_blocks(config: CacheConfig, hit: Hit, position: int) -> jax.Array:
    first = config.column_offset[position]
    return hit.tables[first : first + config.columns[position]]


def _demand(config: CacheConfig, state: CacheState, have: list[jax.Array], end: jax.Array, hit: Hit, admit: jax.Array):
    """Free blocks every pool must have to hold this request up to `end` tokens."""
    need = [jnp.int32(0)] * len(config.pool_blocks)
    for position, group in enumerate(config.geometry.attention):
        block = config.group(group).block
        fresh = jnp.maximum((end + block - 1) // block - have[position], 0)
        woken = pool.unreferenced(state, _hit_blocks(config, hit, position))
        need[config.group_pool[group]] += fresh + jnp.where(admit, woken, 0)
    for position, group in enumerate(config.geometry.recurrent):
        woken = pool.unreferenced(state, hit.states[position : position + 1])
        need[config.group_pool[group]] += jnp.where(admit, 1 + woken, 0)
    return need


def _fits(state: CacheState, need: list[jax.Array]) -> jax.Array:
    return jnp.stack([count <= pool.free_blocks(state, p) for p, count in enumerate(need)]).all()


def _adopt(config: CacheConfig, state: CacheState, row: jax.Array, hit: Hit, ok: jax.Array):
    """Share the blocks of a hit with an admitted request: (state, request row).

    Everything of the hit is referenced in all groups before anything is taken for the request, so
    no allocation can evict it. A block that the hit ends in is pinned as the source of a copy.
    """
    fields = layout(config)
    request = state.requests[row]
    published = hit.hit // config.unit
    for position, group in enumerate(config.geometry.attention):
        block = config.group(group).block
        blocks = jnp.where(ok, _hit_blocks(config, hit, position), 0)
        state = pool.touch(config, state, config.group_pool[group], blocks)
        shared = hit.hit // block
        partial = ok & (hit.hit % block > 0)
        source = jnp.where(partial, blocks[jnp.minimum(shared, blocks.shape[0] - 1)], 0)
        lane = jnp.arange(blocks.shape[0])
        kept = jnp.where(lane < shared, blocks, 0)
        first = config.column_offset[position]
        table = jax.lax.dynamic_slice(state.tables, (row, first), (1, blocks.shape[0]))
        table = jnp.where(ok, kept[None], table)
        state = state._replace(tables=jax.lax.dynamic_update_slice(state.tables, table, (row, first)))
        columns, copy_source = fields.columns.start + position, fields.copy_source.start + position
        request = request.at[columns].set(jnp.where(ok, shared, request[columns]))
        request = request.at[copy_source].set(jnp.where(ok, source, request[copy_source]))
        published = jnp.minimum(published, shared * config.units_per_block(group))
    for position, group in enumerate(config.geometry.recurrent):
        slot = jnp.where(ok, hit.states[position], 0)
        state = pool.touch(config, state, config.group_pool[group], slot[None])
        request = request.at[fields.read.start + position].set(jnp.where(ok, slot, request[fields.read][position]))
    for position, group in enumerate(config.geometry.recurrent):
        state, ids = pool.take(config, state, config.group_pool[group], ok.astype(jnp.int32), 1)
        running = fields.running.start + position
        request = request.at[running].set(jnp.where(ok, ids[0], request[running]))
    names = jnp.array(
        [fields.STATUS, fields.COMPUTED, fields.HIT, fields.JUNCTION, fields.REASON, fields.PUBLISHED, fields.ADMITTED]
    )
    values = jnp.stack([jnp.int32(RUNNING), hit.hit, hit.hit, hit.junction, hit.reason, published, jnp.int32(1)])
    request = request.at[names].set(jnp.where(ok, values, request[names]))
    return state, request


def _extend(config, state: CacheState, row, request, have, end, ok):
    """Take the blocks that a chunk ending at `end` still lacks: (state, request row)."""
    fields = layout(config)
    longest = min(config.token_budget, config.chunk_limit)
    for position, group in enumerate(config.geometry.attention):
        block, columns = config.group(group).block, config.columns[position]
        most = min(longest // block + 2, columns)
        upto = (end + block - 1) // block
        fresh = jnp.where(ok, jnp.maximum(upto - have[position], 0), 0)
        state, ids = pool.take(config, state, config.group_pool[group], fresh, most)
        first = config.column_offset[position]
        table = jax.lax.dynamic_slice(state.tables, (row, first), (1, columns))[0]
        nth = jnp.arange(columns) - have[position]
        table = jnp.where((nth >= 0) & (nth < fresh), ids[jnp.clip(nth, 0, most - 1)], table)
        state = state._replace(tables=jax.lax.dynamic_update_slice(state.tables, table[None], (row, first)))
        column = fields.columns.start + position
        request = request.at[column].set(jnp.where(fresh > 0, upto, request[column]))
    return state, request


def _emissions(config: CacheConfig, state: CacheState, row, request, start, end, ok):
    """Give a slot to every wanted boundary inside the chunk that has no state yet: (state, request row)."""
    fields = layout(config)
    if not (config.geometry.recurrent and config.prefix_caching):
        return state, request
    wanted = request[fields.boundaries]
    inside = ok & (wanted > start) & (wanted <= end)
    keys = state.keys[row, jnp.maximum(wanted // config.unit - 1, 0)]
    filed = jnp.ones_like(inside)
    for group in config.geometry.recurrent:
        filed &= index.find(state.entries, index.tag(keys, group)) > 0
    inside &= ~filed
    chosen = inside & (jnp.cumsum(inside.astype(jnp.int32)) <= spare_states(config, state))
    count = chosen.sum(dtype=jnp.int32)
    nth = jnp.maximum(jnp.cumsum(chosen.astype(jnp.int32)) - 1, 0)
    slots = []
    for group in config.geometry.recurrent:
        state, ids = pool.take(config, state, config.group_pool[group], count, fields.wanted)
        slots.append(jnp.where(chosen, ids[nth], 0))
    request = request.at[fields.emit_position].set(jnp.where(chosen, wanted, 0))
    request = request.at[fields.emit_slot].set(jnp.stack(slots, -1).reshape(-1))
    skipped = (inside & ~chosen).sum(dtype=jnp.int32)
    return state._replace(counters=state.counters.at[SKIPPED_STATES].add(skipped)), request
