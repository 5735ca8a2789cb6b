"""The kernel: lanes go through blocks of keys in lockstep, one block each a step.

Step s multiplies the blocks that lie in buffer s mod 3 while those of steps s + 1 and s + 2 are on their way. Copies
and products of all lanes are one piece of straight-line code; whatever happens now and then (a lane ends a unit and
begins another, a block with the end of a row) is an event with a loop of its own before or behind that code.

    s = [q | q_pe] [c | k_pe]^T      m' = max(m, max s)      p = 2^(s - m')      l = 2^(m - m') l + sum p
    acc = 2^(m - m') acc + p c       out = acc / l           lse = (m + log2 l) ln 2

with log2 e and the scale folded into q. The sum stays spread over lanes of the vector unit until a unit ends.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.pages import LANES
from pallas_kernels.mla.tpu import plan as plans
from pallas_kernels.mla.tpu.blocks import Blocks
from pallas_kernels.mla.visible import Visible

BUFFERS = 3
# Scores of keys that are not seen, and the maximum to begin with, which is above: their weight is 0 from the start.
_UNSEEN, _LOWEST = -(2.0**100), -(2.0**90)


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
      visible: what a query sees.
      groups: in how many parts lanes go through the stages; with more than one the products of scores of a part stand
        between the products of values of the part before.
      window: columns of the block table held for a lane.
      splits: whether a lane may be told something in the middle of a unit.
      slots: units that can be finished beside the products of the next step; more at once are finished on their own.
    """

    lanes: int
    queries: int
    heads: int
    latent: int
    blocks: Blocks
    shards: int
    visible: Visible
    groups: int
    window: int
    splits: bool
    slots: int

    @property
    def rows(self) -> int:
        """Rows of the products."""
        return self.queries * self.heads

    @property
    def page(self) -> int:
        """Positions of a column of the block table."""
        return self.blocks.rows * self.shards


class Lanes(NamedTuple):
    """State in scalar memory, [lanes] each unless said otherwise.

    Fetching, two steps ahead: next block (its column where pages are no larger than blocks), first and last column to
    read, all as places in `ids`; which of two windows that is, and where the query goes. Working: block, position of
    the unit's first token, end of its row, the query's place, the accumulator, the one before, and where the unit's row of
    the table begins if it has null blocks.
    """

    at: Any
    low: Any
    last: Any
    window: Any
    asked: Any
    block: Any
    position: Any
    end: Any
    query: Any
    acc: Any
    kept: Any
    row: Any
    nulls: Any  # [2] lanes at units with null blocks, and whether `hidden` is not all 0
    fetched: Any  # [BUFFERS] groups of rows on their way
    cursor: Any  # [2] next events: to fetch, to work
    ended: Any  # [2 + 4 (slots + 1)] units to be finished: how many, whose turn; of each accumulator, token, count, gap
    leaving: Any  # [4] tokens on their way out in each turn, of units finished on their own, and cleared slack


