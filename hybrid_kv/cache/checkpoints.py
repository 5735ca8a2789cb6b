"""Which boundaries of a request get a recurrent state: the contract of scheduler, plan and kernels."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from hybrid_kv.cache.config import CacheConfig


@dataclasses.dataclass(frozen=True)
class EmissionCapability:
    """What a prefill back end can save inside one chunk.

    max_per_chunk: states of one row and step (0: none). alignment: distance of an emission from
    its reference in tokens. anchored: the reference is absolute position 0; else the row's start.
    """

    max_per_chunk: int
    alignment: int
    anchored: bool


SEVERAL = EmissionCapability(max_per_chunk=1 << 30, alignment=1, anchored=True)


def checkpoint_position(tokens: int, unit: int, drop: bool = False, lookahead: int = 0) -> int:
    """The deepest boundary of `tokens` tokens that an identical resend can use.

    Without a drop at least one token, or `lookahead` tokens that prove the key, are computed again;
    with a drop of the last matched unit one unit is left out. Source: `docs/02-cache.md`.
    """
    limit = tokens if drop else tokens - max(1, lookahead)
    return max(limit // unit * unit - (unit if drop else 0), 0)


def checkpoint_valid(start: int, end: int, position: int, unit: int, block: int, alignment: int | None) -> bool:
    """Whether a back end with one aligned emission may save `position` in the chunk [start, end).

    unit: hash unit; block: tokens a state column spans; alignment: None if it cannot emit. The
    spare column must lie strictly right of the column that holds the initial state.
    """
    if alignment is None or start % unit:
        return False
    spare = -(-end // block) - 2
    return (
        spare > (start - 1) // block
        and start + unit <= position
        and start < position < end
        and (position - start) % alignment == 0
    )


def wanted_boundaries(
    config: CacheConfig, prompt: jax.Array, known: jax.Array, hit: jax.Array, junction: jax.Array
) -> jax.Array:
    """Boundaries (tokens, 0: none) a prefill of `known` tokens should keep: i32[config.wanted].

    In order of worth when slots are short: the resume point of a resent prompt, the junction, the
    last boundary of the whole prompt (for extensions), the same two of a request that resumes after
    preemption, the ladder from fine to coarse. All lie behind the hit; repeats are blanked.
    """
    unit, placement = config.unit, config.placement
    down = lambda tokens, grid: jnp.maximum(tokens, 0) // grid * grid  # noqa: E731
    tail = jnp.int32(placement.tail)
    wanted = [
        down(prompt - 1, unit) * tail,
        junction * jnp.int32(placement.junction),
        down(prompt, unit) * tail,
        down(known - 1, unit) * tail,
        down(known, unit) * tail,
        *(down(prompt - 1, grid) for grid in sorted(placement.ladder)),
    ]
    stacked = jnp.stack(wanted).astype(jnp.int32)
    repeats = jnp.tril(stacked[:, None] == stacked[None, :], -1).any(1)
    keep = (stacked > hit) & ~repeats
    if not (config.prefix_caching and config.geometry.recurrent):
        keep &= False
    return jnp.where(keep, stacked, 0)
