"""Rows of a packed axis moved to where a chunk wants them, and back, in VMEM.

Copies between HBM and VMEM move whole tiles of 16 rows, but a row of tokens may begin anywhere. What comes in is
a window of whole tiles around the chunk; if the chunk's slot 0 is not its first row, or if some slots are no
tokens, the window is rewritten once in place. A chunk that is full and lies on tiles costs nothing. Rows narrower than
32 bits share words (row 2 i in the low half of word row i), so a move by an odd number of rows joins two halves.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

ALIGN = 16  # rows of a bf16 tile, and a multiple of those of an fp32 tile


def packing(dtype: DTypeLike) -> int:
    """Rows that share a word."""
    return 4 // jnp.dtype(dtype).itemsize


def tile_rows(dtype: DTypeLike) -> int:
    """Rows of one vector register."""
    return 8 * packing(dtype)


def words(tile: jax.Array) -> jax.Array:
    """[tile_rows, N] as int32 [8, N]."""
    return pltpu.bitcast(tile, jnp.int32)


def fill_word(value: float, dtype: DTypeLike) -> int:
    """`value` in all rows of a word."""
    bits = int(np.asarray(value, dtype).view(np.uint16 if packing(dtype) == 2 else np.uint32))
    bits = bits * 0x10001 if packing(dtype) == 2 else bits
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def row_mask(low: jax.Array | int, high: jax.Array, width: int, dtype: DTypeLike) -> jax.Array:
    """Bits of the rows low <= row < high of a tile, int32 [8, width]."""
    row = lax.broadcasted_iota(jnp.int32, (8, width), 0) * packing(dtype)

    def inside(row):
        return (row >= low) & (row < high)

    if packing(dtype) == 1:
        return jnp.where(inside(row), -1, 0)
    return jnp.where(inside(row), 0xFFFF, 0) | jnp.where(inside(row + 1), -0x10000, 0)


class Move(NamedTuple):
    """Where rows at .. at + tile_rows * count of a run of tiles lie: the same for all columns, so found once.

    Attributes:
      tiles: count + 1 tile numbers, clamped to the run.
      within: rows of the first tile to pass over.
    """

    tiles: list[jax.Array]
    within: jax.Array


def move(at: jax.Array, count: int, tiles: int, dtype: DTypeLike) -> Move:
    """The move that puts row `at`, which may be negative, first, for a run of `tiles` tiles."""
    tall = tile_rows(dtype)
    return Move([jnp.clip(at // tall + t, 0, tiles - 1) for t in range(count + 1)], at % tall)


def moved(run: list[jax.Array], within: jax.Array, dtype: DTypeLike) -> list[jax.Array]:
    """The tiles of a move, int32 [8, N] words each as are those of `run`; rows from outside it are arbitrary."""
    row = lax.broadcasted_iota(jnp.int32, run[0].shape, 0)

    def from_word(n: jax.Array) -> list[jax.Array]:
        turned = [pltpu.roll(x, (8 - n) % 8, 0) for x in run]
        return [jnp.where(row < 8 - n, a, b) for a, b in itertools.pairwise(turned)]

    if packing(dtype) == 1:
        return from_word(within)
    odd = within % 2
    bits = jnp.broadcast_to(16 * odd, row.shape)
    # An even move meets the same word twice, unshifted.
    return [
        lax.shift_right_logical(low, bits) | lax.shift_left(high, bits)
        for low, high in zip(from_word(within // 2), from_word(within // 2 + odd), strict=True)
    ]
