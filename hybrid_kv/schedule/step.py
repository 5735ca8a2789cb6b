"""The transition that decides one step: all decodes at once, then chunks of prompts one by one."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_kv.cache import flights, pool
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import (
    ACTIVE,
    BROUGHT,
    DONE,
    LAST_PREFILL,
    NOTHING,
    PLANNED,
    PREEMPTED,
    PREFILL_EVERY,
    RUNNING,
    SHORT,
    TIED,
    WAITING,
    CacheState,
    layout,
)
from hybrid_kv.cache.statistics import note_step
from hybrid_kv.cache.transitions import give_up_loads
from hybrid_kv.schedule.decode import decodes_fit, schedule_decodes
from hybrid_kv.schedule.order import (
    cached_shares,
    comes_after,
    first_of,
    first_to_start,
    last_running,
    note_overtaken,
    preempt_last,
)
from hybrid_kv.schedule.prefill import budget_left, chunk_fits, schedule_chunk


class _Loop(NamedTuple):
    """decoded: the decodes have had their turn. deferring: the step is left to them. tried: requests whose prefill has.
    rows: prefills planned. short: somebody lacks blocks. cached: f32[R], see `order.cached_shares`."""

    state: CacheState
    decoded: jax.Array
    deferring: jax.Array
    tried: jax.Array
    rows: jax.Array
    stop: jax.Array
    short: jax.Array
    cached: jax.Array


class _Next(NamedTuple):
    """The prefill whose turn it is. admit: it waits; else it has started."""

    row: jax.Array
    exists: jax.Array
    admit: jax.Array


def schedule(config: CacheConfig, state: CacheState) -> CacheState:
    """Decide what runs next; what was decided stands in the request rows until `commit` or `withdraw`.

    Started prefills go before waiting requests, each in the order of `schedule.order`; nobody is admitted in a step
    that preempted. A step without rows is none: nothing is in flight because of it, and there is nothing to commit.
    While as many steps are in flight as may be, nothing is planned.

    Progress: the first request that can run is given at least one token, because every decode costs
    one token, the budget covers all request slots, and later requests are preempted for earlier ones.
    """
    state = pool.compact(config, state)
    start, done = state.counters, state.counters[DONE]
    before = start[PREEMPTED]
    full = start[PLANNED] - done >= config.steps_in_flight
    state = state._replace(counters=start.at[PLANNED].add(1 - full.astype(jnp.int32)))
    no, nobody = jnp.zeros((), bool), jnp.zeros((config.max_requests,), bool)
    cached = cached_shares(config, state)
    loop = _Loop(state, no, _prefills_wait(config, state), nobody, jnp.int32(0), full, no, cached)
    loop = jax.lax.while_loop(lambda loop: ~loop.stop, lambda loop: _turn(config, loop, before), loop)
    # Whether requests lack blocks decides about the states that the next step saves.
    state = loop.state
    rows = flights.at(config, state.requests, flights.newest(config, state))
    nothing = full | (rows.scheduled == 0).all()
    counters = state.counters
    planned = start[PLANNED] + (~nothing).astype(jnp.int32)
    short = jnp.where(full, counters[SHORT], (loop.short | (counters[PREEMPTED] > before)).astype(jnp.int32))
    chunks = ~nothing & (rows.scheduled - rows.verifying > 1).any()
    last = jnp.where(chunks, planned, counters[LAST_PREFILL])
    names = jnp.array([PLANNED, SHORT, LAST_PREFILL])
    state = state._replace(counters=counters.at[names].set(jnp.stack([planned, short, last])))
    state = note_step(config, state, start, ~nothing)
    # Where nothing runs and nothing fits, what was brought for those who wait makes room.
    return give_up_loads(config, state, planned == done) if config.loads else state


def _prefills_wait(config: CacheConfig, state: CacheState) -> jax.Array:
    """Whether this step is left to those that decode."""
    fields, requests, last = layout(config), state.requests, state.counters[LAST_PREFILL]
    soon = (last > 0) & (state.counters[PLANNED] - last < state.policy[PREFILL_EVERY])
    decoding = flights.planned(config, requests) >= flights.expected(config, requests) - 1
    return soon & ((requests[fields.STATUS] == RUNNING) & decoding).any()


def _turn(config: CacheConfig, loop: _Loop, preempted_before: jax.Array) -> _Loop:
    """Make room by preemption if it is needed, then plan the decodes or one chunk.

    Both are loops of at most one round: a conditional would copy the state.
    """
    no = jnp.zeros((), bool)

    def prefill_lacks_room(state: CacheState) -> jax.Array:
        one = _next(config, loop, state, preempted_before)
        later = comes_after(config, state, last_running(config, state), one.row)
        return one.exists & ~one.admit & later & ~chunk_fits(config, state, one.row)

    def lacks_room(state: CacheState) -> jax.Array:
        # Of these two a conditional copies nothing: they only read.
        return jax.lax.cond(loop.decoded, prefill_lacks_room, lambda state: ~decodes_fit(config, state), state)

    def chunk(_, carry):
        state = carry[0]
        one = _next(config, loop, state, preempted_before)

        def give(_, carry):
            return tuple(schedule_chunk(config, carry[0], one.row, one.admit))

        state, done, waits, lacks = jax.lax.fori_loop(0, one.exists.astype(jnp.int32), give, (state, no, no, no))
        state = note_overtaken(config, state, one.row, done & one.admit)
        refused = one.exists & ~done & ~waits
        stop = ~one.exists | (refused & one.admit)
        short = refused & (lacks | (state.policy[TIED] == 0))
        return state, loop.tried.at[one.row].max(one.exists), done, short, stop

    state = jax.lax.while_loop(lacks_room, lambda state: preempt_last(config, state), loop.state)
    decodes, chunks = 1 - loop.decoded.astype(jnp.int32), loop.decoded.astype(jnp.int32)
    state = jax.lax.fori_loop(0, decodes, lambda _, state: schedule_decodes(config, state), state)
    state, tried, done, short, stop = jax.lax.fori_loop(0, chunks, chunk, (state, loop.tried, no, no, no))
    after = loop._replace(state=state, decoded=~no, tried=tried, rows=loop.rows + done, short=loop.short | short)
    stop |= (after.rows >= config.max_prefills) | (budget_left(config, state) <= 0)
    started, waiting = _candidates(config, after, state, preempted_before)
    return after._replace(stop=stop | ~(started | waiting).any())


def _candidates(
    config: CacheConfig, loop: _Loop, state: CacheState, preempted_before: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Prefills that may have their turn, as of `prefills`."""
    turn = ~loop.tried & ~loop.deferring
    started, waiting = prefills(config, state)
    return started & turn, waiting & turn & (state.counters[PREEMPTED] == preempted_before)


def prefills(config: CacheConfig, state: CacheState) -> tuple[jax.Array, jax.Array]:
    """Requests that could have a row besides those that have one in the step being planned: those that run, and those
    that wait, bool[R] each. Of the former some decode, until the decodes are planned."""
    fields = layout(config)
    status = state.requests[fields.STATUS]
    room = (status == RUNNING).sum(dtype=jnp.int32) < state.policy[ACTIVE]
    # What a preempted request has to compute is known once the rows in flight have given their tokens.
    ready = flights.every(config, state.requests).promised.sum(0) == 0
    ready &= (state.requests[fields.LOAD] == NOTHING) | (state.requests[fields.LOAD] == BROUGHT)
    return flights.has_work(config, state), (status == WAITING) & ready & room


def _next(config: CacheConfig, loop: _Loop, state: CacheState, preempted_before: jax.Array) -> _Next:
    started, waiting = _candidates(config, loop, state, preempted_before)
    admit = ~started.any()
    row = jnp.where(admit, first_to_start(config, state, waiting, loop.cached), first_of(config, state, started))
    return _Next(row, (started | waiting).any(), admit)
