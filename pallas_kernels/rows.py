"""Ragged rows: which packed tokens belong to which request, and tiles cut from them.

T packed tokens, R rows (request slots of a step), M tiles. Rows lie ascending on the packed
axis. Tokens that no row covers are slack: they may hold NaN and must reach nothing, so every
op masks what it loads with `Tokens.valid` or the bounds of a tile.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class RaggedRows(NamedTuple):
    """The rows of one step.

    Attributes:
      offset: [R] index of the row's first token on the packed axis.
      length: [R] tokens of the row in this step; 0 marks an absent row, whose other fields
        mean nothing.
      start: [R] absolute position of the row's first token in its sequence.
    """

    offset: Int32[Array, "R"]
    length: Int32[Array, "R"]
    start: Int32[Array, "R"]


class Tokens(NamedTuple):
    """Per packed token: its row (0 for slack), place within the row, absolute position, validity."""

    row: Int32[Array, "T"]
    within: Int32[Array, "T"]
    position: Int32[Array, "T"]
    valid: Bool[Array, "T"]


class Tiles(NamedTuple):
    """Fixed-size tiles, each inside one row, in row order.

    Slot i of tile m stands for packed token `first[m] + i`, at absolute position
    `position[m] + i`; only slots with low <= i < high are tokens of the row.

    Attributes:
      row: [M] row of the tile (0 for tiles not used).
      first: [M] packed index of slot 0; below the row's offset (even negative) if the tile
        begins before the row does.
      position: [M] absolute position of slot 0.
      low, high: [M] valid slots; both 0 for tiles not used.
      base: [R] index of each row's first tile.
      used: [] tiles in use.
    """

    row: Int32[Array, "M"]
    first: Int32[Array, "M"]
    position: Int32[Array, "M"]
    low: Int32[Array, "M"]
    high: Int32[Array, "M"]
    base: Int32[Array, "R"]
    used: Int32[Array, ""]


def owner(ends: Int32[Array, "R"], items: int) -> Int32[Array, "n"]:
    """For each of `items` indices the first row whose (ascending) end lies beyond it."""
    return jnp.sum(ends[None, :] <= jnp.arange(items, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)


def tokens(rows: RaggedRows, count: int) -> Tokens:
    """Row, index and position of each of `count` packed tokens."""
    # Absent rows may carry any offset; the running maximum keeps the ends ascending.
    ends = jnp.where(rows.length > 0, rows.offset + rows.length, 0)
    ends = jnp.max(jnp.where(jnp.tri(ends.shape[0], dtype=bool), ends[None, :], 0), axis=1)
    row = owner(ends, count)
    inside = row < rows.offset.shape[0]
    row = jnp.where(inside, row, 0)
    index = jnp.arange(count, dtype=jnp.int32) - rows.offset[row]
    valid = inside & (index >= 0)
    row = jnp.where(valid, row, 0)
    index = jnp.where(valid, index, 0)
    return Tokens(row, index, rows.start[row] + index, valid)


def max_tiles(count: int, rows: int, tile: int, anchored: bool) -> int:
    """Most tiles that `rows` rows with `count` tokens in all can need.

    A row of n tokens meets at most 2 + (n - 2) / tile anchored tiles, else 1 + (n - 1) / tile;
    no tile is empty, so there are never more tiles than tokens.
    """
    present = min(rows, count)
    spare = 2 * (tile - 1) if anchored else tile - 1
    return min(count, (count + present * spare) // tile)


def tiles(rows: RaggedRows, tile: int, anchored: bool, max_tiles: int) -> Tiles:
    """Cut rows into tiles of `tile` slots.

    Args:
      rows: the rows of the step.
      tile: slots of a tile.
      anchored: put tile edges at absolute multiples of `tile` (a row that begins inside a
        tile then leaves its first slots unused); else begin with the row's first token.
      max_tiles: M, see the function of that name.
    """
    present = rows.length > 0
    lead = jnp.where(present, rows.start % tile, 0) if anchored else jnp.zeros_like(rows.start)
    needed = jnp.where(present, (lead + rows.length + tile - 1) // tile, 0)
    ends = jnp.cumsum(needed, dtype=jnp.int32)
    base = ends - needed
    row = owner(ends, max_tiles)
    used = row < needed.shape[0]
    row = jnp.where(used, row, 0)
    begin = (jnp.arange(max_tiles, dtype=jnp.int32) - base[row]) * tile - lead[row]
    low = jnp.where(used, jnp.maximum(-begin, 0), 0)
    high = jnp.where(used, jnp.clip(rows.length[row] - begin, 0, tile), 0)
    return Tiles(row, rows.offset[row] + begin, rows.start[row] + begin, low, high, base, ends[-1])
