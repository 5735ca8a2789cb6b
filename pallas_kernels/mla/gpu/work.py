"""What the programs of the Hopper kernel do: blocks of query rows, each with a stretch of its context.

A query row is one head of one token; those of a request lie one after another, so a block of 64 of them is a matrix
whatever the number of heads. Its context is cut into tiles of 64 keys, and the tiles into as many stretches as it takes
to fill the card.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.mla.stripe import rows_before
from pallas_kernels.mla.visible import Visible
from pallas_kernels.rows import RaggedRows, max_tiles, tiles, tokens

# Rows of a block of queries, keys of a tile.
QUERIES, KEYS = 64, 64
# Multiprocessors of the card, and the fewest tiles that are worth a stretch of their own.
_PROCESSORS, _LEAST = 132, 4


class Work(NamedTuple):
    """Blocks of query rows, M of them, and where the result of each query row lies.

    Attributes:
      row: [M] request.
      begin: [M] first query row the block loads. The block of a request that ends on the last rows begins earlier than
        its own first row, so that 64 can be loaded.
      shift: [M] position of a token less its packed index.
      end: [M] positions that some query of the block sees lie below it.
      first, past: [M] tiles of the context.
      block, slot: [T N] of each query row.
      valid: [T N] false for slack.
    """

    row: Int32[Array, "M"]
    begin: Int32[Array, "M"]
    shift: Int32[Array, "M"]
    end: Int32[Array, "M"]
    first: Int32[Array, "M"]
    past: Int32[Array, "M"]
    block: Int32[Array, "TN"]
    slot: Int32[Array, "TN"]
    valid: Bool[Array, "TN"]


def stretches(query_rows: int, requests: int, most_tiles: int) -> int:
    """Parts into which the context of each block is cut: two programs, one after another, for each multiprocessor."""
    blocks = max(requests, -(-query_rows // QUERIES))
    return max(1, min(2 * _PROCESSORS // blocks, most_tiles // _LEAST))


def work(
    rows: RaggedRows,
    count: int,
    heads: int,
    page: int,
    columns: int,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    visible: Visible,
) -> Work:
    """Cut `count` packed tokens of `heads` heads into blocks.

    Args:
      page: rows of a page.
      columns: C of the block table; at least 64 query rows are there.
    """
    wide = RaggedRows(rows.offset * heads, rows.length * heads, jnp.zeros_like(rows.start))
    most = max_tiles(count * heads, rows.length.shape[0], QUERIES, anchored=False)
    cut = tiles(wide, QUERIES, anchored=False, max_tiles=most)
    begin = jnp.clip(cut.first, 0, max(count * heads, QUERIES) - QUERIES)
    shift = (rows.start - rows.offset)[cut.row]
    own = (cut.first + cut.high - 1) // heads + shift
    end = own + 1 if visible.causal else (rows.start + rows.length)[cut.row]

    per_page = page // KEYS
    kept = rows_before(jnp.maximum(end, 0), rank, shards, interleave)
    # A tile holds 32 rows of either half of a page.
    past = kept // page * per_page + jnp.minimum(per_page, (kept % page + KEYS // 2 - 1) // (KEYS // 2))
    past = jnp.where(cut.high > 0, jnp.minimum(past, columns * per_page), 0)
    first = jnp.zeros_like(past)
    if visible.window is not None:
        nearest = jnp.maximum(cut.first // heads + shift - visible.window + 1, 0)
        first = jnp.minimum(rows_before(nearest, rank, shards, interleave) // page * per_page, past)

    token = tokens(rows, count)
    within_row = token.within[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)
    home = (cut.base[token.row][:, None] + within_row // QUERIES).ravel()
    slot = jnp.arange(count * heads, dtype=jnp.int32) - begin[home]
    valid = jnp.repeat(token.valid, heads)
    home, slot = jnp.where(valid, home, 0), jnp.where(valid, slot, 0)
    return Work(cut.row, begin, shift, end, first, past, home, slot, valid)
