"""Content from a store outside the pools: what a waiting request waits for, where it is written, what came of it.

A load is one more writer. `restore` takes the blocks of a prefix for a waiting request and says which to write; once
the caller has written them `loaded` files what came in good order, and the request is admitted by an ordinary lookup
that finds it. Until then the blocks belong to the load, whatever becomes of the request. To load within a step, call
both before that step is planned: the device runs the load first.

A store that has rows but no state at a boundary has nothing to resume from there, so a prefix is only restored whole:
the rows of every group up to the length, and the state of every recurrent group at exactly it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import flights, pool
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.lookup import LOADS_FAILED, SKIP_READ, Here, here, longest_hit, window_start
from hybrid_kv.cache.publish import file_rows, publish_state
from hybrid_kv.cache.ranks import ranks
from hybrid_kv.cache.state import (
    ABANDONED,
    BROUGHT,
    DONE,
    LOADING,
    NOTHING,
    PLANNED,
    RUNNING,
    UNDECIDED,
    WAITING,
    CacheState,
    layout,
)
from hybrid_kv.cache.transitions import release


class Load(NamedTuple):
    """What to write, and when.

    tokens: length of the prefix (0: nothing is loaded). first i32[groups]: the token from which on rows are fetched,
    by group; for a recurrent group the length. tables i32[C]: of the groups with tables, columns side by side, the
    blocks to write, 0 for those that need not be. states i32[recurrent]. after: the step that must have run on the
    device before anything is written (0: none); ids count through all pools.
    """

    tokens: jax.Array
    first: jax.Array
    tables: jax.Array
    states: jax.Array
    after: jax.Array


def undecided(config: CacheConfig, state: CacheState, slot: jax.Array, yes: jax.Array) -> CacheState:
    """Say whether a store has yet to answer for a waiting request: it is not admitted meanwhile, others are."""
    fields = layout(config)
    request = state.requests[:, slot]
    free = (request[fields.STATUS] == WAITING) & (request[fields.LOAD] <= UNDECIDED)
    phase = jnp.where(yes, UNDECIDED, NOTHING)
    at = jnp.where(free, slot, config.max_requests)
    return state._replace(requests=state.requests.at[fields.LOAD, at].set(phase, mode="drop"))


def restore(config: CacheConfig, state: CacheState, slot: jax.Array, tokens: jax.Array) -> tuple[CacheState, Load]:
    """Take blocks for the first `tokens` tokens of a waiting request that a store has: (state, what to write).

    Refused, with the same state and a load of 0 tokens: a length that is no hit boundary, leaves nothing to compute or
    is no longer than what is here already; a request that does not wait, has a load, or was preempted and gets tokens
    of a step in flight; and one whose load and prefill do not fit beside what the prefills under way still need.
    """
    fields, geometry = layout(config), config.geometry
    state = pool.compact(config, state)
    request = state.requests[:, slot]
    known = request[fields.KNOWN]
    local = here(config, state, state.keys[slot], known)
    fine = (tokens % geometry.hit_unit == 0) & (tokens > local.hit) & (tokens <= longest_hit(config, known))
    fine &= (request[fields.STATUS] == WAITING) & (request[fields.LOAD] <= UNDECIDED)
    # Tokens that rows in flight still give to a preempted request may end it, and its blocks with it.
    fine &= flights.expected(config, request) == known
    fine &= (request[fields.FLAGS] & SKIP_READ == 0) & jnp.asarray(config.prefix_caching)
    parts = [_part(config, index, local, known, tokens) for index in geometry.paged]
    need = jnp.zeros((len(config.pool_blocks),), jnp.int32)
    for index, part in zip(geometry.paged, parts, strict=True):
        need = need.at[config.group_pool[index]].add(part.blocks + pool.unreferenced(state, part.kept))
    for index in geometry.recurrent:
        need = need.at[config.group_pool[index]].add(2)
    ok = fine & pool.fits(state, list(need), _reserved(config, state))
    # What is kept is held in all groups before anything is taken.
    for index, part in zip(geometry.paged, parts, strict=True):
        own = np.full(part.kept.shape, config.group_pool[index], np.int32)
        state = pool.touch(config, state, own, jnp.where(ok, part.kept, 0))
    kept, written = [], []
    for index, part in zip(geometry.paged, parts, strict=True):
        write = part.write & ok
        count, most = write.sum(dtype=jnp.int32), write.shape[0]
        state, ids = pool.take(config, state, config.group_pool[index], count, most)
        kept.append(part.kept)
        written.append(jnp.where(write, ids[ranks(write)], 0))
    states = jnp.zeros((len(geometry.recurrent),), jnp.int32)
    if geometry.recurrent:
        pools = [config.group_pool[index] for index in geometry.recurrent]
        state, ids = pool.take_each(config, state, pools, ok.astype(jnp.int32), 1)
        states = ids[:, 0]
    tables = jnp.concatenate(written) if written else jnp.zeros_like(state.tables[slot])
    held = jnp.where(tables > 0, tables, jnp.concatenate(kept)) if kept else tables
    request = request.at[fields.read].set(states)
    request = request.at[jnp.array([fields.LOAD, fields.LOADED])].set(jnp.stack([jnp.int32(LOADING), tokens]))
    at = jnp.where(ok, slot, config.max_requests)
    state = state._replace(
        requests=state.requests.at[:, at].set(request, mode="drop"), tables=state.tables.at[at].set(held, mode="drop")
    )
    by_group = dict(zip(geometry.paged, (part.first for part in parts), strict=True))
    first = [by_group.get(index, tokens) for index in range(len(geometry.groups))]
    flying = state.counters[PLANNED] > state.counters[DONE]
    return state, Load(
        tokens=jnp.where(ok, tokens, 0),
        first=jnp.where(ok, jnp.stack(first), 0),
        tables=tables,
        states=states,
        after=jnp.where(ok & flying, state.counters[PLANNED], 0),
    )


class _Part(NamedTuple):
    """A load's share of one group with a table. first: the token from which on it is fetched. kept i32[columns]: blocks
    in front of that. write bool[columns]: columns to take and write. blocks: these and what the prefill takes behind.
    """

    first: jax.Array
    kept: jax.Array
    write: jax.Array
    blocks: jax.Array


def _part(config: CacheConfig, index: int, local: Here, known: jax.Array, tokens: jax.Array) -> _Part:
    group = config.group(index)
    lane = jnp.arange(config.columns[config.geometry.paged.index(index)])
    first, kept = _first(config, index, tokens), jnp.zeros(lane.shape, jnp.int32)
    if group.kind.append_only:
        whole = jnp.minimum(local.reach, tokens) // group.block
        first, kept = whole * group.block, jnp.where(lane < whole, local.tables[index], 0)
    write = (lane >= first // group.block) & (lane * group.block < tokens)
    end = jnp.minimum(known + config.slots_ahead, config.max_context)
    behind = jnp.maximum(-(-end // group.block) - -(-tokens // group.block), 0)
    # Where the load ends inside a block, the prefill copies that.
    blocks = write.sum(dtype=jnp.int32) + behind + (tokens % group.block > 0)
    if group.kind.windowed:
        blocks = jnp.minimum(blocks, config.window_columns(index))
    return _Part(first, kept, write, blocks)


def _reserved(config: CacheConfig, state: CacheState) -> jax.Array:
    """Blocks that prefills under way, loading ones included, still need: i32[pools]."""
    fields, requests = layout(config), state.requests
    loads = (requests[fields.LOAD] == LOADING) | (requests[fields.LOAD] == BROUGHT)
    live = loads | (requests[fields.STATUS] == RUNNING)
    end = jnp.minimum(flights.expected(config, requests) + config.slots_ahead, config.max_context)
    total = jnp.zeros((len(config.pool_blocks),), jnp.int32)
    for position, index in enumerate(config.geometry.paged):
        block = config.group(index).block
        held = jnp.where(loads, -(-requests[fields.LOADED] // block), requests[fields.columns][position])
        more = jnp.maximum(-(-end // block) - held, 0)
        if config.group(index).kind.windowed:
            more = jnp.minimum(more, config.window_columns(index))
        total = total.at[config.group_pool[index]].add(jnp.where(live, more, 0).sum(dtype=jnp.int32))
    for index in config.geometry.recurrent:
        total = total.at[config.group_pool[index]].add(loads.sum(dtype=jnp.int32))
    return total


def loaded(config: CacheConfig, state: CacheState, slot: jax.Array, good: jax.Array) -> CacheState:
    """A load is through, and nothing writes to its blocks any more: also when it was given up.

    good i32[groups]: tokens of every group that arrived in good order, from the first on. What is good is filed; a
    failure in one group cuts the hit for all of them. The request is not one to `restore` for again if anything failed.
    """
    fields, geometry = layout(config), config.geometry
    state = pool.compact(config, state)
    request = state.requests[:, slot]
    under_way = (request[fields.LOAD] == LOADING) | (request[fields.LOAD] == ABANDONED)
    length = jnp.where(under_way, request[fields.LOADED], 0)
    good = jnp.minimum(jnp.asarray(good, jnp.int32), length)
    if geometry.paged:
        first = [_first(config, index, length) for index in geometry.paged]
        state = file_rows(config, state, slot, jnp.stack(first), good[jnp.array(geometry.paged)])
    states = request[fields.read]
    whole = jnp.ones((), bool)
    for index in geometry.recurrent:
        whole &= good[index] >= length
    state = publish_state(config, state, slot, jnp.where(whole, length, 0), states)
    failed = under_way & (good < length).any()
    flags = state.requests[fields.FLAGS, slot] | jnp.where(failed, LOADS_FAILED, 0)
    phase = jnp.where(under_way & (request[fields.LOAD] == LOADING), BROUGHT, request[fields.LOAD])
    columns = jnp.array([fields.LOAD, fields.FLAGS])
    state = state._replace(requests=state.requests.at[columns, slot].set(jnp.stack([phase, flags])))
    gone = (under_way & (request[fields.LOAD] == ABANDONED)).astype(jnp.int32)
    return jax.lax.fori_loop(0, gone, lambda _, state: release(config, state, slot), state)


def _first(config: CacheConfig, group: int, length: jax.Array) -> jax.Array:
    """The first token of which a group's rows are there once a prefix is restored.

    Of whole blocks: a block that is found by one of its units has to hold all before it.
    """
    geometry = config.group(group)
    if geometry.kind.append_only:
        return jnp.zeros_like(length)
    return window_start(geometry, length) // geometry.block * geometry.block
