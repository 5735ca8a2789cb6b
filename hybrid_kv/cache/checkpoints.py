"""Which boundaries of a request get a recurrent state: the contract of scheduler, plan and kernels.

What a back end can save is declared in `cache.emission`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.lookup import named_units
from hybrid_kv.cache.ranks import sorted_few
from hybrid_kv.cache.state import INTERVAL, LADDER, TAIL, CacheState


def wanted_points(
    config: CacheConfig, state: CacheState, prompt: jax.Array, known: jax.Array, hit: jax.Array, shared: jax.Array
) -> jax.Array:
    """Boundaries behind the hit (tokens, 0: none) where others may resume: i32[config.wanted].

    In order of worth when slots are short: where others are known to have parted (`Hit.shared`), where the
    prompt sent again resumes and where a longer one does, the same two of a request that goes on after preemption, the
    ladder from fine to coarse. With positions, those inside the prompt and the ladder go from deep to shallow instead.
    Repeats are blanked.
    """
    step, policy = config.geometry.hit_unit, state.policy

    def down(tokens: jax.Array, grid: int | jax.Array) -> jax.Array:
        return jnp.maximum(tokens, 0) // jnp.maximum(grid, 1) * grid

    tails = []
    for tokens in (prompt, known):
        # The last tokens that a key covers, or that prove a draft group's unit, are computed again.
        longer = tokens - config.lookahead - config.unit * config.longest_lag
        tails += [down(jnp.minimum(tokens - 1, longer), step), down(longer, step)]
    rungs = len(config.placement.ladder)
    optional = down(prompt - 1, policy[LADDER : LADDER + rungs])
    if config.placement.positions:
        positions = policy[LADDER + rungs :]
        optional = -sorted_few(-jnp.concatenate([optional, jnp.where(positions < prompt, positions, 0)]))
    points = jnp.concatenate([shared, jnp.stack(tails) * policy[TAIL], optional]).astype(jnp.int32)
    repeats = jnp.tril(points[:, None] == points[None, :], -1).any(1)
    return jnp.where((points > hit) & ~repeats & config.prefix_caching, points, 0)


def emission_candidates(
    config: CacheConfig, state: CacheState, points: jax.Array, start: jax.Array, end: jax.Array, known: jax.Array
) -> jax.Array:
    """Boundaries in (start, end] whose state is worth a slot, in order of worth: i32[config.emissions], 0: none.

    The points, then those that retention alone asks for.
    """
    every = state.policy[INTERVAL]
    nth = jnp.arange(1, config.emissions - config.wanted + 1, dtype=jnp.int32)
    retained = (start // jnp.maximum(every, 1) + nth) * every
    retained = jnp.where((retained[:, None] == points[None, :]).any(1), 0, retained)
    wanted = jnp.concatenate([points, retained])
    last = jnp.minimum(end, named_units(config, known) * config.unit)
    return jnp.where((wanted > start) & (wanted <= last), wanted, 0)


def is_optional(config: CacheConfig) -> np.ndarray:
    """Which candidates no resume needs, only ladder, positions or retention ask for: bool[config.emissions]."""
    return np.arange(config.emissions) >= config.wanted - config.rungs


def is_first_to_go(config: CacheConfig, state: CacheState, wanted: jax.Array) -> jax.Array:
    """Which candidates are taken again before everything else: bool[config.emissions].

    Rungs of the ladder, positions, and what retention alone asks for, but for the states at 1, 2, 4, 8, ... times its
    distance: however many go, a fork still finds one more than half way to it.
    """
    nth = wanted // jnp.maximum(state.policy[INTERVAL], 1)
    power = (nth & (nth - 1)) == 0
    retained = jnp.arange(config.emissions) >= config.wanted
    return jnp.asarray(is_optional(config)) & ~(retained & power)


def is_shared(config: CacheConfig) -> np.ndarray:
    """Which candidates others are known to share: bool[config.emissions]."""
    return np.arange(config.emissions) < config.placement.junctions
