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
STAGES = 2
# Scores of keys that are not seen, and the maximum to begin with, which is above: their weight is 0 from the start.
_UNSEEN, _LOWEST = -(2.0**100), -(2.0**90)
_FAR = 1 << 29


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
      pages: of a layer of the pool.
      visible: what a query sees.
      groups: in how many parts lanes go through the stages; with more than one the products of scores of a part stand
        between the products of values of the part before.
      window: columns of the block table held for a lane.
    """

    lanes: int
    queries: int
    heads: int
    latent: int
    blocks: Blocks
    shards: int
    pages: int
    visible: Visible
    groups: int
    window: int

    @property
    def rows(self) -> int:
        """Rows of the products."""
        return self.queries * self.heads

    @property
    def page(self) -> int:
        """Positions of a column of the block table."""
        return self.blocks.rows * self.shards

    @property
    def window_blocks(self) -> int:
        return self.window // self.blocks.pages * self.blocks.parts


class Lanes(NamedTuple):
    """Scalar memory, [lanes] each unless said otherwise.

    Fetching, two steps ahead: block and last column within the window, the window's place, the query's place. Working:
    block, unit (-1: none), position of its first token, whether it was resumed, the query's place.
    """

    fetch_block: Any
    fetch_last: Any
    fetch_window: Any
    fetch_query: Any
    block: Any
    unit: Any
    position: Any
    resumed: Any
    query: Any
    pages: Any  # [BUFFERS, lanes * pages] page ids of the blocks in the buffers
    lowest: Any  # [BUFFERS] smallest of them
    cursor: Any  # [4] next events: for windows, to fetch, to work, and whether `hidden` is not all 0
    staged: Any  # [STAGES] tokens on their way out of each, [STAGES] number of slack tokens cleared, next stage


class Refs(NamedTuple):
    """Operands and scratch, in the order of the call after the plan."""

    factor: Any  # VMEM [1, 128] fp32: cache scale
    query: Any  # HBM [T, N, L]
    tail: Any  # HBM [T, 2, N, 128]: [q_pe | 0] and [0 | q_pe]
    table: Any  # HBM [R windows, 1, window]
    cache: Any  # HBM [layers B, groups, n / 2, 128]
    place: Any  # VMEM [parts, 1, keys] positions of keys within a block
    member: Any  # VMEM [1, keys] index of the page a key is in
    words: Any  # VMEM [parts, 3, pack, words, 128] positions of the rows in each word of first, second halves, tails
    out: Any  # HBM [T, N, L]
    lse: Any  # HBM [T, N' / 128, 128]
    buffer: Any  # VMEM [BUFFERS, lanes, pages, groups, piece, 128]
    queries: Any  # VMEM [lanes, BUFFERS, Q, N, L]
    tails: Any  # VMEM [lanes, BUFFERS, 2, Q, N, 128]
    acc: Any  # VMEM [2 lanes, Q N, L] fp32; the second half has what lanes have of resumed units
    top: Any  # VMEM [2 lanes, Q N, 128] fp32
    total: Any  # VMEM [2 lanes, Q N, 128] fp32
    hidden: Any  # VMEM [lanes, 1, keys] int32: large for keys of null blocks
    stage: Any  # VMEM [STAGES, Q, N, L]
    stage_lse: Any  # VMEM [STAGES, Q, N' / 128, 128]
    blank: Any  # VMEM [N, L] zeros
    blank_lse: Any  # VMEM [N' / 128, 128] -inf
    ids: Any  # SMEM [2 lanes, 1, window]
    arrived: Any  # DMA [BUFFERS]
    windows: Any  # DMA [lanes]
    asked: Any  # DMA [lanes, BUFFERS]
    left: Any  # DMA [STAGES]
    cleared: Any  # DMA []
    lanes: Lanes


class Work:
    """Bodies of the kernel; all state is in the refs."""

    def __init__(self, shape: Shape, plan: plans.Plan, refs: Refs, widen: bool):
        self.shape, self.plan, self.refs, self.lanes, self.widen = shape, plan, refs, refs.lanes, widen

    # Events

    def at(self, which, step, body):
        """Runs body(event) for the events of a step and moves on."""

        def one(carry):
            event, _ = carry
            body(event)
            return event + 1, self.plan.step[event + 1]

        event = self.lanes.cursor[which]
        event, _ = jax.lax.while_loop(lambda c: c[1] == step, one, (event, self.plan.step[event]))
        return event

    def ask_window(self, event):
        """Page ids of the event's window, into the place that the lane does not fetch from."""
        lane, kind = self.plan.lane[event], self.plan.kind[event]

        @pl.when(kind <= plans.RESUME)
        def _():
            self._window(lane, self.plan.window[event], 1 - self.lanes.fetch_window[lane]).start()

    def _window(self, lane, row, place):
        return pltpu.make_async_copy(
            self.refs.table.at[row], self.refs.ids.at[2 * lane + place], self.refs.windows.at[lane]
        )

    def turn(self, event):
        """The lane fetches other blocks from now on, and the query that goes with them."""
        state, plan, shape = self.lanes, self.plan, self.shape
        lane, kind, unit = plan.lane[event], plan.kind[event], plan.unit[event]

        @pl.when((kind == plans.DONE) | (kind == plans.CUT))
        def _():
            # A lane without work reads the first page of its window again and again.
            state.fetch_block[lane] = 0
            state.fetch_last[lane] = 0

        @pl.when(kind <= plans.RESUME)
        def _():
            place = 1 - state.fetch_window[lane]
            self._window(lane, 0, place).wait()
            state.fetch_window[lane] = place
            skipped = jax.lax.div(plan.block[event], shape.window_blocks)
            state.fetch_block[lane] = plan.block[event] - skipped * shape.window_blocks
            state.fetch_last[lane] = jnp.minimum(plan.column[unit] - skipped * shape.window, shape.window - 1)

        @pl.when((kind == plans.BEGIN) | (kind == plans.RESUME))
        def _():
            place = _next(state.fetch_query[lane], BUFFERS)
            state.fetch_query[lane] = place

            def token(t, carry):
                for copy in self._query(lane, place, plan.token[unit] + t, t):
                    copy.start()
                return carry

            jax.lax.fori_loop(0, plan.count[unit], token, None)

    def _query(self, lane, place, token, t):
        refs, sem = self.refs, self.refs.asked.at[lane, place]
        return (
            pltpu.make_async_copy(refs.query.at[token], refs.queries.at[lane, place, t], sem),
            pltpu.make_async_copy(refs.tail.at[token], refs.tails.at[lane, place, :, t], sem),
        )

    def change(self, event):
        """Behind the last block of a unit: it leaves, and the lane takes up the next."""
        state, plan, refs = self.lanes, self.plan, self.refs
        lane, kind, unit = plan.lane[event], plan.kind[event], state.unit[plan.lane[event]]
        ends = (kind != plans.MORE) & (kind != plans.PART) & (unit >= 0)
        pl.when(ends & (state.resumed[lane] == 1))(lambda: self._keep(lane))
        pl.when(ends & (state.resumed[lane] == 0) & (kind != plans.CUT))(lambda: self.finish(lane, unit))

        @pl.when((kind == plans.DONE) | (kind == plans.CUT))
        def _():
            state.unit[lane] = -1
            state.position[lane] = -_FAR

        @pl.when((kind == plans.BEGIN) | (kind == plans.RESUME))
        def _():
            new = plan.unit[event]
            state.unit[lane] = new
            state.position[lane] = plan.position[new]
            state.block[lane] = plan.block[event]
            state.resumed[lane] = (kind == plans.RESUME).astype(jnp.int32)
            place = _next(state.query[lane], BUFFERS)
            state.query[lane] = place

            def token(t, carry):
                for copy in self._query(lane, place, 0, 0):
                    copy.wait()
                return carry

            jax.lax.fori_loop(0, plan.count[new], token, None)
            refs.acc[lane] = jnp.zeros(refs.acc.shape[1:], jnp.float32)
            refs.total[lane] = jnp.zeros(refs.total.shape[1:], jnp.float32)
            refs.top[lane] = jnp.full(refs.top.shape[1:], _LOWEST, jnp.float32)

    def _keep(self, lane):
        refs, place = self.refs, self.shape.lanes + lane
        for ref in (refs.acc, refs.top, refs.total):
            ref[place] = ref[lane]

    def finish(self, index, unit):
        """Normalises an accumulator and sends it to the unit's tokens; zeros to the slack behind them."""
        refs, plan, state, shape = self.refs, self.plan, self.lanes, self.shape
        stage = state.staged[STAGES + 1]
        state.staged[STAGES + 1] = _next(stage, STAGES)
        self._drain(stage)
        total = jnp.sum(refs.total[index], axis=1, keepdims=True)
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        out = refs.acc[index] * (jnp.where(some, 1.0 / safe, 0.0) * refs.factor[:, :1])
        lse = jnp.where(some, (refs.top[index] + jnp.log2(safe)) * math.log(2.0), -jnp.inf)
        heads = shape.heads
        for t in range(shape.queries):
            refs.stage[stage, t] = out[t * heads : (t + 1) * heads].astype(refs.stage.dtype)
            for i, first in enumerate(range(0, heads, LANES)):
                refs.stage_lse[stage, t, i : i + 1] = _along_lanes(
                    lse[t * heads + first : t * heads + min(first + LANES, heads)]
                )
        count, token = plan.count[unit], plan.token[unit]

        def send(t, carry):
            for copy in self._leave(stage, t, token + t):
                copy.start()
            return carry

        jax.lax.fori_loop(0, count, send, None)
        state.staged[stage] = count
        self.clear(token + count, plan.gap[unit])

    def _leave(self, stage, t, token):
        refs, sem = self.refs, self.refs.left.at[stage]
        return (
            pltpu.make_async_copy(refs.stage.at[stage, t], refs.out.at[token], sem),
            pltpu.make_async_copy(refs.stage_lse.at[stage, t], refs.lse.at[token], sem),
        )

    def _drain(self, stage):
        def wait(t, carry):
            for copy in self._leave(stage, 0, 0):
                copy.wait()
            return carry

        jax.lax.fori_loop(0, self.lanes.staged[stage], wait, None)

    def clear(self, token, count):
        """Slack tokens: output 0, LSE -inf."""

        def send(t, carry):
            for copy in self._blank(token + t):
                copy.start()
            return carry

        jax.lax.fori_loop(0, count, send, None)
        self.lanes.staged[STAGES] += count

    def _blank(self, token):
        refs = self.refs
        return (
            pltpu.make_async_copy(refs.blank, refs.out.at[token], refs.cleared),
            pltpu.make_async_copy(refs.blank_lse, refs.lse.at[token], refs.cleared),
        )

    # Blocks

    def fetch(self, lane, slot):
        """Starts the copies of a lane's next block; returns the smallest page id."""
        state, refs, blocks = self.lanes, self.refs, self.shape.blocks
        block, last = state.fetch_block[lane], state.fetch_last[lane]
        ids = 2 * lane + state.fetch_window[lane]
        first, part = block * blocks.pages, 0
        if blocks.parts > 1:
            first = jax.lax.div(block, blocks.parts)
            part = block - first * blocks.parts
        first = jnp.minimum(first, last)
        lowest = None
        for i in range(blocks.pages):
            # Behind the last page the first is read once more: its rows are all written, or it is itself the last.
            column = jnp.where(first + i <= last, first + i, first) if i else first
            page = refs.ids[ids, 0, column]
            lowest = page if lowest is None else jnp.minimum(lowest, page)
            state.pages[slot, lane * blocks.pages + i] = page
            source = refs.cache.at[self.plan.scalars[1] * self.shape.pages + page]
            if blocks.parts > 1:
                source = source.at[:, pl.ds(pl.multiple_of(part * blocks.piece, blocks.piece), blocks.piece)]
            pltpu.make_async_copy(source, refs.buffer.at[slot, lane, i], refs.arrived.at[slot]).start()
        state.fetch_block[lane] = block + 1
        return lowest

    def fetch_all(self, slot):
        """The same for all lanes in a loop, for the first steps."""

        def one(lane, lowest):
            return jnp.minimum(lowest, self.fetch(lane, slot))

        self.lanes.lowest[slot] = jax.lax.fori_loop(0, self.shape.lanes, one, jnp.int32(_FAR))

    def take(self, slot):
        """Waits for a buffer to be full."""
        whole = self.refs.buffer.at[slot]
        pltpu.make_async_copy(whole, whole, self.refs.arrived.at[slot]).wait()

    def wipe(self, slot, event):
        """Zeros to rows that the cache does not have yet, before blocks with a unit's last page are multiplied: 0 * NaN is NaN."""
        state, plan, blocks = self.lanes, self.plan, self.shape.blocks
        lane = plan.lane[event]
        unit, block = state.unit[lane], state.block[lane]

        @pl.when(unit >= 0)
        def _():
            first, part = block * blocks.pages, 0
            if blocks.parts > 1:
                first = jax.lax.div(block, blocks.parts)
                part = block - first * blocks.parts
            column = plan.column[unit]
            dirty = column - first
            end = plan.end[unit] - column * self.shape.page
            # A block of one page only has it in all places.
            stop = jnp.where(dirty == 0, blocks.pages, dirty + 1)

            @pl.when((end < self.shape.page) & (dirty >= 0) & (dirty < blocks.pages))
            def _():
                def page(i, carry):
                    self._wipe_page(slot, lane, i, part, end)
                    return carry

                jax.lax.fori_loop(dirty, stop, page, None)

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
                rows = refs.buffer[slot, lane, page, group]
                words = pltpu.bitcast(rows, jnp.int32) & keep
                refs.buffer[slot, lane, page, group] = pltpu.bitcast(words, rows.dtype)

    def hide(self, slot):
        """Keys of null blocks, if a block of the step has any: not seen, and wiped."""
        state, refs, shape = self.lanes, self.refs, self.shape

        @pl.when(state.cursor[3] == 1)
        def _():
            state.cursor[3] = 0
            refs.hidden[...] = jnp.zeros(refs.hidden.shape, jnp.int32)

        @pl.when(state.lowest[slot] == 0)
        def _():
            state.cursor[3] = 1

            def page(index, carry):
                lane = jax.lax.div(index, shape.blocks.pages)
                i = index - lane * shape.blocks.pages

                @pl.when(state.pages[slot, index] == 0)
                def _():
                    refs.hidden[lane] = jnp.where(refs.member[...] == i, _FAR, refs.hidden[lane])
                    refs.buffer[slot, lane, i] = jnp.zeros(refs.buffer.shape[3:], refs.buffer.dtype)

                return carry

            jax.lax.fori_loop(0, shape.lanes * shape.blocks.pages, page, None)

    # Products

    def multiply(self, slot, before=None):
        """All lanes through one block each; `before(lane)` is written ahead of the lane's scores."""
        shape = self.shape
        each = shape.lanes // shape.groups
        parts = [range(g * each, (g + 1) * each) for g in range(shape.groups)]
        scores, weights = {}, {}

        def score(lane):
            if before is not None:
                before(lane)
            scores[lane] = self.scores(slot, lane)

        for lane in parts[0]:
            score(lane)
        for lane in parts[0]:
            weights[lane] = self.weigh(lane, scores.pop(lane))
        for earlier, part in zip(parts, parts[1:], strict=False):
            for done, lane in zip(earlier, part, strict=True):
                self.values(slot, done, *weights.pop(done))
                score(lane)
            for lane in part:
                weights[lane] = self.weigh(lane, scores.pop(lane))
        for lane in parts[-1]:
            self.values(slot, lane, *weights.pop(lane))

    def _rows(self, x):
        """Rows as they enter products; the interpreter of some platforms has no mixed ones."""
        return x.astype(jnp.bfloat16) if self.widen else x

    def _latent(self, slot, lane):
        """[keys, L] latents of a block, put together from its planes."""
        refs, blocks = self.refs, self.shape.blocks
        planes = []
        for plane in range(self.shape.latent // LANES):
            halves = [
                refs.buffer[slot, lane, i, 2 * plane + half] for half in range(2) for i in range(blocks.pages)
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
        tails = jnp.concatenate([refs.buffer[slot, lane, i, blocks.groups - 1] for i in range(blocks.pages)], axis=0)
        score = _dot(query, self._latent(slot, lane), 1)
        both = _dot(tail, self._rows(tails), 1)
        score += jnp.concatenate([both[:rows], both[rows:]], axis=1)
        if shape.visible.soft_cap is not None:
            score = jnp.tanh(score) * (shape.visible.soft_cap * math.log2(math.e))
        return score + self._bias(lane)

    def _bias(self, lane):
        """0 for keys that are seen, [1, keys] or [Q N, keys]."""
        refs, shape, state = self.refs, self.shape, self.lanes
        blocks, visible = shape.blocks, shape.visible
        block, part = state.block[lane], 0
        first = block * blocks.pages
        if blocks.parts > 1:
            first = jax.lax.div(block, blocks.parts)
            part = block - first * blocks.parts
        state.block[lane] = block + 1
        place = refs.place[part] + refs.hidden[lane]
        own = state.position[lane] - first * shape.page
        if shape.queries > 1:
            own += jax.lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0) // shape.heads
        if visible.causal:
            seen = place <= own
        else:
            end = jnp.where(state.unit[lane] >= 0, self.plan.end[jnp.maximum(state.unit[lane], 0)], -_FAR)
            seen = place < end - first * shape.page
        if visible.window is not None:
            seen &= place > own - visible.window
        return jnp.where(seen, 0.0, _UNSEEN)

    def weigh(self, lane, score):
        """Weights of the block in bf16 and the factor of what was before; updates maximum and sum.

        Maximum, sum and factor lie in all 128 lanes, since a column would have to be spread for each use.
        """
        refs = self.refs
        keys = score.shape[1]
        old = refs.top[lane]
        top = jnp.maximum(old, jnp.max(score, axis=1, keepdims=True))
        fade = jnp.exp2(old - top)
        weight = jnp.exp2(score - _wide(top, keys))
        if keys % LANES:
            share = jnp.sum(weight, axis=1, keepdims=True) * (1 / LANES)
        else:
            share = sum(weight[:, i : i + LANES] for i in range(0, keys, LANES))
        refs.total[lane] = refs.total[lane] * fade + share
        refs.top[lane] = top
        return weight.astype(jnp.bfloat16), fade

    def values(self, slot, lane, weight, fade):
        """Adds the weighted latents."""
        acc = self.refs.acc
        acc[lane] = acc[lane] * _wide(fade, acc.shape[2]) + _dot(weight, self._latent(slot, lane), 0)

    def merge(self, lane):
        """What a lane has of a resumed unit, into what lanes before it have; the last one finishes the unit."""
        refs, into, final = self.refs, self.plan.into[lane], self.plan.final[lane]

        @pl.when(into >= 0)
        def _():
            source = self.shape.lanes + lane
            one, other = refs.top[into], refs.top[source]
            top = jnp.maximum(one, other)
            mine, its = jnp.exp2(one - top), jnp.exp2(other - top)
            refs.acc[into] = refs.acc[into] * _wide(mine, refs.acc.shape[2]) + refs.acc[source] * _wide(its, refs.acc.shape[2])
            refs.total[into] = refs.total[into] * mine + refs.total[source] * its
            refs.top[into] = top

        pl.when(final >= 0)(lambda: self.finish(into, final))

    # The whole

    def prepare(self):
        """State before the first event."""
        state, refs, shape = self.lanes, self.refs, self.shape

        def lane(i, carry):
            for ref in (state.fetch_block, state.fetch_last, state.fetch_window, state.block, state.resumed):
                ref[i] = 0
            for ref in (state.fetch_query, state.query):
                ref[i] = 0
            state.unit[i] = -1
            state.position[i] = -_FAR
            refs.ids[2 * i, 0, 0] = 0
            if shape.queries > 1:  # a unit may have fewer tokens
                refs.queries[i] = jnp.zeros(refs.queries.shape[1:], refs.queries.dtype)
                refs.tails[i] = jnp.zeros(refs.tails.shape[1:], refs.tails.dtype)
            refs.acc[i] = jnp.zeros(refs.acc.shape[1:], jnp.float32)
            refs.total[i] = jnp.zeros(refs.total.shape[1:], jnp.float32)
            refs.top[i] = jnp.full(refs.top.shape[1:], _LOWEST, jnp.float32)
            return carry

        jax.lax.fori_loop(0, shape.lanes, lane, None)
        for i in range(4):
            state.cursor[i] = 0
        for i in range(STAGES + 2):
            state.staged[i] = 0
        refs.hidden[...] = jnp.zeros(refs.hidden.shape, jnp.int32)
        refs.blank[...] = jnp.zeros(refs.blank.shape, refs.blank.dtype)
        refs.blank_lse[...] = jnp.full(refs.blank_lse.shape, -jnp.inf, jnp.float32)
        self.clear(0, self.plan.scalars[2])

    def ahead(self, step):
        """Events of steps to come: what is fetched changes at step + 2, and ids for step + 3 are asked for."""
        self.lanes.cursor[1] = self.at(1, step + 2, self.turn)
        self.lanes.cursor[0] = self.at(0, step + 3, self.ask_window)

    def run(self):
        state, shape = self.lanes, self.shape
        self.prepare()
        steps = self.plan.scalars[0]

        def first(i, carry):
            self.ahead(i - 3)

            @pl.when((i >= 1) & (i - 1 < steps))
            def _():
                self.fetch_all(i - 1)

            return carry

        jax.lax.fori_loop(0, 3, first, None)
        state.cursor[2] = self.at(2, 0, self.change)

        def step(s, carry):
            slot = jax.lax.rem(s, BUFFERS)
            coming = jax.lax.rem(s + 2, BUFFERS)
            self.ahead(s)
            self.take(slot)
            self.at(2, s + 1, lambda event: self.wipe(slot, event))
            self.hide(slot)
            pl.when(s + 2 < steps)(lambda: self._fetch_straight(coming))
            self.multiply(slot)
            state.cursor[2] = self.at(2, s + 1, self.change)
            return carry

        jax.lax.fori_loop(0, steps, step, None)

        def last(i, carry):
            self.merge(shape.lanes - 1 - i)
            return carry

        jax.lax.fori_loop(0, shape.lanes, last, None)
        for stage in range(STAGES):
            self._drain(stage)

        def cleared(t, carry):
            for copy in self._blank(0):
                copy.wait()
            return carry

        jax.lax.fori_loop(0, state.staged[STAGES], cleared, None)

    def _fetch_straight(self, slot):
        lowest = [self.fetch(lane, slot) for lane in range(self.shape.lanes)]
        while len(lowest) > 1:
            lowest = [jnp.minimum(a, b) for a, b in zip(lowest[::2], lowest[1::2], strict=False)] + lowest[
                len(lowest) // 2 * 2 :
            ]
        self.lanes.lowest[slot] = lowest[0]


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


def kernel(*refs, shape: Shape, widen: bool):
    """See the module; `refs` are a plan, then `Refs` with `Lanes` spread out at its end."""
    count = len(plans.Plan._fields)
    rest = len(Refs._fields) - 1
    plan = plans.Plan(*refs[:count])
    Work(shape, plan, Refs(*refs[count : count + rest], Lanes(*refs[count + rest :])), widen).run()