class Refs(NamedTuple):
    """Operands and scratch, in the order of the call after the plan."""

    factor: Any  # VMEM [1, 128] fp32: cache scale
    query: Any  # HBM [T, N, L]
    tail: Any  # HBM [T, 2, N, 128]: [q_pe | 0] and [0 | q_pe]
    table: Any  # HBM [windows of all rows, 1, columns of a window, padded] pages of the pool
    cache: Any  # HBM [layers B, groups, n / 2, 128]
    place: Any  # VMEM [parts, 1, keys] positions of keys within a block
    member: Any  # VMEM [1, keys] index of the page a key is in
    words: Any  # VMEM [parts, 3, pack, words, 128] positions of the rows in each word of first, second halves, tails
    out: Any  # HBM [T, N, L]
    lse: Any  # HBM [T, N' / 128, 128]
    buffer: Any  # VMEM [BUFFERS, lanes * pages * groups, piece, 128]
    queries: Any  # VMEM [lanes, BUFFERS, Q, N, L]
    tails: Any  # VMEM [lanes, BUFFERS, 2, Q, N, 128]
    acc: Any  # VMEM [3 lanes, Q N, L] fp32: two for each lane in turn, then what lanes keep of units
    top: Any  # VMEM [3 lanes, Q N, 128] fp32
    total: Any  # VMEM [3 lanes, Q N, 128] fp32
    hidden: Any  # VMEM [lanes, 1, keys] int32: large for keys of null blocks
    stage: Any  # VMEM [2 slots + 1, Q, N, L]: for each slot two in turn, and one for units finished on their own
    stage_lse: Any  # VMEM [2 slots + 1, Q, N' / 128, 128]
    blank: Any  # VMEM [N, L] zeros
    blank_lse: Any  # VMEM [N' / 128, 128] -inf
    ids: Any  # SMEM [(2 lanes + 1) * columns of a window]
    arrived: Any  # DMA [BUFFERS]
    windows: Any  # DMA [lanes + 1]
    asked: Any  # DMA [lanes, BUFFERS]
    left: Any  # DMA [3]
    cleared: Any  # DMA []
    lanes: Lanes


class Event:
    """An event: fields of `plan.Events` by name."""

    def __init__(self, events, index):
        self._events, self._index, self._count = events, index, events.shape[0] // len(plans.Events._fields)

    def __getattr__(self, name):
        return self._events[plans.Events._fields.index(name) * self._count + self._index]


