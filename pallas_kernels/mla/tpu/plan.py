"""What each lane of the kernel does in each step, as flat integer arrays for scalar prefetch.

A unit is a tile of queries of one row with the blocks of keys it sees. All blocks of all units stand in one line that is
cut into equal segments, one for each lane, so lanes end within one step of each other whatever the lengths. A unit
that a cut goes through is finished by merging what the lanes have of it. Changes of a lane are events, sorted by
step; between them a lane just goes to its next block.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.mla.tpu.blocks import Blocks
from pallas_kernels.mla.visible import Visible
from pallas_kernels.rows import RaggedRows, tiles

# Kinds of events: the lane goes on with the next window of the block table, begins a unit, goes on with one that the
# lane before began, has no more to do, leaves the rest of its unit to the next lane and has no more to do, or has come
# past a part of the last page of its unit.
MORE, BEGIN, RESUME, DONE, CUT, PART = range(6)
_NEVER = 1 << 30


class Units(NamedTuple):
    """U tiles of queries, each inside one row; those not used have no blocks.

    Attributes:
      token: first packed token.
      count: tokens; 0 if not used.
      position: global position of the first token.
      end: first position that its row does not have.
      first: first block it sees.
      blocks: how many it sees.
      column: last column of the block table it sees.
      gap: slack tokens behind its tokens, up to the next row.
      row: of the block table.
    """

    token: Int32[Array, "U"]
    count: Int32[Array, "U"]
    position: Int32[Array, "U"]
    end: Int32[Array, "U"]
    first: Int32[Array, "U"]
    blocks: Int32[Array, "U"]
    column: Int32[Array, "U"]
    gap: Int32[Array, "U"]
    row: Int32[Array, "U"]


class Plan(NamedTuple):
    """Attributes:
    scalars: [4] steps, layer, slack tokens before the first row.
    step, lane, kind, unit, block: [E] events in the order of their steps; the last is never reached.
    window: [E] row of the table of windows that the event's blocks lie in.
    token, count, position, end, column, gap: [U] see `Units`.
    into, final: [lanes] where what a lane has of a resumed unit is merged into (-1: nothing), and the unit that
      is complete then (-1: none).
    """

    scalars: Int32[Array, "4"]
    step: Int32[Array, "E"]
    lane: Int32[Array, "E"]
    kind: Int32[Array, "E"]
    unit: Int32[Array, "E"]
    block: Int32[Array, "E"]
    window: Int32[Array, "E"]
    token: Int32[Array, "U"]
    count: Int32[Array, "U"]
    position: Int32[Array, "U"]
    end: Int32[Array, "U"]
    column: Int32[Array, "U"]
    gap: Int32[Array, "U"]
    into: Int32[Array, "lanes"]
    final: Int32[Array, "lanes"]


def next_present(rows: RaggedRows, count: int) -> Int32[Array, "R"]:
    """First token of the next row that is present, `count` for the last one."""
    begin = jnp.where(rows.length > 0, rows.offset, count)
    later = jnp.tri(begin.shape[0], k=-1, dtype=bool).T
    return jnp.min(jnp.where(later, begin[None, :], count), axis=1)


def units_of(
    rows: RaggedRows,
    here: Int32[Array, "R"],
    count: int,
    tile: int,
    most: int,
    blocks: Blocks,
    columns: int,
    shards: int,
    visible: Visible,
) -> Units:
    """Tiles of `tile` queries of the rows that are `here`.

    Args:
      count: packed tokens.
      most: U.
      columns: of the block table.
    """
    chosen = RaggedRows(rows.offset, jnp.where(here, rows.length, 0), rows.start)
    grid = tiles(chosen, tile, anchored=False, max_tiles=most)
    used = grid.high > 0
    end = (rows.start + rows.length)[grid.row]
    past = grid.position + grid.high if visible.causal else end
    page = blocks.rows * shards
    seen = jnp.clip((past + page - 1) // page, 1, columns)
    near = 0 if visible.window is None else jnp.clip(grid.position - visible.window + 1, 0, None)
    first_column = jnp.minimum(near // page + jnp.zeros_like(seen), seen - 1)
    first = first_column * blocks.parts // blocks.pages
    last = (seen * blocks.parts + blocks.pages - 1) // blocks.pages
    behind = grid.first + grid.high
    ends = behind == (rows.offset + rows.length)[grid.row]
    gap = jnp.where(ends, next_present(rows, count)[grid.row] - behind, 0)
    return Units(
        grid.first, grid.high, grid.position, end, first, jnp.where(used, last - first, 0), seen - 1,
        jnp.where(used, gap, 0), grid.row,
    )  # fmt: skip


def plan(
    units: Units,
    lanes: int,
    parts: int,
    window: int,
    windows: int,
    layer: Int32[Array, ""] | int,
    lead: Int32[Array, ""],
) -> Plan:
    """The plan.

    Args:
      parts: blocks of a page, where pages are larger.
      window: blocks whose page ids lie in one window of the table.
      windows: of a row of the table.
      lead: slack tokens to be cleared before the first row.
    """
    ends = jnp.cumsum(units.blocks, dtype=jnp.int32)
    base, total = ends - units.blocks, ends[-1]
    cut = total // lanes * jnp.arange(lanes + 1, dtype=jnp.int32)
    cut += total % lanes * jnp.arange(lanes + 1, dtype=jnp.int32) // lanes
    begin, stop = cut[:-1], cut[1:]

    def lane_of(item):
        return jnp.sum(begin[None, :] <= item[:, None], axis=1, dtype=jnp.int32) - 1

    def unit_of(item):
        found = jnp.sum(ends[None, :] <= item[:, None], axis=1, dtype=jnp.int32)
        return jnp.minimum(found, units.blocks.shape[0] - 1)

    # Units begin, and enter further windows of the table.
    edge = jnp.arange(windows, dtype=jnp.int32)[None, :] * window
    enters = jnp.where(edge <= units.first[:, None], 0, edge - units.first[:, None])
    new = (edge == 0) | (edge > units.first[:, None])
    new &= enters < units.blocks[:, None]
    item = base[:, None] + enters
    unit = jnp.broadcast_to(jnp.arange(units.blocks.shape[0], dtype=jnp.int32)[:, None], item.shape)
    kind = jnp.broadcast_to(jnp.where(edge == 0, BEGIN, MORE), item.shape)
    parts = jnp.arange(1, parts, dtype=jnp.int32)[None, :]
    inner = jnp.broadcast_to((units.blocks > 0)[:, None], (unit.shape[0], parts.shape[1]))
    sides = ((item, ends[:, None] - parts), (unit, unit[:, :1] + 0 * parts), (kind, PART + 0 * inner), (new, inner))
    item, unit, kind, new = (jnp.concatenate(pair, axis=1).ravel() for pair in sides)
    lane = lane_of(item)
    # Where a lane begins inside a unit is an event of its own.
    new &= (kind == BEGIN) | (item != begin[lane])
    step = item - begin[lane]

    each = jnp.arange(lanes, dtype=jnp.int32)
    entered = unit_of(begin)
    resumes = (stop > begin) & (begin > base[entered])
    left = unit_of(jnp.maximum(stop - 1, 0))
    leaves = (stop > begin) & (stop < ends[left])

    def joined(*parts):
        return jnp.concatenate([jnp.asarray(p, jnp.int32) for p in parts])

    step = joined(jnp.where(new, step, _NEVER), jnp.where(resumes, 0, _NEVER), stop - begin, [_NEVER])
    lane = joined(lane, each, each, [0])
    kind = joined(kind, each * 0 + RESUME, jnp.where(leaves, CUT, DONE), [DONE])
    unit = joined(unit, entered, left, [0])
    item = joined(item, begin, stop, [0])
    block = units.first[unit] + item - base[unit]
    order = jnp.argsort(step, stable=True)

    # From the last lane to the first: what a lane resumed goes to the lane that has the block before.
    before = lane_of(jnp.maximum(begin - 1, 0))
    fresh = begin[before] <= base[entered]
    into = jnp.where(resumes, jnp.where(fresh, before, lanes + before), -1)
    final = jnp.where(resumes & fresh, entered, -1)
    return Plan(
        scalars=joined(jnp.stack([jnp.max(stop - begin), jnp.asarray(layer, jnp.int32), lead, total])),
        step=step[order],
        lane=lane[order],
        kind=kind[order],
        unit=unit[order],
        block=block[order],
        window=(units.row[unit] * windows + jnp.clip(block // window, 0, windows - 1))[order],
        token=units.token,
        count=units.count,
        position=units.position,
        end=units.end,
        column=units.column,
        gap=units.gap,
        into=into,
        final=final,
    )
