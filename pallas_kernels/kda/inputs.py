"""Per-token inputs of the recurrence, made from the raw ones."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.kda.gates import l2_norm, log_decay, write_strength


class Inputs(NamedTuple):
    """q normalised and scaled by K^-0.5, k normalised, g the log decay, beta in (0, 1); all fp32."""

    q: Float[Array, "... K"]
    k: Float[Array, "... K"]
    v: Float[Array, "... V"]
    g: Float[Array, "... K"]
    beta: Float[Array, "..."]


def prepare(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    raw_gate: Float[Array, "T H K"],
    raw_beta: Float[Array, "T H"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    lower_bound: float | None,
    valid: Bool[Array, "T"],
) -> Inputs:
    """Norms, gate and beta of each token; those that are not valid become neutral (all zero)."""

    def keep(x):
        return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 1)), x, 0.0)

    scale = q.shape[-1] ** -0.5
    return Inputs(
        keep(l2_norm(q) * scale),
        keep(l2_norm(k)),
        keep(v.astype(jnp.float32)),
        keep(log_decay(raw_gate, a_log, dt_bias, lower_bound)),
        keep(write_strength(raw_beta)),
    )
