"""Who goes first, and who gives way."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import RUNNING, CacheState, layout
from hybrid_kv.cache.transitions import preempt

_LAST = jnp.iinfo(jnp.int32).max


def first_of(config: CacheConfig, state: CacheState, rows: jax.Array) -> jax.Array:
    """The marked request (bool[R]) that is served first: of the lowest priority number, then the oldest."""
    fields = layout(config)
    seq = jnp.where(rows, state.requests[fields.SEQ], _LAST)
    if config.priority:
        priority = jnp.where(rows, state.requests[fields.PRIORITY], _LAST)
        seq = jnp.where(priority == priority.min(), seq, _LAST)
    return jnp.argmin(seq).astype(jnp.int32)


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
