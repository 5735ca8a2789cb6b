"""Where a token lives on a token axis striped over ranks (decode context parallelism).

With W shards, interleave I and bs rows per rank, a block holds bs * W tokens:

    block column  p // (bs W)
    off           p mod (bs W)
    rank          (off // I) mod W
    local row     (off // (I W)) I + off mod I
    position of local row j of a column on rank r:  ((j // I) W + r) I + j mod I
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


class Home(NamedTuple):
    """Block-table column, rank and row inside that rank's block."""

    column: Int32[Array, "..."]
    rank: Int32[Array, "..."]
    row: Int32[Array, "..."]


def home(position: Int32[Array, "..."], rows_per_rank: int, shards: int, interleave: int) -> Home:
    """Owner of each global position."""
    block = rows_per_rank * shards
    off = position % block
    row = off // (interleave * shards) * interleave + off % interleave
    return Home(position // block, off // interleave % shards, row)


def position_in_block(
    row: Int32[Array, "..."], rank: Int32[Array, ""] | int, shards: int, interleave: int
) -> Int32[Array, "..."]:
    """Global position, relative to its block, of local `row` on `rank`; the inverse of `home`."""
    return (row // interleave * shards + rank) * interleave + row % interleave


def rows_before(
    within: Int32[Array, "..."] | int, rank: Int32[Array, ""] | int, shards: int, interleave: int
) -> Int32[Array, "..."]:
    """Rows of `rank` among the first `within` (0 or more) positions of a block, or of a whole sequence."""
    cycle = interleave * shards
    turns = jax.lax.div(within, cycle)
    return turns * interleave + jnp.clip(within - turns * cycle - rank * interleave, 0, interleave)


def check(rows_per_rank: int, shards: int, interleave: int) -> None:
    """Refuse no shards, or an interleave that does not divide the rows of a rank."""
    if shards < 1:
        raise ValueError(f"shards: got {shards}; there is at least 1 rank")
    if interleave < 1 or rows_per_rank % interleave:
        raise ValueError(
            f"interleave: got {interleave} with {rows_per_rank} rows per rank and {shards} shards; "
            "it must divide the rows per rank"
        )
