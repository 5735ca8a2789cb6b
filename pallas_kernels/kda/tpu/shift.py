"""Rows of a packed axis moved to where a chunk wants them, and back, in VMEM.

Copies between HBM and VMEM move whole tiles of 16 rows, but a row of tokens may begin anywhere. What comes in is
a window of whole tiles around the chunk; if the chunk's slot 0 is not its first row, or if some slots are no
tokens, the window is rewritten once in place. A chunk that is full and lies on tiles costs nothing. Rows narrower than
32 bits share words (row 2 i in the low half of word row i), so a move by an odd number of rows joins two halves.
"""

from collections.abc import Callable

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


def row_mask(low: jax.Array, high: jax.Array, width: int, dtype: DTypeLike) -> jax.Array:
    """Bits of the rows low <= row < high of a tile, int32 [8, width]."""
    row = lax.broadcasted_iota(jnp.int32, (8, width), 0) * packing(dtype)

    def inside(row):
        return (row >= low) & (row < high)

    if packing(dtype) == 1:
        return jnp.where(inside(row), -1, 0)
    return jnp.where(inside(row), 0xFFFF, 0) | jnp.where(inside(row + 1), -0x10000, 0)


def moved_tile(load: Callable[[jax.Array], jax.Array], tiles: int, at: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows at .. at + tile_rows of a run of tiles, as words; rows outside the run are arbitrary.

    Args:
      load: tile number to words [8, N].
      tiles: tiles of the run.
      at: first row, may be negative.
    """
    number = at // tile_rows(dtype)
    within = at % tile_rows(dtype)
    a = load(jnp.clip(number, 0, tiles - 1))
    b = load(jnp.clip(number + 1, 0, tiles - 1))
    row = lax.broadcasted_iota(jnp.int32, a.shape, 0)

    def from_word(n):
        back = (8 - n) % 8
        return jnp.where(row < 8 - n, pltpu.roll(a, back, 0), pltpu.roll(b, back, 0))

    if packing(dtype) == 1:
        return from_word(within)
    odd = within % 2
    bits = jnp.broadcast_to(16 * odd, a.shape)
    low, high = from_word(within // 2), from_word(within // 2 + odd)
    # An even move meets the same word twice, unshifted.
    return lax.shift_right_logical(low, bits) | lax.shift_left(high, bits)
