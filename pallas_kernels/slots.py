"""Reads and writes of pool entries by (layer, slot), with the null-slot rules in one place.

A barrier stands between reading a pool and whatever is written to it later: without it XLA may fuse
a read into a later consumer, find the old pool still needed after the write, and copy the whole
pool (seen on the CPU back end, every layer of every step).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def read_slots(
    pool: Shaped[Array, "layers S ..."], layer: Int32[Array, ""] | int, slots: Int32[Array, "n"]
) -> tuple[Shaped[Array, "n ..."], Shaped[Array, "layers S ..."]]:
    """Entries of `slots`, zeros for slot 0, and the pool to use from here on."""
    values = pool[layer, slots]
    null = (slots == 0).reshape(slots.shape + (1,) * (values.ndim - 1))
    return jax.lax.optimization_barrier((jnp.where(null, jnp.zeros_like(values), values), pool))


def write_slots(
    pool: Shaped[Array, "layers S ..."],
    layer: Int32[Array, ""] | int,
    slots: Int32[Array, "n"],
    values: Shaped[Array, "n ..."],
) -> Shaped[Array, "layers S ..."]:
    """Pool with `values` at `slots`, cast to the pool's dtype; slot 0 takes nothing."""
    target = jnp.where(slots == 0, pool.shape[1], slots)
    return pool.at[layer, target].set(values.astype(pool.dtype), mode="drop")
