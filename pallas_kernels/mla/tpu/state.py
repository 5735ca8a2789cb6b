"""What the parts of the kernel share: static sizes, the refs of a call, state in scalar memory, an event."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from pallas_kernels.mla.tpu import plan as plans
from pallas_kernels.mla.tpu.blocks import Blocks
from pallas_kernels.mla.visible import Visible

BUFFERS = 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of a launch.

    Attributes:
      lanes: units worked on side by side.
      queries: most tokens of a unit, Q.
      heads: N, a multiple of 16.
      latent: L.
      blocks: the cut of the keys.
      shards: ranks that the token axis is striped over.
      period: `blocks.period`.
      visible: what a query sees.
      groups: in how many parts lanes go through the stages; with more than one the products of scores of a part stand
        between the products of values of the part before.
      window: columns of the block table held for a lane.
      splits: whether a lane may be told something in the middle of a unit.
      slots: units that can be finished beside the products of the next step; more at once are finished on their own.
      staggered: lanes go through the stages one behind the other (`staggered`).
      lse: whether it is returned; without it what that costs can be measured.
      whole: whether all pages of a block are copied, those not to be read too.
    """

    lanes: int
    queries: int
    heads: int
    latent: int
    blocks: Blocks
    shards: int
    period: int
    visible: Visible
    groups: int
    window: int
    splits: bool
    slots: int
    staggered: bool
    lse: bool
    whole: bool

    @property
    def rows(self) -> int:
        """Rows of the products."""
        return self.queries * self.heads

    @property
    def buffers(self) -> int:
        """Parts of the lanes with buffers of their own: copies into those of one are in no way of loads of another."""
        return self.groups if self.whole else 1

    @property
    def spares(self) -> int:
        """Stages of units finished on their own: as many as may end in two steps."""
        return 2 * self.lanes

    @property
    def span(self) -> int:
        """Positions from a block to the next, on all ranks."""
        return self.blocks.keys * self.shards


class Lanes(NamedTuple):
    """State in scalar memory, [lanes] each unless said otherwise.

    Fetching, two steps ahead: column of the next block, first and last column to read, all as places in `ids`. Working:
    block, position of the unit's first token, end of its row, the query's place, the accumulator, the one before, and
    where the unit's row of the table begins if it has null blocks.
    """

    at: Any
    low: Any
    last: Any
    block: Any
    position: Any
    end: Any
    query: Any
    acc: Any
    kept: Any
    row: Any
    nulls: Any  # [2] lanes at units with null blocks, and whether `hidden` is not all 0
    fetched: Any  # [BUFFERS] groups of rows on their way
    ended: Any  # [2 + 4 (slots + 1)] units to be finished: how many, whose turn; of each accumulator, token, count, gap
    # [5] tokens on their way out in each turn, of units finished on their own, cleared slack; stages of those units
    leaving: Any


class Refs(NamedTuple):
    """Operands and scratch, in the order of the call after the plan."""

    factor: Any  # VMEM [1, 128] fp32: cache scale
    query: Any  # HBM [T, N, L]
    tail: Any  # HBM [T, 2, N, 128]: [q_pe | 0] and [0 | q_pe]
    table: Any  # HBM [windows of all rows, 1, columns of a window, padded] pages of the pool
    cache: Any  # HBM [layers B, groups, n / 2, 128]
    place: Any  # VMEM [period, 1, keys] positions of the keys of the first blocks
    member: Any  # VMEM [1, keys] index of the page a key is in
    keep: Any  # VMEM [rows of a word, 2 words of a piece, 128] int32: all bits, then those of the first rows, then none
    out: Any  # HBM [T, N, L]
    lse: Any  # HBM [T, N' / 128, 128]
    queries: Any  # VMEM [lanes * BUFFERS, Q, N, L]
    tails: Any  # VMEM [lanes * BUFFERS, Q, 2, N, 128]
    acc: Any  # VMEM [3 lanes, Q N, L] fp32: two for each lane in turn, then what lanes keep of units
    top: Any  # VMEM [3 lanes, Q N, 128] fp32
    total: Any  # VMEM [3 lanes, Q N, 128] fp32
    hidden: Any  # VMEM [lanes, 1, keys] int32: large for keys of null blocks
    stage: Any  # VMEM [2 slots + spares, Q, N, L]: for each slot two in turn, then those of units finished on their own
    stage_lse: Any  # VMEM [2 slots + spares, Q, N' / 128, 128]
    blank: Any  # VMEM [N, L] zeros
    blank_lse: Any  # VMEM [N' / 128, 128] -inf
    ids: Any  # SMEM [(2 lanes + 1) * columns of a window]
    arrived: Any  # DMA [BUFFERS]
    windows: Any  # DMA [lanes + 1]
    asked: Any  # DMA [lanes * BUFFERS]
    left: Any  # DMA [3]
    cleared: Any  # DMA []
    buffers: Any  # for each part of the lanes that has one, VMEM [BUFFERS, its lanes * pages * groups, piece, 128]
    lanes: Lanes


class Event:
    """An event: fields of `plan.Events` by name. Each use is a load, and none moves ahead of a store."""

    def __init__(self, events, index):
        self._events, self._index, self._count = events, index, events.shape[0] // len(plans.Events._fields)

    def __getattr__(self, name):
        return self._events[plans.Events._fields.index(name) * self._count + self._index]


class Work:
    """Base of the parts of the kernel; all state is in the refs."""

    def __init__(self, shape: Shape, plan: plans.Plan, refs: Refs, interpreted: bool):
        self.shape, self.plan, self.refs, self.lanes, self.interpreted = shape, plan, refs, refs.lanes, interpreted
        self.columns = refs.table.shape[2]

    def each(self, count, body) -> None:
        """body(t, n) for the tokens of a unit, at least one: n from the t-th on. An interpreter takes one at a time."""
        if self.shape.queries == 1 or not self.interpreted:
            body(0, 1 if self.shape.queries == 1 else count)
            return

        def one(t, carry):
            body(t, 1)
            return carry

        jax.lax.fori_loop(0, count, one, None)

    @property
    def share(self) -> int:
        """Lanes of a buffer."""
        return self.shape.lanes // self.shape.buffers

    def held(self, lane: int) -> tuple[Any, int]:
        """The buffer of a lane, and which one of those in it it is."""
        return self.refs.buffers[lane // self.share], lane % self.share

    def where(self, lane, body) -> None:
        """body(buffer, lane in it) for a traced lane."""
        if len(self.refs.buffers) == 1:
            body(self.refs.buffers[0], lane)
            return
        for part, buffer in enumerate(self.refs.buffers):
            mine = (lane >= part * self.share) & (lane < (part + 1) * self.share)
            pl.when(mine)(functools.partial(body, buffer, lane - part * self.share))

    def place(self, lane, page, group) -> Any:
        """Where a group of a page lies in a buffer, by the number of the lane in it."""
        return (lane * self.shape.blocks.pages + page) * self.shape.blocks.groups + group
