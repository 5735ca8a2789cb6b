"""A whole serving run as one pure function: requests from an array, answers known beforehand.

`serve` scans it; under `vmap` the states of many policies, or pools of many sizes, run side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_kv.cache import flights, transitions
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.lookup import named_units
from hybrid_kv.cache.state import FREE, PREEMPTED, CacheState, layout
from hybrid_kv.schedule.step import schedule


class Workload(NamedTuple):
    """Requests in the order they come. prompt, total: tokens i32[N], of the prompt and with the answer.
    keys: u32[N, U, 4] hash chain of prompt and answer, `CacheConfig.units` long."""

    prompt: jax.Array
    total: jax.Array
    keys: jax.Array


class Progress(NamedTuple):
    """state; owner: i32[R] request in every slot, -1 for none; arrived: requests so far."""

    state: CacheState
    owner: jax.Array
    arrived: jax.Array


class Decisions(NamedTuple):
    """What one step decided, by request slot. owner, start, length i32[R]; hit i32[R]: of those admitted in this
    step, -1 for others; preempted: requests so far."""

    owner: jax.Array
    start: jax.Array
    length: jax.Array
    hit: jax.Array
    preempted: jax.Array


def begin(config: CacheConfig, state: CacheState) -> Progress:
    """Nothing has arrived yet."""
    return Progress(state, jnp.full((config.max_requests,), -1, jnp.int32), jnp.int32(0))


def step(config: CacheConfig, workload: Workload, progress: Progress) -> tuple[Progress, Decisions]:
    """Let one request in if a slot is free, plan a step, and give every row that asks for it one token."""
    fields = layout(config)
    state, owner, arrived = _arrive(config, workload, progress)
    state = schedule(config, state)
    requests = state.requests
    row = flights.at(config, requests, flights.newest(config, state))
    length, known = row.scheduled, requests[fields.KNOWN]
    admitted = (requests[fields.ADMITTED] > 0) & (length > 0)
    decisions = Decisions(
        owner=jnp.where(length > 0, owner, -1),
        start=requests[fields.COMPUTED],
        length=length,
        hit=jnp.where(admitted, requests[fields.HIT], -1),
        preempted=state.counters[PREEMPTED],
    )
    produced = row.promised
    mine = jnp.maximum(owner, 0)
    fresh = named_units(config, known)[:, None] + jnp.arange(transitions.keys_per_append(config))
    keys = workload.keys[mine[:, None], jnp.minimum(fresh, config.units - 1)]
    finished = (produced > 0) & (known + 1 >= workload.total[mine])
    state = transitions.commit(config, state, transitions.Outcome(produced, finished, keys))
    return Progress(state, jnp.where(finished, -1, owner), arrived), decisions


def serve(config: CacheConfig, workload: Workload, progress: Progress, steps: int) -> tuple[Progress, Decisions]:
    """`steps` steps; decisions of all of them stacked."""
    return jax.lax.scan(lambda carry, _: step(config, workload, carry), progress, length=steps)


def _arrive(config: CacheConfig, workload: Workload, progress: Progress) -> tuple[CacheState, jax.Array, jax.Array]:
    count = workload.prompt.shape[0]
    free = (progress.state.requests[layout(config).STATUS] == FREE).any()
    comes = free & (progress.arrived < count)
    nth = jnp.minimum(progress.arrived, count - 1)

    def arrive(_, carry):
        state, owner = carry
        # Keys of the answer are stored when its tokens are known.
        named = jnp.arange(config.units) < named_units(config, workload.prompt[nth])
        keys = jnp.where(named[:, None], workload.keys[nth], 0)
        state, slot = transitions.arrive(config, state, workload.prompt[nth], jnp.int32(0), keys)
        return state, owner.at[slot].set(nth)

    state, owner = jax.lax.fori_loop(0, comes.astype(jnp.int32), arrive, (progress.state, progress.owner))
    return state, owner, progress.arrived + comes
