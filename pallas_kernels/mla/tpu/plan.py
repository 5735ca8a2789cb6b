"""What each lane of the kernel does in each step, as flat integer arrays for scalar prefetch.

A unit is a tile of queries of one row with the blocks of keys it sees. All blocks of all units stand in one line that
is cut into equal segments, one for each lane, so lanes end within one step of each other whatever the lengths. A unit
that a cut goes through is finished by merging what the lanes have of it. Changes of a lane are events, sorted by
step; between them a lane just goes to its next block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.mla import stripe
from pallas_kernels.mla.tpu.blocks import Blocks
from pallas_kernels.mla.visible import Visible
from pallas_kernels.rows import RaggedRows, tiles

# What happens to the unit that a lane has been working on: nothing or it goes on the list of the step (`Events.slot`),
# it is complete and the list full, or the lane's share of it is kept to be merged with those of other lanes.
COMMON, FINISH, KEEP = range(3)
# And what the lane does next: the same unit, another one, or nothing.
SAME, OTHER, NOTHING = range(3)
_NEVER = 1 << 30
FAR = 1 << 29


class Units(NamedTuple):
    """U tiles of queries, each inside one row; those not used have no blocks.

    Attributes:
      token: first packed token.
      tokens: how many; 0 if not used.
      position: global position of the first token.
      end: first position that its row does not have.
      first: first block it sees.
      blocks: how many it sees.
      low, column: first and last column of the block table it sees.
      last, written: last column that its row has, and how many rows of it on this rank.
      gap: slack tokens behind its tokens, up to the next row.
      row: of the block table.
      nulls: 1 if one of the blocks it sees is null.
    """

    token: Int32[Array, "U"]
    tokens: Int32[Array, "U"]
    position: Int32[Array, "U"]
    end: Int32[Array, "U"]
    first: Int32[Array, "U"]
    blocks: Int32[Array, "U"]
    column: Int32[Array, "U"]
    gap: Int32[Array, "U"]
    row: Int32[Array, "U"]
    low: Int32[Array, "U"]
    nulls: Int32[Array, "U"]
    last: Int32[Array, "U"]
    written: Int32[Array, "U"]


class Events(NamedTuple):
    """What changes in a lane, sorted by step and lane; the last is never reached. A field of all events lies together.

    Attributes:
      step: the first in which it holds.
      part: that times the number of buffers, and the buffer of the lane.
      lane: whose.
      next: SAME, OTHER or NOTHING.
      following, room: row of the table of windows that the lane's next event takes page ids from, and where in `ids`
        that goes.
      at, low, last: column of the next block, and first and last column that are read, as places in `ids`.
      block, position, end, token, tokens: of the unit; see `Units`.
      query: place of the unit's query.
      acc: its accumulator; the one before is that with the last bit inverted.
      row: of the table of windows, where the unit's begin; -1 if none of its blocks is null.
      nulls: lanes at units with null blocks, from this event on.
      old: COMMON, FINISH or KEEP.
      slot, listed: of the list of units that end in the step, where this one goes (behind all others if nowhere), and
        how long the list then is.
      old_token, old_count, old_gap: of the unit that ends.
      page, page_rows: place in the block before of the last page that its row has, and how many rows of that page are
        written; the last page of the block and all of its rows if the row goes on.
    """

    step: Int32[Array, "E"]
    part: Int32[Array, "E"]
    lane: Int32[Array, "E"]
    next: Int32[Array, "E"]
    following: Int32[Array, "E"]
    room: Int32[Array, "E"]
    at: Int32[Array, "E"]
    low: Int32[Array, "E"]
    last: Int32[Array, "E"]
    block: Int32[Array, "E"]
    position: Int32[Array, "E"]
    end: Int32[Array, "E"]
    token: Int32[Array, "E"]
    tokens: Int32[Array, "E"]
    query: Int32[Array, "E"]
    acc: Int32[Array, "E"]
    row: Int32[Array, "E"]
    nulls: Int32[Array, "E"]
    old: Int32[Array, "E"]
    slot: Int32[Array, "E"]
    listed: Int32[Array, "E"]
    old_token: Int32[Array, "E"]
    old_count: Int32[Array, "E"]
    old_gap: Int32[Array, "E"]
    page: Int32[Array, "E"]
    page_rows: Int32[Array, "E"]


class Plan(NamedTuple):
    """Operands for scalar prefetch.

    Attributes:
      scalars: [4] steps, slack tokens before the first row, the null block as a page of the pool, 1 if pages behind
        the end of a row need not be wiped.
      events: `Events`, one field after another.
      joins: for each lane from the last to the first, [4]: where its share of a unit that lanes before it began is
        merged into (-1: it has none; below `lanes` that lane's accumulator, else that lane's share), and if that
        completes the unit its count of tokens (else 0), first token and gap.
      windows: [lanes] row of the table of windows that each begins with.
    """

    scalars: Int32[Array, "4"]
    events: Int32[Array, "FE"]
    joins: Int32[Array, "lanes4"]
    windows: Int32[Array, "lanes"]


def next_present(rows: RaggedRows, count: int) -> Int32[Array, "R"]:
    """First token of the next row that is present, `count` for the last one."""
    begin = jnp.where(rows.length > 0, rows.offset, count)
    later = jnp.tri(begin.shape[0], k=-1, dtype=bool).T
    return jnp.min(jnp.where(later, begin[None, :], count), axis=1)


def units_of(
    rows: RaggedRows,
    here: Bool[Array, "R"],
    count: int,
    tile: int,
    most: int,
    blocks: Blocks,
    table: Int32[Array, "R C"],
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    visible: Visible,
) -> Units:
    """Tiles of `tile` queries of the rows that are `here`.

    Args:
      count: packed tokens.
      most: U.
    """
    chosen = RaggedRows(rows.offset, jnp.where(here, rows.length, 0), rows.start)
    grid = tiles(chosen, tile, anchored=False, max_tiles=most)
    used = grid.high > 0
    end = (rows.start + rows.length)[grid.row]
    past = grid.position + grid.high if visible.causal else end
    page, columns = blocks.rows, table.shape[1]

    def before(position):
        """Rows that this rank has of the first positions of a sequence."""
        return stripe.rows_before(jnp.maximum(position, 0), rank, shards, interleave)

    seen = jnp.clip((before(past) + page - 1) // page, 1, columns)
    near = 0 if visible.window is None else before(grid.position - visible.window + 1)
    low = jnp.minimum(near // page + jnp.zeros_like(seen), seen - 1)
    first = low // blocks.pages
    last = (seen + blocks.pages - 1) // blocks.pages
    # Per row first: a table is larger than the number of its rows.
    column = jnp.arange(columns, dtype=jnp.int32)[None, :]
    needed = (before(rows.start + rows.length) + page - 1)[:, None] // page
    begun = 0 if visible.window is None else (before(rows.start - visible.window + 1) // page)[:, None]
    nulls = jnp.any((table == 0) & (column < needed) & (column >= begun), axis=1)
    # Columns behind the table are null blocks, and the last block of keys may reach into them.
    nulls |= needed[:, 0] > columns
    behind = grid.first + grid.high
    ends = behind == (rows.offset + rows.length)[grid.row]
    gap = jnp.where(ends, next_present(rows, count)[grid.row] - behind, 0)
    final = jnp.clip((before(end) + page - 1) // page, 1, columns) - 1
    written = jnp.clip(before(end) - final * page, 0, page)
    return Units(
        grid.first, grid.high, grid.position, end, first, jnp.where(used, last - first, 0), seen - 1,
        jnp.where(used, gap, 0), grid.row, low, nulls[grid.row].astype(jnp.int32), final, written,
    )  # fmt: skip


def _earlier(marked: Bool[Array, "n E"], of: Int32[Array, "E"]) -> Int32[Array, "n E"]:
    """How many marked events with the same value of `of`, whose values lie together, come before each."""
    before = jnp.cumsum(marked, axis=1, dtype=jnp.int32) - marked
    index = jnp.arange(of.shape[0], dtype=jnp.int32)
    begin = jax.lax.cummax(jnp.where(of != jnp.roll(of, 1), index, 0))
    return before - before[:, begin]


def _left(some: Bool[Array, "E"], unit: Bool[Array, "E"], lane: Int32[Array, "E"]) -> Bool[Array, "E"]:
    """Whether there was `some` at the unit before, by events of each lane, those with a `unit` beginning one."""
    index = jnp.arange(lane.shape[0], dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(unit, index, -1))
    last = jnp.append(jnp.full(1, -1, jnp.int32), last[:-1])
    return (last >= 0) & (lane[jnp.maximum(last, 0)] == lane) & some[jnp.maximum(last, 0)]


def plan(
    units: Units,
    lanes: int,
    buffers: int,
    blocks: Blocks,
    window: int,
    windows: int,
    width: int,
    slots: int,
    lead: Int32[Array, ""],
    null: Int32[Array, ""],
    clean: Bool[Array, ""],
) -> Plan:
    """The plan.

    Args:
      buffers: parts of the lanes with a buffer each.
      window: columns in one window of the block table.
      windows: of a row of the table.
      width: of a window in `ids`.
      slots: units that may be on the list of a step.
      lead: slack tokens to be cleared before the first row.
      null: the null block as a page of the pool.
      clean: whether pages behind the end of a row need not be wiped.
    """
    count = units.blocks.shape[0]
    held = window // blocks.pages  # blocks of a window
    ends = jnp.cumsum(units.blocks, dtype=jnp.int32)
    base, total = ends - units.blocks, ends[-1]
    each = jnp.arange(lanes + 1, dtype=jnp.int32)
    cut = total // lanes * each + total % lanes * each // lanes
    begin, stop = cut[:-1], cut[1:]

    def lane_of(item):
        return jnp.sum(begin[None, :] <= item[:, None], axis=1, dtype=jnp.int32) - 1

    def unit_of(item):
        return jnp.minimum(jnp.sum(ends[None, :] <= item[:, None], axis=1, dtype=jnp.int32), count - 1)

    def joined(*parts):
        return jnp.concatenate([jnp.asarray(p, jnp.int32).ravel() for p in parts])

    # Where something may change, by item of the line: units begin and enter windows of the table, lanes begin (inside a
    # unit) and end.
    edge = jnp.arange(windows, dtype=jnp.int32)[None, :] * held
    enters = jnp.where(edge <= units.first[:, None], 0, edge - units.first[:, None])
    new = ((edge == 0) | (edge > units.first[:, None])) & (enters < units.blocks[:, None])
    item = base[:, None] + enters
    unit = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[:, None], item.shape)
    begins = jnp.broadcast_to(jnp.arange(windows) == 0, item.shape)
    item, unit, begins, new = item.ravel(), unit.ravel(), begins.ravel(), new.ravel()
    lane = lane_of(item)
    new &= begins | (item != begin[lane])

    index = jnp.arange(lanes, dtype=jnp.int32)
    entered = unit_of(begin)
    resumes = (stop > begin) & (begin > base[entered])
    nobody, everybody = jnp.zeros(lanes, bool), jnp.ones(lanes, bool)
    step = joined(jnp.where(new, item - begin[lane], _NEVER), jnp.where(resumes, 0, _NEVER), stop - begin, [_NEVER])
    unit, lane = joined(unit, entered, entered, [0]), joined(lane, index, index, [0])
    item = joined(item, begin, stop, [0])
    other = joined(begins, everybody, nobody, [0]) > 0
    idle = joined(jnp.zeros(new.shape[0], bool), nobody, everybody, [0]) > 0

    before = jnp.maximum(item - 1, 0)
    has_old = item > begin[lane]
    old = unit_of(before)
    done = has_old & (other | idle)
    resumed = base[old] < begin[lane]
    complete = ends[old] == item
    block = units.first[unit] + item - base[unit]
    old_block = units.first[old] + before - base[old]
    page_place = units.last[old] - old_block * blocks.pages
    dirty = has_old & (page_place >= 0) & (page_place < blocks.pages)
    place = jnp.clip(block // held, 0, windows - 1)
    row = units.row[unit] * windows
    source = jnp.where(idle, 0, row + place)
    # A lane asks for its next window when it takes one up; its last event is that it has nothing to do.
    by_lane = jnp.lexsort((step, lane))
    following = jnp.zeros_like(step).at[by_lane[:-1]].set(source[by_lane[1:]])
    starts = by_lane[jnp.searchsorted(lane[by_lane], jnp.arange(lanes, dtype=jnp.int32))]
    # Places that a lane takes in turn: two for windows and accumulators, three for queries.
    turns = (
        jnp.zeros((2, step.shape[0]), jnp.int32)
        .at[:, by_lane]
        .set(_earlier(jnp.stack([step >= 0, other | idle])[:, by_lane], lane[by_lane]))
    )
    now, later = ((2 * lane + (turns[0] + i) % 2) * width for i in (1, 0))
    finish = done & complete & ~resumed
    order = jnp.lexsort((lane, step))
    ended = _earlier(finish[order][None], step[order])[0]
    slot, listed = (jnp.zeros_like(step).at[order].set(jnp.minimum(n, slots)) for n in (ended, ended + finish[order]))
    slot = jnp.where(finish, slot, slots)
    some = (units.nulls[unit] > 0) & ~idle
    left = jnp.zeros_like(some).at[by_lane].set(_left(some[by_lane], (other | idle)[by_lane], lane[by_lane]))
    change = jnp.where(other | idle, some.astype(jnp.int32) - left, 0)
    nulls = jnp.zeros_like(step).at[order].set(jnp.cumsum(change[order], dtype=jnp.int32))
    events = Events(
        step=step,
        part=jnp.where(step < _NEVER, step * buffers + lane // (lanes // buffers), _NEVER),
        lane=lane,
        next=jnp.where(idle, NOTHING, jnp.where(other, OTHER, SAME)),
        following=jnp.where(idle, 0, following),
        room=later,
        at=jnp.where(idle, 0, (block - place * held) * blocks.pages) + now,
        low=units.low[unit] - place * window + now,
        last=jnp.where(idle, -FAR, jnp.minimum(units.column[unit] - place * window, window - 1) + now),
        block=block,
        position=jnp.where(idle, -FAR, units.position[unit]),
        end=jnp.where(idle, -FAR, units.end[unit]),
        # A lane without work asks for some query all the same.
        token=jnp.where(idle, 0, units.token[unit]),
        tokens=jnp.where(idle, 1, units.tokens[unit]),
        query=3 * lane + (turns[1] + 1) % 3,
        acc=2 * lane + (turns[1] + 1) % 2,
        row=jnp.where(some, row, -1),
        nulls=nulls,
        old=jnp.where(finish & (slot == slots), FINISH, jnp.where(done & resumed, KEEP, COMMON)),
        slot=slot,
        listed=listed,
        old_token=units.token[old],
        old_count=units.tokens[old],
        old_gap=units.gap[old],
        page=jnp.where(dirty, page_place, blocks.pages - 1),
        page_rows=jnp.where(dirty, units.written[old], blocks.rows),
    )

    # From the last lane to the first: what a lane resumed goes to the lane that has the block before.
    from_lane = lane_of(jnp.maximum(begin - 1, 0))
    fresh = begin[from_lane] <= base[entered]
    joins = jnp.stack(
        [
            jnp.where(resumes, jnp.where(fresh, from_lane, lanes + from_lane), -1),
            jnp.where(resumes & fresh, units.tokens[entered], 0),
            units.token[entered],
            units.gap[entered],
        ],
        axis=1,
    )
    return Plan(
        scalars=jnp.stack([jnp.max(stop - begin), jnp.asarray(lead, jnp.int32), null, clean.astype(jnp.int32)]),
        events=joined(*(field[order] for field in events)),
        joins=joins[::-1].ravel(),
        windows=source[starts],
    )
