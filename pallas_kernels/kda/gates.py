"""What is done to each token's raw inputs before the recurrence, all in fp32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.sums import steady_sum


def l2_norm(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(steady_sum(x * x) + 1e-6)


def log_decay(
    raw_gate: Float[Array, "... H K"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    lower_bound: float | None,
) -> Float[Array, "... H K"]:
    """Natural-log decay, never positive.

    With z = raw_gate + dt_bias: softplus form -exp(a_log) softplus(z), or, with a bound lb in
    [-5, 0), lb sigmoid(exp(a_log) z), where a_log is a slope inside the sigmoid.
    """
    z = raw_gate.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    a = jnp.exp(a_log.astype(jnp.float32))[:, None]
    if lower_bound is None:
        return -a * jax.nn.softplus(z)
    return lower_bound * jax.nn.sigmoid(a * z)


def write_strength(raw_beta: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """beta = sigmoid(raw_beta)."""
    return jax.nn.sigmoid(raw_beta.astype(jnp.float32))
