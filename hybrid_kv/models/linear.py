"""Products of tokens and weights whose bits do not depend on how many tokens share the step.

XLA's CPU back end takes other code paths, with sums in another order, for a product of few rows, and for rows
and columns beyond a multiple of 16. There such a product is padded, so that a token decoded alone
and the same token in a prefill of a thousand get the same numbers.
"""

import jax
import jax.numpy as jnp

from hybrid_kv.typing import Array, Float

_MULTIPLE = 16


def _padded(x: Array, axis: int) -> Array:
    missing = -x.shape[axis] % _MULTIPLE
    if jax.default_backend() != "cpu" or not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def project(
    x: Float[Array, "T D"], weight: Float[Array, "F D"], precision: jax.lax.Precision | None = None
) -> Float[Array, "T F"]:
    """weight x of every token."""
    # Both are summed over their last axis: turned, the weight would be another product, with sums in another order.
    out = jax.lax.dot_general(_padded(x, 0), _padded(weight, 0), (((1,), (1,)), ((), ())), precision=precision)
    return out[: x.shape[0], : weight.shape[0]]


def project_heads(x: Float[Array, "T N D"], weight: Float[Array, "N D L"]) -> Float[Array, "T N L"]:
    """x weight of every token and head, each head with its own weight."""
    if jax.default_backend() != "cpu":
        return jnp.einsum("tnd,ndl->tnl", x, weight)
    # One head after the other: in a product of all heads at once the order of sums depends on the number of tokens.
    heads = jnp.moveaxis(x, 1, 0), jax.lax.optimization_barrier(jnp.swapaxes(weight, 1, 2))
    return jnp.moveaxis(jax.lax.map(lambda head: project(*head), heads), 0, 1)
