"""One request after the other, where they cannot be taken all at once."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import CacheState


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
