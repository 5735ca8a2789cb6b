"""One request after the other, where they cannot be taken all at once; and functions that are traced once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import CacheState

T = TypeVar("T")


def traced_once(function: Callable[..., T]) -> Callable[..., T]:
    """`function(config, ...)`, of which the trace is kept for whatever else has it inside. All but the configuration
    are trees of arrays."""
    return functools.wraps(function)(jax.jit(function, static_argnums=0, inline=True))


def for_rows(
    config: CacheConfig,
    mask: jax.Array,
    body: Callable[[CacheConfig, CacheState, jax.Array], CacheState],
    state: CacheState,
) -> CacheState:
    """Apply `body(config, state, row)` to the marked request slots (bool[R]), in slot order."""

    def one(carry):
        left, state = carry
        row = jnp.argmax(left).astype(jnp.int32)
        return left.at[row].set(False), body(config, state, row)

    return jax.lax.while_loop(lambda carry: carry[0].any(), one, (mask, state))[1]
