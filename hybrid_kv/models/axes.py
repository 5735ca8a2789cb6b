"""Mesh axes a model runs under, and small helpers for code inside `shard_map`."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

DATA, MODEL, DCP = "data", "model", "dcp"
# Heads, widths, experts and vocabulary are split over both axes together, `model` outermost.
TENSOR = (MODEL, DCP)

__all__ = ["DATA", "DCP", "MODEL", "TENSOR", "PartitionSpec", "tensor_columns", "tensor_rank", "tensor_sum"]


def tensor_rank() -> jax.Array:
    """Index of this device in the tensor group."""
    return jax.lax.axis_index(TENSOR)


def tensor_sum(x: jax.Array, axes: tuple[str, ...] = TENSOR) -> jax.Array:
    """Sum of partial results over the tensor group, or over those axes of it that split them."""
    return jax.lax.psum(x, axes) if axes else x


def tensor_columns(x: jax.Array, *, apart: bool) -> jax.Array:
    """This rank's columns of the sum of partial results [tokens, width] over the tensor group.

    apart: the ranks' columns lie on an axis of their own while they travel. XLA for TPU sums columns that do not fill
      tiles of 128 for every rank instead of scattering them, which sends twice as much. On CPU it would change bits.
    """
    if not apart:
        return jax.lax.psum_scatter(x, TENSOR, scatter_dimension=1, tiled=True)
    tokens, width = x.shape
    ranks = jax.lax.axis_size(TENSOR)
    parts = jnp.moveaxis(x.reshape(tokens, ranks, width // ranks), 1, 0)
    return jax.lax.psum_scatter(parts, TENSOR, scatter_dimension=0)
