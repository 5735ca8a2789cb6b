"""A closed loop of sessions as one pure function: requests, answers and their keys known beforehand, arrivals inside.

The next request in order comes as soon as fewer than so many are live, those of a session one after the other. A
decoding request verifies as many drafts as the configuration allows and all are right, so an answer comes in runs.
Nothing goes to the host before the end: what was served stands in the counters.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv import hashing
from hybrid_kv.cache import flights, transitions
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.lookup import named_units
from hybrid_kv.cache.state import FREE, RUNNING, CacheState, layout
from hybrid_kv.schedule.programs import compiled
from hybrid_kv.schedule.step import schedule
from hybrid_kv.simulate.workloads import Arrival


class Traffic(NamedTuple):
    """Requests in the order they come. prompt, total: tokens i32[N], of the prompt and with the answer. session: i32[N]
    number. keys: u32[N, U, 4] hash chain of prompt and answer, `CacheConfig.units` long. live: i32, requests at once,
    no more than there are slots for."""

    prompt: jax.Array
    total: jax.Array
    session: jax.Array
    keys: jax.Array
    live: jax.Array


class Loop(NamedTuple):
    """state; owner: i32[R] request in every slot, -1 for none; sent: bool[N]; steps; idle: of them without a row;
    prefilled: prompt tokens that were computed."""

    state: CacheState
    owner: jax.Array
    sent: jax.Array
    steps: jax.Array
    idle: jax.Array
    prefilled: jax.Array


def traffic(config: CacheConfig, arrivals: Sequence[Arrival], live: int | None = None) -> Traffic:
    """Arrays of requests; an answer without tokens counts as one token. live: None for as many as there are slots."""
    numbers: dict[Hashable, int] = {}
    session = [numbers.setdefault(one.session, len(numbers)) for one in arrivals]
    keys = np.zeros((len(arrivals), config.units, hashing.KEY_WORDS), np.uint32)
    prompt = np.array([len(one.prompt) for one in arrivals], np.int32)
    total = prompt + np.array([max(len(one.answer), 1) for one in arrivals], np.int32)
    for number, one in enumerate(arrivals):
        chain = hashing.chain(np.concatenate([one.prompt, one.answer]).astype(np.int32), config.unit, hashing.seed())
        keys[number, : len(chain)] = chain[: config.units]
    most = jnp.int32(config.max_requests if live is None else live)
    sessions = jnp.asarray(np.array(session, np.int32))
    return Traffic(jnp.asarray(prompt), jnp.asarray(total), sessions, jnp.asarray(keys), most)


def begin(config: CacheConfig, state: CacheState, requests: Traffic) -> Loop:
    """Nothing has been sent yet."""
    owner, zero = jnp.full((config.max_requests,), -1, jnp.int32), jnp.int32(0)
    # Buffers of their own: all of a loop is used up by the next one.
    return Loop(state, owner, jnp.zeros(requests.prompt.shape, bool), zero, zero + 0, zero + 0)


def serve(config: CacheConfig, loop: Loop, requests: Traffic, steps: int = 256) -> tuple[Loop, bool]:
    """Up to so many steps more, and whether all requests are through, or nothing moves."""
    loop, through = compiled(_steps, config, kernels="many")(loop, requests, np.int32(steps))
    return loop, bool(through)


def _steps(config: CacheConfig, loop: Loop, requests: Traffic, steps: jax.Array) -> tuple[Loop, jax.Array]:
    until = loop.steps + steps

    def through(loop: Loop) -> jax.Array:
        return (loop.sent.all() & (loop.owner < 0).all()) | (loop.idle > 4)

    def more(loop: Loop) -> jax.Array:
        return (loop.steps < until) & ~through(loop)

    loop = jax.lax.while_loop(more, lambda loop: step(config, requests, loop), loop)
    return loop, through(loop)


def step(config: CacheConfig, requests: Traffic, loop: Loop) -> Loop:
    """Send what may come, plan a step, and give every row that asks for them all the tokens it verifies."""
    fields = layout(config)
    state, owner, sent = _send(config, requests, loop)
    mine = jnp.maximum(owner, 0)
    if config.max_drafts:
        left = requests.total[mine] - state.requests[fields.KNOWN]
        decoding = state.requests[fields.COMPUTED] >= state.requests[fields.PROMPT]
        wanted = jnp.where(decoding & (state.requests[fields.STATUS] == RUNNING), left - 1, 0)
        state = transitions.propose(config, state, wanted)
    state = schedule(config, state)
    row = flights.at(config, state.requests, flights.newest(config, state))
    known, start = state.requests[fields.KNOWN], state.requests[fields.COMPUTED]
    prefilled = jnp.where(start < state.requests[fields.PROMPT], row.scheduled, 0).sum(dtype=jnp.int32)
    produced = jnp.minimum(row.promised, requests.total[mine] - known)
    fresh = named_units(config, known)[:, None] + jnp.arange(transitions.keys_per_append(config))
    keys = requests.keys[mine[:, None], jnp.minimum(fresh, config.units - 1)]
    finished = (produced > 0) & (known + produced >= requests.total[mine])
    idle = jnp.where((row.scheduled > 0).any(), 0, loop.idle + 1)
    state = transitions.commit(config, state, transitions.Outcome(produced, finished, keys))
    return Loop(state, jnp.where(finished, -1, owner), sent, loop.steps + 1, idle, loop.prefilled + prefilled)


def _send(config: CacheConfig, requests: Traffic, loop: Loop) -> tuple[CacheState, jax.Array, jax.Array]:
    """Let in what may come: (state, owner, sent)."""

    def next_of(carry):
        state, owner, sent = carry
        busy = jnp.where(owner >= 0, requests.session[jnp.maximum(owner, 0)], -1)
        ready = ~sent & (requests.session[:, None] != busy[None, :]).all(1)
        free = (state.requests[layout(config).STATUS] == FREE).any() & ((owner >= 0).sum() < requests.live)
        return free & ready.any(), jnp.argmax(ready).astype(jnp.int32)

    def send(carry):
        state, owner, sent = carry
        _, nth = next_of(carry)
        # Keys of the answer are stored when its tokens are known.
        named = jnp.arange(config.units) < named_units(config, requests.prompt[nth])
        keys = jnp.where(named[:, None], requests.keys[nth], np.uint32(0))
        none, limit = jnp.int32(0), requests.total[nth]
        state, slot = transitions.arrive(config, state, requests.prompt[nth], none, keys, none, limit)
        return state, owner.at[slot].set(nth), sent.at[nth].set(True)

    return jax.lax.while_loop(lambda carry: next_of(carry)[0], send, (loop.state, loop.owner, loop.sent))
