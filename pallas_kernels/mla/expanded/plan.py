"""Which tiles of queries meet which blocks of keys, and what has to be minded when they do."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.mla.expanded.workspace import UNSEEN, Units
from pallas_kernels.rows import RaggedRows

# What a tile does with a block of keys.
SKIP = 0  # they cannot see each other
OPEN = 1  # every query of the tile sees every key; the reference of the exponentials is known
EDGE = 2  # some keys are hidden from some queries; the reference is known
START = 3  # the first keys of the tile; every query sees the first of them, which gives the reference
FIRST = 4  # any keys; the running maximum becomes the reference

# What a step is to the state of its group besides: the first of the group, which has no state or one left by another
# piece; the last; and other pieces follow. TURN: it has a FIRST tile, or is RESUMED.
FRESH, RESUMED, LAST, KEPT, TURN = 1, 2, 4, 8, 16

# Fields of a step, from the lowest bit: three bits of kind for each tile, then group and block.
MOST_TILES, _KIND, _GROUP, _BLOCK, _END = 4, 3, 12, 19, 31
MOST_GROUPS, MOST_BLOCKS = 1 << (_BLOCK - _GROUP), 1 << (_END - _BLOCK)


def kind_of(step: Int32[Array, "..."], tile: Int32[Array, ""] | int) -> Int32[Array, "..."]:
    """What a tile of the group does in a step."""
    return (step >> (_KIND * tile)) & ((1 << _KIND) - 1)


def group_of(step: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """The group of tiles of a step."""
    return (step >> _GROUP) & (MOST_GROUPS - 1)


def block_of(step: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """The block of keys of a step."""
    return (step >> _BLOCK) & (MOST_BLOCKS - 1)


class Tiling(NamedTuple):
    """Queries of a tile, keys of a block, tiles of a group and groups."""

    tile: int
    block: int
    per_group: int
    groups: int

    @property
    def queries(self) -> int:
        """Slots of all tiles."""
        return self.tile * self.per_group * self.groups


class Plan(NamedTuple):
    """Steps over one piece of the context. A step is a block of keys and a group of neighbouring tiles.

    Steps come in order of groups, within a group in order of blocks: the state of a group is made in one go and a block
    is fetched once for all tiles of the group.

    Attributes:
      step: [M] packed, see `kind_of`, `group_of`, `block_of`.
      turn: [M] FRESH or RESUMED, and LAST, KEPT, TURN.
      used: steps.
      following: [groups] the next group with steps; behind the last one the first.
      owner: [blocks] row whose keys a block holds.
      offset, length, start: [R] of the rows.
    """

    step: Int32[Array, "M"]
    turn: Int32[Array, "M"]
    used: Int32[Array, ""]
    following: Int32[Array, "groups"]
    owner: Int32[Array, "blocks"]
    offset: Int32[Array, "R"]
    length: Int32[Array, "R"]
    start: Int32[Array, "R"]


def plan_of(
    rows: RaggedRows,
    units: Units,
    earlier: Bool[Array, "R"],
    later: Bool[Array, "R"],
    position: Int32[Array, "blocks block"],
    tiling: Tiling,
    span: int,
    window: int | None,
    careful: Bool[Array, ""] | bool,
) -> Plan:
    """The plan of a piece.

    A query's exponentials are taken relative to a reference: START and FIRST set it to a score or to the maximum of the
    scores so far, and later steps may keep it once every query of the tile has seen a key. That is exact as long as no
    score exceeds the reference by more than the range of the exponents.

    Args:
      units: of the piece, all its blocks in order.
      earlier, later: [R] whether units of the row stand in earlier or later pieces.
      position: of the keys (UNSEEN for none).
      span: positions that a unit covers.
      careful: make every visible step FIRST.
    """
    blocks = position.shape[0]
    tile, per_group, groups = tiling.tile, tiling.per_group, tiling.groups
    each = blocks // units.row.shape[0]
    owner, used = jnp.repeat(units.row, each), jnp.repeat(units.used, each)
    at = jnp.arange(blocks, dtype=jnp.int32) % each
    leads = jnp.repeat(units.leads, each) & (at == 0)

    live = position < UNSEEN
    nearest = jnp.min(position, axis=1)
    furthest = jnp.max(jnp.where(live, position, -1), axis=1)
    whole = jnp.all(live, axis=1)

    # Of every tile [tiles, 1] and the row of every block [blocks].
    first = (jnp.arange(groups * per_group, dtype=jnp.int32) * tile)[:, None]
    low = jnp.maximum(rows.offset[owner] - first, 0)
    high = jnp.minimum(rows.offset[owner] + rows.length[owner] - first, tile)
    meets = used & (rows.length[owner] > 0) & (low < high)
    origin = rows.start[owner] + first - rows.offset[owner]
    lowest, highest = origin + low, origin + high - 1
    # Positions <= edge are outside the window of a query.
    edge, last_edge = (jnp.full_like(x, -1) if window is None else x - window for x in (lowest, highest))

    visible = meets & (nearest <= highest) & (furthest > edge)
    opened = visible & whole & (low == 0) & (high == tile) & (furthest <= lowest) & (nearest > last_edge)

    def for_all(key):
        return (key > last_edge) & (key <= lowest)

    certain = visible & (for_all(nearest) | for_all(furthest))
    # Of the same row and piece, before this block: is one certain, is one visible?
    here = jnp.arange(blocks, dtype=jnp.int32)
    same = (owner[None, :] == owner[:, None]) & (here[None, :] <= here[:, None])
    row_begin = jnp.min(jnp.where(same, here[None, :], blocks), axis=1)

    def before(what):
        count = jnp.cumsum(what, axis=1, dtype=jnp.int32) - what
        return count > count[:, row_begin]

    # Earlier pieces hold a row's first unit, of which, without a window, a query behind it sees all.
    known = earlier[owner] & (rows.start[owner] >= span) if window is None else False
    settled = (before(certain) | known) & ~jnp.asarray(careful)
    starts = (
        ~earlier[owner]
        & ~before(visible)
        & (low == 0)
        & (high == tile)
        & for_all(position[:, 0])
        & ~jnp.asarray(careful)
    )
    unsettled = jnp.where(starts, START, FIRST)
    kind = jnp.where(visible, jnp.where(settled, jnp.where(opened, OPEN, EDGE), unsettled), SKIP)
    # Every tile with tokens is visited at least once, which makes its state.
    kind = jnp.where(meets & leads & ~visible, FIRST, kind)

    kind = kind.reshape(groups, per_group, blocks)
    kinds = jnp.sum(kind << (_KIND * jnp.arange(per_group, dtype=jnp.int32)[:, None]), axis=1, dtype=jnp.int32)
    present = kinds > 0
    count = jnp.cumsum(present, axis=1, dtype=jnp.int32)
    begin_token = jnp.arange(groups, dtype=jnp.int32)[:, None] * (per_group * tile)
    reaches = (
        (rows.offset < begin_token + per_group * tile) & (rows.offset + rows.length > begin_token) & (rows.length > 0)
    )
    resumed, kept = (jnp.any(reaches & which, axis=1, keepdims=True) for which in (earlier, later))
    turn = jnp.where(present & (count == 1), jnp.where(resumed, RESUMED, FRESH), 0)
    turn += jnp.where(jnp.any(kind == FIRST, axis=1) | (turn == RESUMED), TURN, 0)
    turn += jnp.where(present & (count == count[:, -1:]), LAST + jnp.where(kept, KEPT, 0), 0)
    group = jnp.arange(groups, dtype=jnp.int32)[:, None]
    step = kinds | group << _GROUP | here << _BLOCK
    busy = jnp.any(present, axis=1)
    after = busy[None, :] & (group < group.T)
    wrapped = jnp.min(jnp.where(busy, group[:, 0], groups - 1))
    following = jnp.where(jnp.any(after, axis=1), jnp.argmax(after, axis=1).astype(jnp.int32), wrapped)
    step, turn, present = (x.ravel() for x in (step, turn, present))
    order = jnp.argsort(~present, stable=True)
    return Plan(step[order], turn[order], jnp.sum(present, dtype=jnp.int32), following, owner, *rows)
