"""The context of all rows, packed into a workspace piece by piece.

A unit is a whole number of key blocks made of whole columns of one row's block table, so that no key block holds
two requests and no page is cut. The units of all rows stand in one queue, row after row and in order of position; a
piece is the next so many of them. A row of a step without new tokens has none.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.mla import stripe
from pallas_kernels.mla.pages import Pages
from pallas_kernels.rows import RaggedRows

# Position of a workspace row that nothing sees: beyond every query.
UNSEEN = 1 << 30

# Workspace rows gathered together: so many that the fixed cost of a round is small, so few that a short context wastes
# little.
_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Sizes, all static.

    Attributes:
      pages: form of the pages.
      shards, interleave: the stripe.
      strips: ranks whose rows come together in this workspace, `shards` or 1.
      block: rows of a key block.
      columns: table columns of a unit.
      units: of the workspace.
      chunk: units gathered at a time; divides `units`.
    """

    pages: Pages
    shards: int
    interleave: int
    strips: int
    block: int
    columns: int
    units: int
    chunk: int

    @property
    def unit(self) -> int:
        """Rows of a unit."""
        return self.columns * self.pages.rows * self.strips

    @property
    def rows(self) -> int:
        """Rows of the workspace."""
        return self.units * self.unit

    @property
    def span(self) -> int:
        """Positions that a unit covers; more than its rows where other ranks keep some of them."""
        return self.columns * self.pages.rows * self.shards


def workspace_of(rows: int, pages: Pages, shards: int, interleave: int, strips: int, block: int) -> Workspace:
    """The workspace of at most `rows` rows.

    Raises:
      ValueError: it is smaller than a unit.
    """
    column = pages.rows * strips
    columns = math.lcm(column, block) // column
    unit = columns * column
    if rows < unit:
        raise ValueError(
            f"workspace: got {rows} rows; give at least {unit}, whole blocks of {block} keys made of whole columns of "
            f"{column} rows"
        )
    units = rows // unit
    chunk = min(units, max(1, _CHUNK // unit))
    return Workspace(pages, shards, interleave, strips, block, columns, units // chunk * chunk, chunk)


class Queue(NamedTuple):
    """Units of all rows.

    Attributes:
      first: [R] number, within its row, of a row's first unit; those before lie outside the window.
      ends: [R] end of each row's units in the queue.
    """

    first: Int32[Array, "R"]
    ends: Int32[Array, "R"]

    @property
    def base(self) -> Int32[Array, "R"]:
        """Place of each row's first unit."""
        return jnp.concatenate([jnp.zeros(1, jnp.int32), self.ends[:-1]])

    @property
    def total(self) -> Int32[Array, ""]:
        """Units of all rows."""
        return self.ends[-1]


def queue_of(rows: RaggedRows, columns: int, space: Workspace, window: int | None) -> Queue:
    """The queue of a step; a row with new tokens has at least one unit.

    Args:
      columns: of the block table; what lies beyond is not seen.
    """
    most = -(-columns // space.columns)
    present = rows.length > 0
    needed = jnp.clip(-(-(rows.start + rows.length) // space.span), 1, most)
    furthest = jnp.zeros_like(rows.start) if window is None else jnp.maximum(rows.start - window + 1, 0)
    first = jnp.minimum(furthest // space.span, needed - 1)
    return Queue(first, jnp.cumsum(jnp.where(present, needed - first, 0), dtype=jnp.int32))


class Units(NamedTuple):
    """Units next to one another in the queue.

    Attributes:
      row: [U] whose it is.
      number: [U] within the row's context.
      leads: [U] whether it is the row's first in the queue.
      used: [U] False behind the end of the queue.
    """

    row: Int32[Array, "U"]
    number: Int32[Array, "U"]
    leads: Bool[Array, "U"]
    used: Bool[Array, "U"]


def units_of(queue: Queue, begin: Int32[Array, ""] | int, count: int) -> Units:
    """`count` units from `begin` on."""
    place = begin + jnp.arange(count, dtype=jnp.int32)
    row = jnp.sum(queue.ends[None, :] <= place[:, None], axis=1, dtype=jnp.int32)
    used = row < queue.ends.shape[0]
    row = jnp.where(used, row, 0)
    base = queue.base[row]
    return Units(row, queue.first[row] + place - base, used & (place == base), used)


class Gathered(NamedTuple):
    """Cache rows of units [U, unit, L + P], 0 where nothing was written, and their positions [U, unit] (or UNSEEN)."""

    rows: Float[Array, "U unit LP"]
    position: Int32[Array, "U unit"]


def gather(
    cache: Float[Array, "layers B *page"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    table: Int32[Array, "R C"],
    units: Units,
    space: Workspace,
    ranks: Int32[Array, "strips"],
    rank: Int32[Array, ""] | int,
    axis: str | None,
    dtype: jnp.dtype,
) -> Gathered:
    """Rows of units from their pages; with an axis those of all its ranks, rank after rank within a unit.

    Args:
      ranks: whose rows come together, in the order of the axis.
      rank: the own one.
    """
    column = units.number[:, None] * space.columns + jnp.arange(space.columns, dtype=jnp.int32)
    inside = units.used[:, None] & (column < table.shape[1])
    block = jnp.where(inside, table[units.row[:, None], jnp.minimum(column, table.shape[1] - 1)], 0)
    total = (rows.start + rows.length)[units.row]

    def positions(rank):
        """[U, columns n] of the rows of a rank, UNSEEN where it is none."""
        n = space.pages.rows
        row = stripe.position_in_block(jnp.arange(n, dtype=jnp.int32), rank, space.shards, space.interleave)
        position = column[..., None] * (n * space.shards) + row
        live = (block != 0)[..., None] & (position < total[:, None, None])
        return jnp.where(live, position, UNSEEN).reshape(len(column), -1)

    # Rows never written may hold NaN, and 0 * NaN would reach the output.
    own = positions(jnp.asarray(rank, jnp.int32)) < UNSEEN
    page = space.pages.split(cache[layer, block]).reshape(*own.shape, space.pages.width)
    local = jnp.where(own[..., None], page.astype(dtype), 0)
    if axis is not None:
        local = jax.lax.all_gather(local, axis, axis=1, tiled=True)
    position = jnp.moveaxis(jax.vmap(positions)(ranks), 0, 1).reshape(local.shape[:2])
    return Gathered(local, position)
