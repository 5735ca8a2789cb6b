"""Which experts run on which rows, as integer arrays for scalar prefetch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


def shares(
    ids: Int32[Array, "T k"], weights: Float32[Array, "T k"], first: Int32[Array, ""] | int, local: int
) -> tuple[jax.Array, jax.Array]:
    """Of every local expert and token: whether it was chosen, and its weight (0 if not); both [E, T]."""
    expert = first + jnp.arange(local, dtype=jnp.int32)
    chosen = ids[None] == expert[:, None, None]
    weight = jnp.sum(jnp.where(chosen, weights.astype(jnp.float32)[None], 0.0), axis=2)
    return jnp.any(chosen, axis=2), weight


class Active(NamedTuple):
    """Experts that some token chose.

    Attributes:
      expert: [E] those experts in order, then anything.
      used: [1] how many; 1 with no expert at all, whose weights are then 0.
    """

    expert: Int32[Array, "E"]
    used: Int32[Array, "1"]


def active(chosen: jax.Array) -> Active:
    """The active experts of chosen [E, T]."""
    present = jnp.any(chosen, axis=1)
    index = jnp.arange(present.shape[0], dtype=jnp.int32)
    rank = jnp.cumsum(present, dtype=jnp.int32) - 1
    # A comparison instead of a scatter: it fuses into one loop.
    placed = present[None, :] & (rank[None, :] == index[:, None])
    expert = jnp.sum(jnp.where(placed, index[None, :], 0), axis=1, dtype=jnp.int32)
    return Active(expert, jnp.maximum(jnp.sum(present, dtype=jnp.int32), 1).reshape(1))


class Sorted(NamedTuple):
    """Rows of a prefill, in tiles of one expert each; b blocks of tokens, groups of `GROUP` rows.

    The rows of an expert lie one behind the other, block after block; the rows of an expert and block begin at a new
    group, so that groups are of one expert and of one block. Rows that no token has are zeros.

    Attributes:
      rank: [E, T'] place of a token among those of its block that chose the expert, -1 if it did not; T' whole blocks.
      weight: [E, T'] fp32.
      group_expert, group_rank, group_row: [b * G] of each group of a block: its expert, its first rank, and its first
        row / GROUP in the array of all rows.
      groups: [b] groups of each block that are in use.
      tile_expert: [M] of each tile of rows.
      tiles: [1] tiles in use, at least 1.
      rows: how many rows there are at most; static.
    """

    rank: Int32[Array, "E T"]
    weight: Float32[Array, "E T"]
    group_expert: Int32[Array, "bG"]
    group_rank: Int32[Array, "bG"]
    group_row: Int32[Array, "bG"]
    groups: Int32[Array, "b"]
    tile_expert: Int32[Array, "M"]
    tiles: Int32[Array, "1"]
    rows: int


# Rows of a group: those of a bf16 tile, which is what a copy can move.
GROUP = 16


def groups_of_block(block: int, most: int, local: int) -> int:
    """Most groups that a block can have."""
    return block * most // GROUP + local


def sort(chosen: jax.Array, weight: jax.Array, block: int, tile: int, most: int) -> Sorted:
    """The plan of chosen and weight [E, T].

    Args:
      block: tokens of a block, a multiple of GROUP.
      tile: rows of a tile, a multiple of GROUP.
      most: local experts that a token can choose at most.
    """
    local, tokens = chosen.shape
    blocks = -(-tokens // block)
    rest = ((0, 0), (0, blocks * block - tokens))
    chosen, weight = jnp.pad(chosen, rest), jnp.pad(weight, rest)
    ones = chosen.reshape(local, blocks, block).astype(jnp.int32)
    rank = jnp.where(chosen, (jnp.cumsum(ones, axis=2) - 1).reshape(local, -1), -1)
    groups = -(-jnp.sum(ones, axis=2) // GROUP)  # [E, b]
    tiles = -(-jnp.sum(groups, axis=1) * GROUP // tile)  # [E]
    tiles_before = jnp.cumsum(tiles) - tiles
    before = jnp.cumsum(groups, axis=1) - groups
    row = (tiles_before * (tile // GROUP))[:, None] + before  # [E, b], in groups

    most_groups = groups_of_block(block, most, local)
    expert, index = _expand(groups.T, most_groups)  # [b, G]
    of_group = expert[..., None] == jnp.arange(local)
    group_row = jnp.sum(jnp.where(of_group, row.T[:, None, :], 0), axis=2) + index
    first = index * GROUP

    most_rows = blocks * most_groups * GROUP
    most_tiles = local + most_rows // tile
    tile_expert, _ = _expand(tiles[None], most_tiles)
    return Sorted(
        rank, weight, expert.reshape(-1), first.reshape(-1), group_row.reshape(-1), jnp.sum(groups, axis=0),
        tile_expert[0], jnp.maximum(jnp.sum(tiles), 1).reshape(1), most_tiles * tile,
    )  # fmt: skip


def _expand(counts: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Of counts [n, E]: for each of `most` places the column it falls into, and its place within; both [n, most].

    Behind the last one in use the column is the last.
    """
    ends = jnp.cumsum(counts, axis=1)
    place = jnp.arange(most, dtype=jnp.int32)
    passed = place[None, :, None] >= ends[:, None, :]
    column = jnp.minimum(jnp.sum(passed, axis=2, dtype=jnp.int32), counts.shape[1] - 1)
    begin = jnp.sum(jnp.where(passed, counts[:, None, :], 0), axis=2, dtype=jnp.int32)
    return column, place - begin
