"""Events: a lane turns to other blocks, and later to another unit."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.tpu import plan as plans
from pallas_kernels.mla.tpu.outputs import Outputs
from pallas_kernels.mla.tpu.state import BUFFERS, Event, following_place


class Changes(Outputs):
    """What happens now and then, ahead of the products or behind them."""

    def at(self, which, step, body) -> Any:
        """Runs body(event) for the events of a step; returns the first event behind them."""

        def one(carry):
            index, _ = carry
            body(Event(self.plan.events, index))
            return index + 1, self.plan.events[index + 1]

        index = self.lanes.cursor[which]
        index, _ = jax.lax.while_loop(lambda c: c[1] == step, one, (index, self.plan.events[index]))
        return index

    def turn(self, event) -> None:
        """The lane fetches other blocks from now on, and the query that goes with them."""
        lane = event.lane

        def whole():
            self._look(event, lane)
            self._ask(lane, event.token, event.tokens)

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
        place = following_place(self.lanes.asked[lane], BUFFERS)
        self.lanes.asked[lane] = place

        def ask(t, n):
            for copy in self.query(lane, place, token + t, t, n):
                copy.start()

        self.each(count, ask)

    def change(self, event) -> None:
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
        full = self.end(acc, *unit, old == plans.FINISH)

        @pl.when(full | (old == plans.KEEP))
        def _():
            pl.when(old == plans.KEEP)(lambda: self.copy(acc, 2 * self.shape.lanes + lane))
            pl.when(full)(lambda: self.finish(acc, *unit))

        place = self.lanes.query[lane]

        def wait(t, n):
            for copy in self.query(lane, place, 0, 0, n):
                copy.wait()

        self.reset(2 * lane + 1 - (acc & 1))
        self.each(event.tokens, wait)

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
        state.query[lane] = following_place(state.query[lane], BUFFERS)

    def query(self, lane, place, token, t, count) -> tuple[Any, Any]:
        """Copies of the queries of `count` tokens, to those of a unit from the t-th on."""
        refs, sem = self.refs, self.refs.asked.at[lane, place]
        source, target = pl.ds(token, count), pl.ds(t, count)
        return (
            pltpu.make_async_copy(refs.query.at[source], refs.queries.at[lane, place, target], sem),
            pltpu.make_async_copy(refs.tail.at[source], refs.tails.at[lane, place, target], sem),
        )
