"""Root-mean-square norms."""

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_kv.typing import Array, Float
from pallas_kernels.sums import steady_sum


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + eps) in fp32, rounded to the dtype of x, then times the weight."""
    xf = x.astype(jnp.float32)
    xf = xf * jax.lax.rsqrt(steady_sum(xf * xf) / xf.shape[-1] + eps)
    return xf.astype(x.dtype) * weight.astype(x.dtype)


def rms_norm_of_part(
    x: Float[Array, "... part"], weight: Float[Array, "part"], eps: float, axes: tuple[str, ...]
) -> Float[Array, "... part"]:
    """`rms_norm` of vectors that lie in equal parts on the ranks of mesh axes; one number a vector is summed."""
    xf = x.astype(jnp.float32)
    square = jax.lax.psum(steady_sum(xf * xf), axes)
    xf = xf * jax.lax.rsqrt(square / (xf.shape[-1] * jax.lax.axis_size(axes)) + eps)
    return xf.astype(x.dtype) * weight.astype(x.dtype)


class RmsNorm(nnx.Module):
    """`rms_norm` with its weight."""

    def __init__(self, weight: Float[Array, "D"], eps: float) -> None:
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.weight[...], self.eps)


def gated_rms_norm(
    x: Float[Array, "... K"], gate: Float[Array, "... K"], weight: Float[Array, "K"], eps: float
) -> Float[Array, "... K"]:
    """RMSNorm(x) * weight * sigmoid(gate) over the last axis, all in fp32."""
    xf = x.astype(jnp.float32)
    xf = xf * jax.lax.rsqrt(steady_sum(xf * xf) / xf.shape[-1] + eps)
    return xf * weight.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
