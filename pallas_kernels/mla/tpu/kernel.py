"""The kernel: lanes go through blocks of keys in lockstep, one block each a step.

Step s multiplies the blocks that lie in buffer s mod 3 while those of steps s + 1 and s + 2 are on their way. Copies
and products of all lanes are one piece of straight-line code; whatever happens now and then (a lane ends a unit and
begins another, a block with the end of a row) is an event with a loop of its own before or behind that code.

    s = [q | q_pe] [c | k_pe]^T      m' = max(m, max s)      p = 2^(s - m')      l = 2^(m - m') l + sum p
    acc = 2^(m - m') acc + p c       out = acc / l           lse = (m + log2 l) ln 2

with log2 e and the scale folded into q. The sum stays spread over lanes of the vector unit until a unit ends.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mla.tpu import plan as plans
from pallas_kernels.mla.tpu.copies import Copies
from pallas_kernels.mla.tpu.events import Changes
from pallas_kernels.mla.tpu.staggered import Staggered
from pallas_kernels.mla.tpu.state import BUFFERS, Event, Lanes, Refs, Shape


class Kernel(Changes, Copies, Staggered):
    """The order of things."""

    def prepare(self) -> None:
        """State before the first event."""
        state, refs, shape = self.lanes, self.refs, self.shape

        def lane(i, carry):
            for ref in (state.at, state.block):
                ref[i] = 0
            state.query[i] = BUFFERS * i
            state.last[i] = state.row[i] = -1
            state.low[i] = 0
            state.position[i] = state.end[i] = -plans.FAR
            state.acc[i] = 2 * i
            self.window(i, self.plan.windows[i], (2 * i + 1) * self.columns).start()
            if shape.queries > 1:  # a unit may have fewer tokens
                for place in range(BUFFERS):
                    refs.queries[BUFFERS * i + place] = jnp.zeros(refs.queries.shape[1:], refs.queries.dtype)
                    refs.tails[BUFFERS * i + place] = jnp.zeros(refs.tails.shape[1:], refs.tails.dtype)
            self.reset(2 * i)
            return carry

        jax.lax.fori_loop(0, shape.lanes, lane, None)
        for ref in (state.nulls, state.ended, state.leaving):
            for i in range(ref.shape[0]):
                ref[i] = 0
        refs.hidden[...] = jnp.zeros(refs.hidden.shape, jnp.int32)
        refs.blank[...] = jnp.zeros(refs.blank.shape, refs.blank.dtype)
        refs.blank_lse[...] = jnp.full(refs.blank_lse.shape, -jnp.inf, jnp.float32)
        self.clear(0, self.plan.scalars[1])
        if shape.whole:
            return

        def place(i, carry):  # what no copy comes to is multiplied too
            for slot in range(BUFFERS):
                self.blank(refs.buffers[0], slot, 0, i)
            return carry

        jax.lax.fori_loop(0, shape.lanes * shape.blocks.pages, place, None)

    def run(self) -> None:
        state, shape = self.lanes, self.shape
        self.prepare()
        steps = self.plan.scalars[0]

        def first(step, turns):
            turns = self.at(turns, step, self.turn)
            self.fetch_all(step, step < steps)
            return turns

        begin = (jnp.int32(0), self.plan.events[0])
        turns = jax.lax.fori_loop(0, 2, first, begin)
        changes = self.at(begin, 0, self.change)

        def step(s, carry):
            turns, changes = carry
            slot = jax.lax.rem(s, BUFFERS)
            turns = self.at(turns, s + 2, self.turn)
            self.drain_stages()
            self.take(slot)
            self.wipe_all(changes, s + 1, slot)
            self.hide(slot)
            self.advance(slot, jax.lax.rem(s + 2, BUFFERS), s + 2 < steps)
            self.send_listed()
            pl.when(state.leaving[4] > shape.lanes)(self.drain_spares)
            return turns, self.at(changes, s + 1, self.change)

        jax.lax.fori_loop(0, steps, step, (turns, changes))

        def last(i, carry):
            self.merge(shape.lanes - 1 - i)
            return carry

        jax.lax.fori_loop(0, shape.lanes, last, None)
        self.finish_listed()
        for turn in range(3):
            self.drain(turn)
        if not shape.whole:
            for ahead in range(2):
                self.take(jax.lax.rem(steps + ahead, BUFFERS))

        def asked(lane, carry):
            self.window(lane, 0, 0).wait()
            return carry

        jax.lax.fori_loop(0, shape.lanes, asked, None)

        def cleared(t, carry):
            for copy in self._blank(0):
                copy.wait()
            return carry

        jax.lax.fori_loop(0, state.leaving[3], cleared, None)

    def wipe_all(self, cursor, step, slot) -> None:
        """Wipes what events of a step say, buffer by buffer."""
        cursor = (cursor[0], Event(self.plan.events, cursor[0]).part)
        for part in range(self.shape.buffers):
            cursor = self.at(
                cursor, step * self.shape.buffers + part, lambda event, part=part: self.wipe(part, slot, event), "part"
            )

    def advance(self, slot, coming, more) -> None:
        """The straight-line code: blocks two steps on are sent for, ended units normalised, blocks multiplied."""
        fetched = []
        self.normalise_listed()
        self.multiply(slot, lambda lane: fetched.append(self.fetch(lane, coming, more)))
        if not self.shape.whole:
            self.lanes.fetched[coming] = _tree(jnp.add, fetched) * self.shape.blocks.groups


def _tree(operation, values):
    """Values joined pairwise, for a short chain."""
    values = list(values)
    while len(values) > 1:
        odd = values[len(values) // 2 * 2 :]
        values = [operation(a, b) for a, b in zip(values[::2], values[1::2], strict=False)] + odd
    return values[0]


def kernel(*refs, shape: Shape, interpreted: bool) -> None:
    """See the module; `refs` are a plan, then `Refs` with buffers and `Lanes` spread out at its end."""
    count = len(plans.Plan._fields)
    plan, rest = plans.Plan(*refs[:count]), refs[count:]
    single = len(Refs._fields) - 2
    buffers, state = rest[single : single + shape.buffers], Lanes._make(rest[single + shape.buffers :])
    Kernel(shape, plan, Refs._make([*rest[:single], buffers, state]), interpreted).run()
