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
    zero_after,
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
from hybrid_kv.schedule.pieces import piece, reading_piece
from hybrid_kv.schedule.prefill import Choice, budget_left, choose_chunk, chunk_fits, schedule_chunk


class Turns(NamedTuple):
    """How far planning a step has come.

    start: i32[C] counters when it began. decoded: the decodes have had their turn. deferring: the step is left to them.
    tried: bool[R] requests whose prefill has. rows: prefills planned. stop: that is all. short: somebody lacks blocks.
    cached: f32[R], see `order.cached_shares`.
    """

    start: jax.Array
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

    def turn(carry):
        state, turns = carry
        state = make_room(config, state, turns)
        # Loops of at most one round: a conditional would copy the state.
        decodes, chunks = 1 - turns.decoded.astype(jnp.int32), turns.decoded.astype(jnp.int32)
        state, turns = jax.lax.fori_loop(0, decodes, lambda _, carry: decode_turn(config, *carry)[:2], (state, turns))
        return jax.lax.fori_loop(0, chunks, lambda _, carry: chunk_turn(config, *carry)[:2], (state, turns))

    state, turns = jax.lax.while_loop(lambda carry: ~carry[1].stop, turn, begin(config, state))
    state = finish(config, state, turns)
    return give_up_loads(config, state, is_idle(state)) if config.loads else state


@piece
def begin(config: CacheConfig, state: CacheState) -> tuple[CacheState, Turns]:
    """Open the next step. While as many are in flight as may be, it stops here."""
    state = pool.compact(config, state)
    start = state.counters
    full = start[PLANNED] - start[DONE] >= config.steps_in_flight
    state = state._replace(counters=start.at[PLANNED].add(1 - full.astype(jnp.int32)))
    no, nobody = jnp.zeros((), bool), jnp.zeros((config.max_requests,), bool)
    cached = cached_shares(config, state)
    return state, Turns(start, no, _prefills_wait(config, state), nobody, jnp.int32(0), full, no, cached)


@piece
def finish(config: CacheConfig, state: CacheState, turns: Turns) -> CacheState:
    """Close the step: what it was, and whether requests lack blocks, which decides about the states that the next one
    saves."""
    start, counters = turns.start, state.counters
    full = start[PLANNED] - start[DONE] >= config.steps_in_flight
    rows = flights.at(config, state.requests, flights.newest(config, state))
    nothing = full | (rows.scheduled == 0).all()
    planned = start[PLANNED] + (~nothing).astype(jnp.int32)
    short = jnp.where(full, counters[SHORT], (turns.short | (counters[PREEMPTED] > start[PREEMPTED])).astype(jnp.int32))
    chunks = ~nothing & (rows.scheduled - rows.verifying > 1).any()
    last = jnp.where(chunks, planned, counters[LAST_PREFILL])
    names = jnp.array([PLANNED, SHORT, LAST_PREFILL])
    state = state._replace(counters=counters.at[names].set(jnp.stack([planned, short, last])))
    return note_step(config, state, start, ~nothing)


def is_idle(state: CacheState) -> jax.Array:
    """Whether nothing runs and nothing fits: then what was brought for those who wait makes room."""
    return state.counters[PLANNED] == state.counters[DONE]


def _prefills_wait(config: CacheConfig, state: CacheState) -> jax.Array:
    """Whether this step is left to those that decode."""
    fields, requests, last = layout(config), state.requests, state.counters[LAST_PREFILL]
    soon = (last > 0) & (state.counters[PLANNED] - last < state.policy[PREFILL_EVERY])
    decoding = flights.planned(config, requests) >= flights.expected(config, requests) - 1
    return soon & ((requests[fields.STATUS] == RUNNING) & decoding).any()


def lacks_room(config: CacheConfig, state: CacheState, turns: Turns) -> jax.Array:
    """Whether whoever has the next turn needs blocks that somebody else has to give up."""

    def prefill_lacks_room(state: CacheState) -> jax.Array:
        return _prefill_lacks_room(config, state, _next(config, turns, state))

    # Of these two a conditional copies nothing: they only read.
    return jax.lax.cond(turns.decoded, prefill_lacks_room, lambda state: ~decodes_fit(config, state), state)


