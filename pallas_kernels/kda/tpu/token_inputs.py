"""What is done to raw inputs of a token inside the kernels, heads on sublanes; mathematics as in `kda.gates`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Token(NamedTuple):
    """q normalised and scaled, k normalised, decay = exp g: [H, K] fp32; beta and what normalised k [H, 1]."""

    q: jax.Array
    k: jax.Array
    decay: jax.Array
    beta: jax.Array
    k_scale: jax.Array


def norm_scale(x: jax.Array) -> jax.Array:
    """1 / sqrt(sum x^2 + 1e-6) over lanes [H, 1], in fp32."""
    x = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def decay(raw: jax.Array, slope: jax.Array, bias: jax.Array, lower_bound: float | None) -> jax.Array:
    """exp of the log decay; slope = exp(A_log) and bias are [H, K]."""
    z = raw.astype(jnp.float32) + bias
    if lower_bound is None:
        return jnp.exp(-slope * (jnp.maximum(z, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(z)))))
    return jnp.exp(lower_bound / (1.0 + jnp.exp(-slope * z)))


def column(row: jax.Array, heads: int, first: jax.Array | int) -> jax.Array:
    """Lanes first to first + heads of a row [1, H] as a column [heads, 1].

    A diagonal mask and a sum over lanes: one XLU operation for eight heads, and the lane may be traced.
    """
    shape = (heads, row.shape[1])
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    sublane = lax.broadcasted_iota(jnp.int32, shape, 0)
    picked = jnp.where(lane == sublane + first, jnp.broadcast_to(row, shape), 0.0)
    return jnp.sum(picked, axis=1, keepdims=True)


def token(
    q: jax.Array,
    k: jax.Array,
    raw_gate: jax.Array,
    raw_beta: jax.Array,
    slope: jax.Array,
    bias: jax.Array,
    lower_bound: float | None,
) -> Token:
    """Inputs of some heads; raw_beta is [H, 1]."""
    k_scale = norm_scale(k)
    return Token(
        q.astype(jnp.float32) * (norm_scale(q) * q.shape[1] ** -0.5),
        k.astype(jnp.float32) * k_scale,
        decay(raw_gate, slope, bias, lower_bound),
        1.0 / (1.0 + jnp.exp(-raw_beta)),
        k_scale,
    )
