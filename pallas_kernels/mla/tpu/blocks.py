"""How the keys of a sequence are cut into blocks, the unit that a lane of the kernel works on in one step.

A page [4.5 n, 128] is nine groups of n / 2 rows: each plane of the latent in two halves, then the tails, of which row
i belongs to rows i of both halves. A block takes `piece` rows of every group of `pages` consecutive pages (small
pages), or the `parts`-th part of one page (large ones), and has keys in the order [first halves | second halves].
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.mla import stripe
from pallas_kernels.mla.pages import LANES


class Blocks(NamedTuple):
    """Static.

    Attributes:
      rows: n, rows of a page on a rank.
      pages: of a block.
      parts: blocks of a page; pages or parts is 1.
      groups: of a page, 2 L / 128 + 1.
    """

    rows: int
    pages: int
    parts: int
    groups: int

    @property
    def piece(self) -> int:
        """Rows of one group that one copy brings."""
        return self.rows // (2 * self.parts)

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return 2 * self.pages * self.piece


def blocks_of(rows: int, latent: int, most: int, itemsize: int) -> Blocks:
    """Blocks of at most `most` keys, or one page if no part of it is small enough.

    Raises:
      ValueError: halves of a page are no whole tiles.
    """
    tile = 32 // itemsize
    groups = 2 * latent // LANES + 1
    if rows % (2 * 8):
        raise ValueError(f"cache: pages of {rows} rows; the TPU kernel takes multiples of 16")
    if rows <= most:
        return Blocks(rows, most // rows, 1, groups)
    fitting = (p for p in range(-(-rows // most), rows // (2 * tile) + 1) if rows % (2 * tile * p) == 0)
    return Blocks(rows, 1, next(fitting, 1), groups)


def positions(blocks: Blocks, shards: int, rank: Int32[Array, ""] | int, interleave: int) -> Int32[Array, "parts keys"]:
    """Global position of each key of a block, relative to its first page, for each part of a page."""
    page = jnp.arange(blocks.pages, dtype=jnp.int32)[None, None, :, None]
    half = jnp.arange(2, dtype=jnp.int32)[None, :, None, None]
    row = jnp.arange(blocks.piece, dtype=jnp.int32) + jnp.arange(blocks.parts, dtype=jnp.int32)[:, None] * blocks.piece
    row = half * (blocks.rows // 2) + row[:, None, None, :]
    at = page * (blocks.rows * shards) + stripe.position_in_block(row, rank, shards, interleave)
    return at.reshape(blocks.parts, blocks.keys)
