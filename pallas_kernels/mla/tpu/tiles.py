"""Tiles of the attention kernel."""

from typing import NamedTuple

import jax.numpy as jnp


class Tiles(NamedTuple):
    """Attributes:
    lanes: units side by side.
    keys: of a block, at most.
    groups: see `kernel.Shape`.
    vmem: limit for the compiler, bytes.
    """

    lanes: int
    keys: int
    groups: int
    slots: int = 3
    vmem: int = 60 << 20


def choose_tiles(heads: int, queries: int, latent: int, rows: int, dtype: jnp.dtype) -> Tiles:
    """Tiles."""
    return Tiles(8 if queries == 1 else 2, 512, 1)