class Work:
    """Bodies of the kernel; all state is in the refs."""

    def __init__(self, shape: Shape, plan: plans.Plan, refs: Refs, interpreted: bool):
        self.shape, self.plan, self.refs, self.lanes, self.interpreted = shape, plan, refs, refs.lanes, interpreted
        self.columns = refs.table.shape[2]

    # Events

    def at(self, which, step, body):
        """Runs body(event) for the events of a step; returns the first event behind them."""

        def one(carry):
            index, _ = carry
            body(Event(self.plan.events, index))
            return index + 1, self.plan.events[index + 1]

        index = self.lanes.cursor[which]
        index, _ = jax.lax.while_loop(lambda c: c[1] == step, one, (index, self.plan.events[index]))
        return index

    def turn(self, event):
        """The lane fetches other blocks from now on, and the query that goes with them."""
        lane = event.lane

        def whole():
            self._look(event, lane)
            self._ask(lane, event.token, event.count)

        if not self.shape.splits:
            whole()
            return
        pl.when(event.next != plans.SAME)(whole)
        pl.when((event.next == plans.SAME) & (event.look == 1))(lambda: self._look(event, lane))

    def _look(self, event, lane):
        """Page ids come from the window that was asked for, and the next one is."""
        state, blocks = self.lanes, self.shape.blocks
        place = 1 - state.window[lane]
        begin = (2 * lane + place) * self.columns
        state.window[lane] = place
        state.at[lane] = event.at * blocks.pages + begin * blocks.parts
        state.last[lane] = event.last + begin
        if self.shape.visible.window is not None:
            state.low[lane] = event.low + begin
        self._window(lane, 0, place).wait()
        self._window(lane, event.following, 1 - place).start()

    def _window(self, lane, row, place):
        begin = pl.multiple_of((2 * lane + place) * self.columns, self.columns)
        return pltpu.make_async_copy(
            self.refs.table.at[row, 0], self.refs.ids.at[pl.ds(begin, self.columns)], self.refs.windows.at[lane]
        )

    def _ask(self, lane, token, count):
        place = _next(self.lanes.asked[lane], BUFFERS)
        self.lanes.asked[lane] = place

        def ask(t):
            for copy in self._query(lane, place, token + t, t):
                copy.start()

        self._each(count, ask)

    def _each(self, count, body):
        """body(t) for the tokens of a unit, of which there is one at least."""
        if self.shape.queries == 1:
            body(0)
            return

        def one(t, carry):
            body(t)
            return carry

        jax.lax.fori_loop(0, count, one, None)

    def _query(self, lane, place, token, t):
        refs, sem = self.refs, self.refs.asked.at[lane, place]
        return (
            pltpu.make_async_copy(refs.query.at[token], refs.queries.at[lane, place, t], sem),
            pltpu.make_async_copy(refs.tail.at[token], refs.tails.at[lane, place, :, t], sem),
        )

    def change(self, event):
        """Behind the last block of a unit: it leaves, and the lane takes up the next."""
        if self.shape.splits:
            pl.when(event.next != plans.SAME)(lambda: self._change(event))
        else:
            self._change(event)

    def _change(self, event):
        lane, old = event.lane, event.old
        acc = self.lanes.acc[lane]
        unit = (event.old_token, event.old_count, event.old_gap)
        self._take_up(event, lane, acc)
        full = self._end(acc, *unit, old == plans.FINISH)

        @pl.when(full | (old == plans.KEEP))
        def _():
            pl.when(old == plans.KEEP)(lambda: self._copy(acc, 2 * self.shape.lanes + lane))
            pl.when(full)(lambda: self.finish(acc, *unit))

        place = self.lanes.query[lane]

        def wait(t):
            for copy in self._query(lane, place, 0, 0):
                copy.wait()

        self._reset(2 * lane + 1 - (acc & 1))
        self._each(event.count, wait)

    def _take_up(self, event, lane, acc):
        """State of a lane at another unit, or at none."""
        state, row = self.lanes, event.row
        state.nulls[0] += (row >= 0).astype(jnp.int32) - (state.row[lane] >= 0).astype(jnp.int32)
        state.row[lane] = row
        state.block[lane] = event.block
        state.position[lane] = event.position
        if not self.shape.visible.causal:
            state.end[lane] = event.end
        state.kept[lane] = acc
        state.acc[lane] = 2 * lane + 1 - (acc & 1)
        state.query[lane] = _next(state.query[lane], BUFFERS)

    def _end(self, acc, token, count, gap, there=True):
        """Puts a unit on the list of those to be finished; returns whether it is full instead."""
        ended, slots = self.lanes.ended, self.shape.slots
        held = ended[0]
        for i, field in enumerate((acc, token, count, gap)):
            ended[2 + i * (slots + 1) + held] = field  # behind the last slot nobody looks
        room = there & (held < slots)
        ended[0] = held + room.astype(jnp.int32)
        return there & (held >= slots)

    def _copy(self, source, target):
        for ref in (self.refs.acc, self.refs.top, self.refs.total):
            ref[target] = ref[source]

    def _reset(self, acc):
        refs = self.refs
        refs.acc[acc] = jnp.zeros(refs.acc.shape[1:], jnp.float32)
        refs.total[acc] = jnp.zeros(refs.total.shape[1:], jnp.float32)
        refs.top[acc] = jnp.full(refs.top.shape[1:], _LOWEST, jnp.float32)

    # Outputs

    def finish(self, acc, token, count, gap):
        """Finishes a unit now."""
        stage = 2 * self.shape.slots
        self._drain(2)
        self.normalise(acc, stage)
        self.lanes.leaving[2] = count
        self.send(stage, 2, token, count, gap)

    def finish_listed(self):
        """Finishes the units on the list now."""
        self.drain_stages()
        self.normalise_listed()
        self.send_listed()

    def _stage(self, slot):
        """Stages of the slots take turns."""
        return self.lanes.ended[1] * self.shape.slots + slot

    def drain_stages(self):
        if self.shape.slots:
            self._drain(self.lanes.ended[1])

    def normalise_listed(self):
        for slot in range(self.shape.slots):
            self.normalise(self.lanes.ended[2 + slot], self._stage(slot))

    def normalise(self, acc, stage):
        """An accumulator to output and LSE in a stage."""
        refs, shape = self.refs, self.shape
        total = jnp.sum(refs.total[acc], axis=1, keepdims=True)
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        out = refs.acc[acc] * (jnp.where(some, 1.0 / safe, 0.0) * refs.factor[:, :1])
        lse = jnp.where(some, (refs.top[acc] + jnp.log2(safe)) * math.log(2.0), -jnp.inf)
        heads = shape.heads
        for t in range(shape.queries):
            refs.stage[stage, t] = out[t * heads : (t + 1) * heads].astype(refs.stage.dtype)
            for i, first in enumerate(range(0, heads, LANES)):
                refs.stage_lse[stage, t, i : i + 1] = _along_lanes(
                    lse[t * heads + first : t * heads + min(first + LANES, heads)]
                )

    def send(self, stage, turn, token, count, gap):
        """A stage to the unit's tokens, and zeros to the slack behind them."""

        def one(t):
            for copy in self._leave(stage, turn, t, token + t):
                copy.start()

        self._each(count, one)
        pl.when(gap > 0)(lambda: self.clear(token + count, gap))

    def send_listed(self):
        """What `normalise_listed` has put into stages."""
        ended, slots = self.lanes.ended, self.shape.slots

        turn = ended[1]

        def one(slot, tokens):
            token, count, gap = (ended[2 + i * (slots + 1) + slot] for i in range(1, 4))
            self.send(self._stage(slot), turn, token, count, gap)
            return tokens + count

        self.lanes.leaving[turn] = jax.lax.fori_loop(0, ended[0], one, 0)
        ended[0] = 0
        ended[1] = 1 - turn

    def _leave(self, stage, turn, t, token):
        refs, sem = self.refs, self.refs.left.at[turn]
        return (
            pltpu.make_async_copy(refs.stage.at[stage, t], refs.out.at[token], sem),
            pltpu.make_async_copy(refs.stage_lse.at[stage, t], refs.lse.at[token], sem),
        )

    def _drain(self, turn):
        """Waits until the stages of a turn have been copied out."""

        def wait(t, carry):
            for copy in self._leave(0, turn, 0, 0):
                copy.wait()
            return carry

        jax.lax.fori_loop(0, self.lanes.leaving[turn], wait, None)
        self.lanes.leaving[turn] = 0

    def clear(self, token, count):
        """Slack tokens: output 0, LSE -inf."""

        def send(t, carry):
            for copy in self._blank(token + t):
                copy.start()
            return carry

        jax.lax.fori_loop(0, count, send, None)
        self.lanes.leaving[3] += count

    def _blank(self, token):
        refs = self.refs
        return (
            pltpu.make_async_copy(refs.blank, refs.out.at[token], refs.cleared),
            pltpu.make_async_copy(refs.blank_lse, refs.lse.at[token], refs.cleared),
        )

    # Blocks

    def fetch(self, lane, slot):
        """Starts the copies of a lane's next block; returns how many pages come.

        Pages that are not to be read are copies of size 0, and the place for them keeps what it had, which is finite.
        An interpreter has no copies of a size not known before; there they are predicated.
        """
        state, refs, blocks = self.lanes, self.refs, self.shape.blocks
        at, last = state.at[lane], state.last[lane]
        low = None if self.shape.visible.window is None else state.low[lane]
        first, part = at, 0
        if blocks.parts > 1:
            first = jax.lax.div(at, blocks.parts)
            part = at - first * blocks.parts
        came = jnp.clip(last + 1 - first, 0, blocks.pages)
        if low is not None:
            came = jnp.maximum(came - jnp.maximum(low - first, 0), 0)
        for i in range(blocks.pages):
            column = first + i
            there = column <= last if low is None else (column <= last) & (column >= low)
            count = blocks.groups if self.interpreted else jnp.where(there, blocks.groups, 0)
            # Behind the last page there may be no page id, and in an interpreter not even memory.
            page = refs.ids[jnp.where(there, column, 0) if self.interpreted else column]
            source = refs.cache.at[page, pl.ds(0, count)]
            if blocks.parts > 1:
                source = source.at[:, pl.ds(pl.multiple_of(part * blocks.piece, blocks.piece), blocks.piece)]
            target = refs.buffer.at[slot, pl.ds(self._place(lane, i, 0), count)]
            copy = pltpu.make_async_copy(source, target, refs.arrived.at[slot])
            pl.when(there)(copy.start) if self.interpreted else copy.start()
        state.at[lane] = at + blocks.pages
        return came

    def fetch_all(self, slot):
        """A step's blocks in a loop over lanes, for the first steps."""
        fetched = self.lanes.fetched
        fetched[slot] = 0

        def one(lane, carry):
            fetched[slot] += self.fetch(lane, slot) * self.shape.blocks.groups
            return carry

        jax.lax.fori_loop(0, self.shape.lanes, one, None)

    def take(self, slot):
        """Waits for a buffer to have what was sent for."""
        refs, groups = self.refs, self.shape.blocks.groups

        def wait(count):
            some = refs.buffer.at[slot, pl.ds(0, count)]
            pltpu.make_async_copy(some, some, refs.arrived.at[slot]).wait()

        if not self.interpreted:
            wait(self.lanes.fetched[slot])
            return

        def page(i, carry):
            wait(groups)
            return carry

        jax.lax.fori_loop(0, jax.lax.div(self.lanes.fetched[slot], groups), page, None)

    def wipe(self, slot, event):
        """Zeros to rows that the cache does not have yet, before the page is multiplied: 0 * NaN is NaN."""
        lane, dirty, end, blocks = event.lane, event.page, event.page_end, self.shape.blocks
        part = self._split(self.lanes.block[lane])[1] if blocks.parts > 1 else 0
        self._wipe_page(slot, lane, dirty, part, end)

    def _split(self, block):
        """First column of a block, and which part of its page it is."""
        blocks = self.shape.blocks
        if blocks.parts == 1:
            return block * blocks.pages, 0
        column = jax.lax.div(block, blocks.parts)
        return column, block - column * blocks.parts

    def _wipe_page(self, slot, lane, page, part, end):
        """Keeps rows at positions below `end` of a page, whole words of the rows at a time."""
        refs, blocks = self.refs, self.shape.blocks
        pack = refs.words.shape[2]
        bits = 32 // pack
        for kind in range(3):
            keep = None
            for i in range(pack):
                mask = ((1 << bits) - 1) << (bits * i)
                mask = mask - (1 << 32) if mask >= 1 << 31 else mask
                word = jnp.where(refs.words[part, kind, i] < end, jnp.int32(mask), jnp.int32(0))
                keep = word if keep is None else keep | word
            for group in range(kind, blocks.groups - 1, 2) if kind < 2 else (blocks.groups - 1,):
                rows = refs.buffer[slot, self._place(lane, page, group)]
                words = pltpu.bitcast(rows, jnp.int32) & keep
                refs.buffer[slot, self._place(lane, page, group)] = pltpu.bitcast(words, rows.dtype)

    def hide(self, slot):
        """Keys of null blocks, where a lane is at a unit that has some: not seen, and wiped."""
        state, refs, shape = self.lanes, self.refs, self.shape
        blocks, spare = shape.blocks, 2 * shape.lanes * self.columns

        @pl.when(state.nulls[1] == 1)
        def _():
            state.nulls[1] = 0
            refs.hidden[...] = jnp.zeros(refs.hidden.shape, jnp.int32)

        def lane(i, carry):
            @pl.when(state.row[i] >= 0)
            def _():
                first = self._split(state.block[i])[0]
                window = jax.lax.div(first, shape.window)
                ids = refs.ids.at[pl.ds(spare, self.columns)]
                copy = pltpu.make_async_copy(
                    refs.table.at[state.row[i] + window, 0], ids, refs.windows.at[shape.lanes]
                )  # fmt: skip
                copy.start()
                copy.wait()

                def page(j, carry):
                    @pl.when(refs.ids[spare + first - window * shape.window + j] == self.plan.scalars[2])
                    def _():
                        refs.hidden[i] = jnp.where(refs.member[...] == j, plans.FAR, refs.hidden[i])
                        blank = jnp.zeros((blocks.groups, *refs.buffer.shape[2:]), refs.buffer.dtype)
                        refs.buffer[slot, pl.ds(self._place(i, j, 0), blocks.groups)] = blank

                    return carry

                jax.lax.fori_loop(0, blocks.pages, page, None)

            return carry

        @pl.when(state.nulls[0] > 0)
        def _():
            state.nulls[1] = 1
            jax.lax.fori_loop(0, shape.lanes, lane, None)

    def _place(self, lane, page, group):
        """Where a group of a page lies in a buffer."""
        return (lane * self.shape.blocks.pages + page) * self.shape.blocks.groups + group

    # Products

    def multiply(self, slot, beside):
        """All lanes through one block each.

        `beside(lane)` is written with the weights of the lane, where nothing of the buffers is read: copies that begin
        there are in the way of no load.
        """
        shape = self.shape
        each = shape.lanes // shape.groups
        parts = [range(g * each, (g + 1) * each) for g in range(shape.groups)]
        scores, weights = {}, {}

        def weigh(part):
            for lane in part:
                beside(lane)
                weights[lane] = self.weigh(lane, scores.pop(lane))

        for lane in parts[0]:
            scores[lane] = self.scores(slot, lane)
        weigh(parts[0])
        for earlier, part in zip(parts, parts[1:], strict=False):
            for done, lane in zip(earlier, part, strict=True):
                self.values(slot, done, *weights.pop(done))
                scores[lane] = self.scores(slot, lane)
            weigh(part)
        for lane in parts[-1]:
            self.values(slot, lane, *weights.pop(lane))

    def _rows(self, x):
        """Rows as they enter products; the interpreter of some platforms has no mixed ones."""
        return x.astype(jnp.bfloat16) if self.interpreted else x

    def _latent(self, slot, lane):
        """[keys, L] latents of a block, put together from its planes."""
        refs, blocks = self.refs, self.shape.blocks
        planes = []
        for plane in range(self.shape.latent // LANES):
            halves = [
                refs.buffer[slot, self._place(lane, i, 2 * plane + half)] for half in range(2) for i in range(blocks.pages)
            ]  # fmt: skip
            planes.append(jnp.concatenate(halves, axis=0))
        return self._rows(jnp.concatenate(planes, axis=1))

    def scores(self, slot, lane):
        """[Q N, keys] scores in base 2, unseen keys far below."""
        refs, shape, state = self.refs, self.shape, self.lanes
        rows, blocks = shape.rows, shape.blocks
        place = state.query[lane]
        query = refs.queries[lane, place].reshape(rows, shape.latent)
        tail = refs.tails[lane, place].reshape(2 * rows, LANES)
        tails = [refs.buffer[slot, self._place(lane, i, blocks.groups - 1)] for i in range(blocks.pages)]
        tails = jnp.concatenate(tails, axis=0)
        score = _dot(query, self._latent(slot, lane), 1)
        both = _dot(tail, self._rows(tails), 1)
        score += jnp.concatenate([both[:rows], both[rows:]], axis=1)
        if shape.visible.soft_cap is not None:
            score = jnp.tanh(score) * (shape.visible.soft_cap * math.log2(math.e))
        return score + self._bias(lane)

    def _bias(self, lane):
        """0 for keys that are seen, [1, keys] or [Q N, keys]."""
        refs, shape, state = self.refs, self.shape, self.lanes
        visible = shape.visible
        first, part = self._split(state.block[lane])
        state.block[lane] += 1
        place = refs.place[part] + refs.hidden[lane]
        own = state.position[lane] - first * shape.page
        if shape.queries > 1:
            own += jax.lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0) // shape.heads
        seen = place <= own if visible.causal else place < state.end[lane] - first * shape.page
        if visible.window is not None:
            seen &= place > own - visible.window
        return jnp.where(seen, 0.0, _UNSEEN)

    def weigh(self, lane, score):
        """Weights of the block in bf16 and the factor of what was before; updates maximum and sum.

        Maximum, sum and factor lie in all 128 lanes, since a column would have to be spread for each use.
        """
        refs, acc = self.refs, self.lanes.acc[lane]
        keys = score.shape[1]
        old = refs.top[acc]
        top = jnp.maximum(old, jnp.max(score, axis=1, keepdims=True))
        fade = jnp.exp2(old - top)
        weight = jnp.exp2(score - _wide(top, keys))
        if keys % LANES:
            share = jnp.sum(weight, axis=1, keepdims=True) * (1 / LANES)
        else:
            share = sum(weight[:, i : i + LANES] for i in range(0, keys, LANES))
        refs.total[acc] = refs.total[acc] * fade + share
        refs.top[acc] = top
        return weight.astype(jnp.bfloat16), fade

    def values(self, slot, lane, weight, fade):
        """Adds the weighted latents."""
        refs, acc = self.refs, self.lanes.acc[lane]
        refs.acc[acc] = refs.acc[acc] * _wide(fade, self.shape.latent) + _dot(weight, self._latent(slot, lane), 0)

    def merge(self, lane):
        """What a lane has of a resumed unit, into what lanes before it have; the last one finishes the unit."""
        refs, lanes = self.refs, self.shape.lanes
        target, count, token, gap = (self.plan.joins[4 * (lanes - 1 - lane) + i] for i in range(4))

        @pl.when(target >= 0)
        def _():
            into = jnp.where(target < lanes, self.lanes.kept[jnp.minimum(target, lanes - 1)], lanes + target)
            source = 2 * lanes + lane
            one, other = refs.top[into], refs.top[source]
            top = jnp.maximum(one, other)
            mine, its = jnp.exp2(one - top), jnp.exp2(other - top)
            wide = refs.acc.shape[2]
            refs.acc[into] = refs.acc[into] * _wide(mine, wide) + refs.acc[source] * _wide(its, wide)
            refs.total[into] = refs.total[into] * mine + refs.total[source] * its
            refs.top[into] = top

            @pl.when(count > 0)
            def _():
                if self.shape.slots:
                    pl.when(self.lanes.ended[0] == self.shape.slots)(self.finish_listed)
                    self._end(into, token, count, gap)
                else:
                    self.finish(into, token, count, gap)

    # The whole

    def prepare(self):
        """State before the first event."""
        state, refs, shape = self.lanes, self.refs, self.shape

        def lane(i, carry):
            for ref in (state.at, state.window, state.asked, state.query, state.block):
                ref[i] = 0
            state.last[i] = state.row[i] = -1
            state.low[i] = 0
            state.position[i] = state.end[i] = -plans.FAR
            state.acc[i] = 2 * i
            self._window(i, self.plan.windows[i], 1).start()
            if shape.queries > 1:  # a unit may have fewer tokens
                refs.queries[i] = jnp.zeros(refs.queries.shape[1:], refs.queries.dtype)
                refs.tails[i] = jnp.zeros(refs.tails.shape[1:], refs.tails.dtype)
            self._reset(2 * i)
            return carry

        jax.lax.fori_loop(0, shape.lanes, lane, None)
        for ref in (state.nulls, state.cursor, state.ended, state.leaving):
            for i in range(ref.shape[0]):
                ref[i] = 0
        refs.hidden[...] = jnp.zeros(refs.hidden.shape, jnp.int32)
        refs.blank[...] = jnp.zeros(refs.blank.shape, refs.blank.dtype)
        refs.blank_lse[...] = jnp.full(refs.blank_lse.shape, -jnp.inf, jnp.float32)
        self.clear(0, self.plan.scalars[1])

        def place(i, carry):  # what no copy comes to is multiplied too
            groups = shape.blocks.groups
            blank = jnp.zeros((groups, *refs.buffer.shape[2:]), refs.buffer.dtype)
            for slot in range(BUFFERS):
                refs.buffer[slot, pl.ds(i * groups, groups)] = blank
            return carry

        jax.lax.fori_loop(0, shape.lanes * shape.blocks.pages, place, None)

    def run(self):
        state, shape = self.lanes, self.shape
        self.prepare()
        steps = self.plan.scalars[0]

        def first(step, carry):
            state.cursor[0] = self.at(0, step, self.turn)
            self.fetch_all(step)
            return carry

        jax.lax.fori_loop(0, 2, first, None)
        state.cursor[1] = self.at(1, 0, self.change)

        def step(s, carry):
            slot = jax.lax.rem(s, BUFFERS)
            state.cursor[0] = self.at(0, s + 2, self.turn)
            self.drain_stages()
            self.take(slot)
            self.at(1, s + 1, lambda event: self.wipe(slot, event))
            self.hide(slot)
            self.advance(slot, jax.lax.rem(s + 2, BUFFERS))
            self.send_listed()
            state.cursor[1] = self.at(1, s + 1, self.change)
            return carry

        jax.lax.fori_loop(0, steps, step, None)

        def last(i, carry):
            self.merge(shape.lanes - 1 - i)
            return carry

        jax.lax.fori_loop(0, shape.lanes, last, None)
        self.finish_listed()
        for turn in range(3):
            self._drain(turn)
        for ahead in range(2):
            self.take(jax.lax.rem(steps + ahead, BUFFERS))

        def asked(lane, carry):
            self._window(lane, 0, 0).wait()
            return carry

        jax.lax.fori_loop(0, shape.lanes, asked, None)

        def cleared(t, carry):
            for copy in self._blank(0):
                copy.wait()
            return carry

        jax.lax.fori_loop(0, state.leaving[3], cleared, None)

    def advance(self, slot, coming):
        """The straight-line code: blocks two steps on are sent for, ended units normalised, blocks multiplied."""
        fetched = []
        self.normalise_listed()
        self.multiply(slot, lambda lane: fetched.append(self.fetch(lane, coming)))
        self.lanes.fetched[coming] = _tree(jnp.add, fetched) * self.shape.blocks.groups


