"""The gated activations of the experts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Activation(NamedTuple):
    """act(g) * u: SiLU, or SiTU where `beta` is given.

        SiLU    g sigmoid(g) * u
        SiTU    beta tanh(g / beta) sigmoid(g) * lambda tanh(u / lambda)        lambda = linear_beta

    Attributes:
      beta: bound of the gate; None for SiLU.
      linear_beta: bound of the linear factor; None leaves u as it is.
    """

    beta: float | None = None
    linear_beta: float | None = None

    def __call__(self, gate: Float[Array, "*N"], up: Float[Array, "*N"]) -> Float[Array, "*N"]:
        """Of fp32 values, in few operations of a vector unit: one tanh for the sigmoid."""
        open_ = 0.5 + 0.5 * jnp.tanh(0.5 * gate)
        bounded = gate if self.beta is None else self.beta * jnp.tanh(gate * (1 / self.beta))
        linear = up if self.linear_beta is None else self.linear_beta * jnp.tanh(up * (1 / self.linear_beta))
        return bounded * open_ * linear

    def plain(self, gate: Float[Array, "*N"], up: Float[Array, "*N"]) -> Float[Array, "*N"]:
        """Of any dtype, rounded to it, as XLA computes it: SiLU in that dtype, SiTU in fp32."""
        if self.beta is None:
            return jax.nn.silu(gate) * up
        g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
        linear = u if self.linear_beta is None else self.linear_beta * jnp.tanh(u / self.linear_beta)
        return (self.beta * jnp.tanh(g / self.beta) * jax.nn.sigmoid(g) * linear).astype(gate.dtype)


SILU = Activation()


def situ(beta: float, linear_beta: float | None = None) -> Activation:
    """SiTU with these bounds.

    Raises:
      ValueError: a bound is not positive.
    """
    for name, value in (("beta", beta), ("linear_beta", linear_beta)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: got {value}; the bound of SiTU has to be positive")
    return Activation(beta, linear_beta)
