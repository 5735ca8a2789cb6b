"""Which kinds of states are worth their blocks: learned from the hits that they serve.

A state has a kind: of a fork, of a prompt's end, of a turn's end, of a retention grid, of one rung of the ladder. By
kind the counters hold how many were saved and how many hit units they served beyond what the next shorter state would
have served. A kind that served less than an eighth of what a state serves on average is saved for one request in 32
only, which shows when it becomes worth more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import BY_PLAN, EARNED, EVICTED, RECORDS, STATE_KINDS, CacheState

FORK, TAIL, TURN, RETAINED, RUNGS = range(STATE_KINDS + 1)
# States of a kind that are saved before it is judged, and after which half of what was seen is forgotten.
_ENOUGH, _MANY = 16, 256
_LEAST_SHARE = 8
_SAMPLE = 32


def size(config: CacheConfig) -> int:
    """Kinds there are."""
    return RUNGS + len(config.placement.ladder)


def kinds(config: CacheConfig) -> np.ndarray:
    """Kind of every candidate of a chunk: i32[config.emissions], see `checkpoints.emission_candidates`."""
    junctions, rungs = config.placement.junctions, len(config.placement.ladder)
    tails = config.wanted - junctions - rungs
    parts = [[FORK] * junctions, [TAIL] * tails, range(RUNGS, RUNGS + rungs)]
    retained = [RETAINED] * (config.emissions - config.wanted)
    return np.array([kind for part in [*parts, retained] for kind in part], np.int32)


def _table(config: CacheConfig) -> slice:
    first = RECORDS + config.steps_in_flight * len(BY_PLAN)
    return slice(first, first + 2 * size(config))


def _seen(config: CacheConfig, state: CacheState) -> jax.Array:
    """i32[2, kinds]: states saved, and units served."""
    return state.counters[_table(config)].reshape(2, size(config))


def _put(config: CacheConfig, state: CacheState, seen: jax.Array) -> CacheState:
    return state._replace(counters=state.counters.at[_table(config)].set(seen.reshape(-1)))


def note_saved(config: CacheConfig, state: CacheState, kind: jax.Array | int, ok: jax.Array) -> CacheState:
    """A state of this kind is filed, if `ok`."""
    seen = _seen(config, state).at[0, kind].add(ok.astype(jnp.int32))
    return _put(config, state, jnp.where(seen[0] >= _MANY, seen // 2, seen))


def note_hit(config: CacheConfig, state: CacheState, kind: jax.Array, units: jax.Array, ok: jax.Array) -> CacheState:
    """A state of this kind serves a hit with `units` more than the next shorter one would, if `ok`."""
    return _put(config, state, _seen(config, state).at[1, kind].add(jnp.where(ok, units, 0)))


def is_worth_saving(
    config: CacheConfig, state: CacheState, kind: jax.Array | np.ndarray | int, seq: jax.Array
) -> jax.Array:
    """Whether states of these kinds are saved for the request that arrived as number `seq`: bool[...]."""
    saved, served = _seen(config, state).astype(jnp.float32)
    average = served.sum() / jnp.maximum(saved.sum(), 1)
    good = (saved < _ENOUGH) | (served * _LEAST_SHARE >= average * saved)
    good = good.at[FORK].set(True)[kind]
    return good | (seq % _SAMPLE == 0) | (state.counters[EVICTED] == 0) | (state.policy[EARNED] == 0)
