"""How the keys of a sequence are cut into blocks, the unit that a lane of the kernel works on in one step.

To this kernel the sections of a large page (`mla.pages`) are pages of their own, and a block table has one entry for
each. So a page [4.5 n, 128] is nine groups of n / 2 rows, n at most 512: each plane of the latent in two halves, then
the tails, of which row i belongs to rows i of both halves. A block is as many consecutive pages as fit, at least one,
with keys in the order [first halves | second halves].

The rows that a rank has of a sequence are numbered from its beginning (`stripe.rows_before`), whatever pages and
stripes they lie in: key i of block b is such a row, and where it stands in its sequence is `positions`.
"""

import math
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
      groups: of a page, 2 L / 128 + 1.
    """

    rows: int
    pages: int
    groups: int

    @property
    def piece(self) -> int:
        """Rows of one group."""
        return self.rows // 2

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.rows * self.pages


def blocks_of(rows: int, latent: int, most: int) -> Blocks:
    """Blocks of at most `most` keys, or of one page if that has more.

    Raises:
      ValueError: halves of a page are no whole tiles.
    """
    if rows % (2 * 8):
        raise ValueError(f"cache: pages of {rows} rows; the TPU kernel takes multiples of 16")
    return Blocks(rows, max(1, most // rows), 2 * latent // LANES + 1)


def period(blocks: Blocks, shards: int, interleave: int) -> int:
    """Blocks until positions lie as in the first one again: more than one where pieces of a stripe exceed a block."""
    return 1 if shards == 1 else math.lcm(blocks.keys, interleave) // blocks.keys


def positions(
    blocks: Blocks, shards: int, rank: Int32[Array, ""] | int, interleave: int
) -> Int32[Array, "period keys"]:
    """Global position of each key of the first `period` blocks of a sequence."""
    count = period(blocks, shards, interleave)
    block, half, page, row = (
        jnp.arange(size, dtype=jnp.int32).reshape([-1 if axis == i else 1 for axis in range(4)])
        for i, size in enumerate((count, 2, blocks.pages, blocks.piece))
    )
    local = block * blocks.keys + page * blocks.rows + half * blocks.piece + row
    return stripe.position_in_block(local, rank, shards, interleave).reshape(count, blocks.keys)