def _tree(operation, values):
    """Values joined pairwise, for a short chain."""
    values = list(values)
    while len(values) > 1:
        odd = values[len(values) // 2 * 2 :]
        values = [operation(a, b) for a, b in zip(values[::2], values[1::2], strict=False)] + odd
    return values[0]


def _next(place, count):
    return jnp.where(place == count - 1, 0, place + 1)


def _wide(x, width):
    """[n, 128] with equal lanes to [n, width]."""
    return jnp.concatenate([x] * (-(-width // LANES)), axis=1)[:, :width]


def _dot(a, b, axis):
    """a [m, k] with b [n, k] (axis 1) or [k, n] (axis 0), in fp32."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _along_lanes(x):
    """[n, 128] with equal lanes, n <= 128, to [1, 128] whose lane i has row i."""
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.sum(jnp.where(row == lane, x, 0.0), axis=0, keepdims=True)


def kernel(*refs, shape: Shape, interpreted: bool):
    """See the module; `refs` are a plan, then `Refs` with `Lanes` spread out at its end."""
    count = len(plans.Plan._fields)
    rest = len(Refs._fields) - 1
    plan = plans.Plan(*refs[:count])
    Work(shape, plan, Refs(*refs[count : count + rest], Lanes(*refs[count + rest :])), interpreted).run()
