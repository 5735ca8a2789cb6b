"""Block operations in plain XLA: gathers of whole blocks, then scatters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def copy_blocks(
    pool: Shaped[Array, "layers B ..."], source: Int32[Array, "n"], target: Int32[Array, "n"]
) -> Shaped[Array, "layers B ..."]:
    """See `paged.api.copy_blocks`."""
    # The barrier keeps the pool updatable in place, see `slots`.
    content, pool = jax.lax.optimization_barrier((pool[:, source], pool))
    return scatter_blocks(pool, target, content)


def zero_blocks(pool: Shaped[Array, "layers B ..."], target: Int32[Array, "n"]) -> Shaped[Array, "layers B ..."]:
    """See `paged.api.zero_blocks`."""
    return pool.at[:, _dropped(target, pool)].set(jnp.zeros((), pool.dtype), mode="drop")


def gather_blocks(pool: Shaped[Array, "layers B ..."], source: Int32[Array, "n"]) -> Shaped[Array, "layers n ..."]:
    """See `paged.api.gather_blocks`."""
    content = pool[:, source]
    return jnp.where((source != 0).reshape(-1, *[1] * (pool.ndim - 2)), content, jnp.zeros((), pool.dtype))


def scatter_blocks(
    pool: Shaped[Array, "layers B ..."], target: Int32[Array, "n"], content: Shaped[Array, "layers n ..."]
) -> Shaped[Array, "layers B ..."]:
    """See `paged.api.scatter_blocks`."""
    return pool.at[:, _dropped(target, pool)].set(content, mode="drop")


def _dropped(target: Int32[Array, "n"], pool: Shaped[Array, "layers B ..."]) -> Int32[Array, "n"]:
    """Targets, with one beyond the pool for the null block."""
    return jnp.where(target == 0, pool.shape[1], target)
