"""Sums whose bits do not depend on how many rows are summed at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def steady_sum(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Sum over one axis, kept with size 1.

    XLA's CPU back end orders a reduction by the shape of the whole array, so a token's norm would depend on
    how many tokens share the step. Halving fixes the order; other platforms reduce each row alone anyway.
    """
    if jax.default_backend() != "cpu" or not x.shape[axis]:
        return jnp.sum(x, axis=axis, keepdims=True)
    while (size := x.shape[axis]) > 1:
        half, odd = size // 2, size % 2
        low, high, rest = jnp.split(x, (half, 2 * half), axis)
        x = low + high
        if odd:
            head, last = jnp.split(x, (half - 1,), axis)
            x = jnp.concatenate([head, last + rest], axis)
    return x
