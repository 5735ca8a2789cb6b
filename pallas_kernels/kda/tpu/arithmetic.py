"""The two precisions of the TPU kernels: bf16 operands, or fp32 throughout."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LOG2E = 1.4426950408889634

# Raw gate of a slot that is no token: both gate functions give a decay of exactly or as good as 1 for any slope within
# _SLOPES. Not lower, so that its product with LOG2E is finite.
NEUTRAL_GATE = -2e38
# exp(A_log) is kept within these. Beyond them no decay changes but of gates |z| below 1e-28 or above 1e28.
_SLOPES = 1e-36, 1e30


class Arithmetic(NamedTuple):
    """What operands of matrix products are rounded to, and how gates are computed.

    Attributes:
      exact: fp32 operands with six-pass products and natural exponentials (speed is secondary); else bf16
        operands, fp32 accumulation, exponentials in base 2.
      lower_bound: None for the softplus gate, else the bound of the sigmoid gate.
    """

    exact: bool
    lower_bound: float | None

    @property
    def dtype(self) -> jnp.dtype:
        """Of operands."""
        return jnp.dtype(jnp.float32 if self.exact else jnp.bfloat16)

    @property
    def midpoint(self) -> bool:
        """Whether 16-blocks are referenced to their middle.

        A bounded gate keeps both factors within exp(40), but their exponents then carry an error of 40 ulp,
        which fp32 callers would see; they get the six levels whatever the gate.
        """
        return self.lower_bound is not None and not self.exact

    def round(self, x: jax.Array) -> jax.Array:
        """x as an operand."""
        return x.astype(self.dtype)

    def dot(self, a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
        """a b, or a b^T, of two matrices of operands, in fp32."""
        dims = (((1,), (1 if transposed else 0,)), ((), ()))
        precision = lax.Precision.HIGHEST if self.exact else lax.Precision.DEFAULT
        return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)

    def exp(self, x: jax.Array) -> jax.Array:
        """Exponential in the units of `log_decay`."""
        return jnp.exp(x) if self.exact else jnp.exp2(x)

    def parts(self, g: jax.Array) -> jax.Array:
        """g [C, K] as operands to sum over rows: stacked bf16 parts [2C, K], or g itself.

        The second part leaves an error of |x| 2^-17 in an exponent x <= 0: at most 3e-6 in exp x.
        """
        if self.exact:
            return g
        high = g.astype(jnp.bfloat16)
        low = (g - high.astype(jnp.float32)).astype(jnp.bfloat16)
        return jnp.concatenate([high, low], axis=0)

    def gate_constants(self, a_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
        """Per channel [2, ...] fp32: factor and bias as `log_decay` wants them. a_log [H], dt_bias [H, K]."""
        a = jnp.clip(jnp.exp(a_log.astype(jnp.float32)), *_SLOPES)
        a = jnp.broadcast_to(a[:, None], dt_bias.shape)
        bias = dt_bias.astype(jnp.float32)
        if self.exact:
            return jnp.stack([a, bias])
        if self.lower_bound is None:
            return jnp.stack([-a, bias * LOG2E])
        return jnp.stack([-a * LOG2E, -a * bias * LOG2E])

    def log_decay(self, raw: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
        """`kda.gates.log_decay` of raw gates [C, K], in natural units if exact, else in base 2."""
        raw = raw.astype(jnp.float32)
        if self.exact:
            z = raw + bias
            if self.lower_bound is None:
                return -factor * (jnp.maximum(z, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(z))))
            return self.lower_bound / (1.0 + jnp.exp(-factor * z))
        if self.lower_bound is None:
            y = raw * LOG2E + bias
            e = jnp.exp2(-jnp.abs(y))
            # 1 + e drops the low bits of a small e; there the first term of the series is as good.
            tail = jnp.where(e < 2.0**-12, e * LOG2E, jnp.log2(1.0 + e))
            return factor * (jnp.maximum(y, 0.0) + tail)
        # Clamped so that 1 + e stays finite; one Newton step makes the approximate reciprocal fp32.
        d = 1.0 + jnp.exp2(jnp.minimum(raw * factor + bias, 120.0))
        r = pl.reciprocal(d, approx=True)
        return (self.lower_bound * LOG2E) * (r * (2.0 - d * r))
