"""Mesh axes a model runs under, and small helpers for code inside `shard_map`."""

import jax
from jax.sharding import PartitionSpec

DATA, MODEL, DCP = "data", "model", "dcp"
# Heads, widths, experts and vocabulary are split over both axes together, `model` outermost.
TENSOR = (MODEL, DCP)

__all__ = ["DATA", "DCP", "MODEL", "TENSOR", "PartitionSpec", "tensor_rank", "tensor_sum"]


def tensor_rank() -> jax.Array:
    """Index of this device in the tensor group."""
    return jax.lax.axis_index(TENSOR)


def tensor_sum(x: jax.Array) -> jax.Array:
    """Sum of partial results over the tensor group."""
    return jax.lax.psum(x, TENSOR)
