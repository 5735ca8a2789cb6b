"""Activations of gated feed-forward layers: SiLU, and SiTU with bounded factors."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.typing import Array, Float


def silu_gated(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """gate sigmoid(gate) up."""
    return jax.nn.silu(gate) * up


def situ_gated(
    gate: Float[Array, "..."], up: Float[Array, "..."], *, beta: float, linear_beta: float | None
) -> Float[Array, "..."]:
    """beta tanh(gate / beta) sigmoid(gate) times linear_beta tanh(up / linear_beta), in fp32.

    Without `linear_beta` the second factor is `up` itself.
    """
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    linear = u if linear_beta is None else linear_beta * jnp.tanh(u / linear_beta)
    return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * linear).astype(gate.dtype)


def activation(config: KimiLinearConfig) -> Callable[[Array, Array], Array]:
    """Of a configuration, as a function of (gate, up)."""
    if config.situ_beta is None:
        return silu_gated
    return partial(situ_gated, beta=config.situ_beta, linear_beta=config.situ_linear_beta)
