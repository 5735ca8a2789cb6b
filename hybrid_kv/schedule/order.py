"""Who goes first, and who gives way."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.lookup import lookup
from hybrid_kv.cache.state import ACTIVE, OVERTAKE, RUNNING, WAITING, CacheState, layout, read_first
from hybrid_kv.cache.transitions import preempt

_LAST = jnp.iinfo(jnp.int32).max
# Waiting requests that are looked up before a step is planned.
_LOOKED_AT = 8


def first_of(config: CacheConfig, state: CacheState, rows: jax.Array, priority: bool = True) -> jax.Array:
    """The marked request (bool[R]) that is served first: of the lowest priority number, then the oldest."""
    fields = layout(config)
    seq = jnp.where(rows, state.requests[fields.SEQ], _LAST)
    if config.priority and priority:
        number = jnp.where(rows, state.requests[fields.PRIORITY], _LAST)
        seq = jnp.where(number == number.min(), seq, _LAST)
    return jnp.argmin(seq).astype(jnp.int32)


def cached_shares(config: CacheConfig, state: CacheState) -> jax.Array:
    """Share of its known tokens that the cache holds for every waiting request among the first few: f32[R], else 0.

    Nobody is looked at where the oldest goes first anyway.
    """
    if not config.overtake:
        return jnp.zeros((config.max_requests,), jnp.float32)
    fields = layout(config)
    waiting = state.requests[fields.STATUS] == WAITING
    running = (state.requests[fields.STATUS] == RUNNING).sum(dtype=jnp.int32)
    many = waiting.sum(dtype=jnp.int32)
    chosen = (state.policy[OVERTAKE] > 0) & (many > 1) & (running < state.policy[ACTIVE])

    def look(_, carry):
        shares, left = carry
        row = first_of(config, state, left, priority=False)
        request = state.requests[:, row]
        hit = lookup(config, state, state.keys[row], request[fields.KNOWN], request[fields.FLAGS]).hit
        return shares.at[row].set(hit / jnp.maximum(request[fields.KNOWN], 1)), left.at[row].set(False)

    shares = jnp.zeros((config.max_requests,), jnp.float32)
    return jax.lax.fori_loop(0, jnp.where(chosen, jnp.minimum(many, _LOOKED_AT), 0), look, (shares, waiting))[0]


def first_to_start(config: CacheConfig, state: CacheState, waiting: jax.Array, cached: jax.Array) -> jax.Array:
    """The waiting request (of bool[R]) that is admitted first: of the lowest priority number the one of which most is
    cached, of equals the oldest, unless the oldest has been overtaken often enough."""
    fields = layout(config)
    oldest = first_of(config, state, waiting)
    if not config.overtake:
        return oldest
    if config.priority:
        waiting &= state.requests[fields.PRIORITY] == state.requests[fields.PRIORITY, oldest]
    most = waiting & (cached >= jnp.where(waiting, cached, 0).max())
    patient = state.requests[fields.OVERTAKEN, oldest] < state.policy[OVERTAKE]
    return jnp.where(patient, first_of(config, state, most), oldest)


def note_overtaken(config: CacheConfig, state: CacheState, row: jax.Array, admitted: jax.Array) -> CacheState:
    """Count what those who still wait have seen pass, if request `row` was `admitted`."""
    if not config.overtake:
        return state
    fields = layout(config)

    def count(state):
        requests = state.requests
        passed = admitted & (requests[fields.STATUS] == WAITING) & (requests[fields.SEQ] < requests[fields.SEQ, row])
        return requests[fields.OVERTAKEN] + passed

    seen = read_first(count, state)
    return state._replace(requests=state.requests.at[fields.OVERTAKEN].set(seen))


def last_running(config: CacheConfig, state: CacheState) -> jax.Array:
    """The running request that gives way first: of the highest priority number, then the newest."""
    fields = layout(config)
    running = state.requests[fields.STATUS] == RUNNING
    seq = jnp.where(running, state.requests[fields.SEQ], -1)
    if config.priority:
        priority = jnp.where(running, state.requests[fields.PRIORITY], jnp.iinfo(jnp.int32).min)
        seq = jnp.where(running & (priority == priority.max()), seq, -1)
    return jnp.argmax(seq).astype(jnp.int32)


def comes_after(config: CacheConfig, state: CacheState, one: jax.Array, other: jax.Array) -> jax.Array:
    """Whether request `one` is served after `other`."""
    fields = layout(config)
    later = state.requests[fields.SEQ, one] > state.requests[fields.SEQ, other]
    if config.priority:
        mine, its = state.requests[fields.PRIORITY, one], state.requests[fields.PRIORITY, other]
        later = (mine > its) | ((mine == its) & later)
    return later


def preempt_last(config: CacheConfig, state: CacheState) -> CacheState:
    """Make the last running request wait again."""
    return preempt(config, state, last_running(config, state))