def _prefill_lacks_room(config: CacheConfig, state: CacheState, one: _Next) -> jax.Array:
    later = comes_after(config, state, last_running(config, state), one.row)
    return one.exists & ~one.admit & later & ~chunk_fits(config, state, one.row)


def make_room(config: CacheConfig, state: CacheState, turns: Turns) -> CacheState:
    """Preempt for whoever has the next turn."""
    return jax.lax.while_loop(
        lambda state: lacks_room(config, state, turns), lambda state: preempt_last(config, state), state
    )


def decode_turn(config: CacheConfig, state: CacheState, turns: Turns) -> tuple[CacheState, Turns, jax.Array]:
    """Plan the decodes: (state, turns, crowded); crowded: nothing is, somebody would have to give up blocks."""
    state, planned = schedule_decodes(config, state)
    after = _after(config, state, turns._replace(decoded=planned))
    return state, jax.tree.map(lambda old, new: jnp.where(planned, new, old), turns, after), ~planned


def chunk_turn(config: CacheConfig, state: CacheState, turns: Turns) -> tuple[CacheState, Turns, jax.Array]:
    """Plan one chunk, if there is one; as of `decode_turn`."""
    exists, crowded, choice = _choose(config, state, turns)
    state = schedule_chunk(config, state, choice)
    state, after = _end_turn(config, state, turns, exists, choice)
    return state, jax.tree.map(lambda old, new: jnp.where(crowded, old, new), turns, after), crowded


@reading_piece
def _choose(config: CacheConfig, state: CacheState, turns: Turns) -> tuple[jax.Array, jax.Array, Choice]:
    """Whether there is a prefill whose turn it is, whether it needs room, and its chunk."""
    one = _next(config, turns, state)
    crowded = _prefill_lacks_room(config, state, one)
    return one.exists, crowded, choose_chunk(config, state, one.row, one.exists & ~crowded, one.admit)


@piece
def _end_turn(
    config: CacheConfig, state: CacheState, turns: Turns, exists: jax.Array, choice: Choice
) -> tuple[CacheState, Turns]:
    refused = exists & ~choice.done & ~choice.waits
    turns = turns._replace(
        tried=turns.tried.at[choice.row].max(exists),
        rows=turns.rows + choice.done,
        short=turns.short | (refused & (choice.lacks | (state.policy[TIED] == 0))),
        stop=~exists | (refused & choice.admit),
    )
    turns = _stops(config, state, turns)
    # Only counts of who waits change, on which the former does not depend.
    row = choice.row + zero_after(turns)
    return note_overtaken(config, state, row, choice.done & choice.admit), turns


@reading_piece
def _after(config: CacheConfig, state: CacheState, turns: Turns) -> Turns:
    return _stops(config, state, turns)


def _stops(config: CacheConfig, state: CacheState, turns: Turns) -> Turns:
    """Whether anybody is left who could have a turn."""
    started, waiting = _candidates(config, turns, state)
    stop = turns.stop | (turns.rows >= config.max_prefills) | (budget_left(config, state) <= 0)
    return turns._replace(stop=stop | ~(started | waiting).any())


def _candidates(config: CacheConfig, turns: Turns, state: CacheState) -> tuple[jax.Array, jax.Array]:
    """Prefills that may have their turn, as of `prefills`."""
    may = ~turns.tried & ~turns.deferring
    started, waiting = prefills(config, state)
    return started & may, waiting & may & (state.counters[PREEMPTED] == turns.start[PREEMPTED])


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


def _next(config: CacheConfig, turns: Turns, state: CacheState) -> _Next:
    started, waiting = _candidates(config, turns, state)
    admit = ~started.any()
    row = jnp.where(admit, first_to_start(config, state, waiting, turns.cached), first_of(config, state, started))
    return _Next(row, (started | waiting).any(), admit)
