"""Block copies in plain XLA: one gather of all sources, then one scatter."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def copy_blocks(
    pool: Shaped[Array, "layers B ..."], source: Int32[Array, "n"], target: Int32[Array, "n"]
) -> Shaped[Array, "layers B ..."]:
    """See `paged.api.copy_blocks`."""
    # The barrier keeps the pool updatable in place, see `slots`.
    content, pool = jax.lax.optimization_barrier((pool[:, source], pool))
    target = jnp.where(target == 0, pool.shape[1], target)
    return pool.at[:, target].set(content, mode="drop")
