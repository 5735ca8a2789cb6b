"""Events: a lane turns to other blocks, and later to another unit."""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.tpu import plan as plans
from pallas_kernels.mla.tpu.outputs import Outputs
from pallas_kernels.mla.tpu.state import Event


class Changes(Outputs):
    """What happens now and then, ahead of the products or behind them."""

    def at(self, cursor, step, body, field="step") -> Any:
        """Runs body(event) for the events of a step; `cursor`, the next event and its step, comes back behind them.

        field: what is compared with `step`, and stands in the cursor.
        """

        def one(cursor):
            index, _ = cursor
            following = getattr(Event(self.plan.events, index + 1), field)
            body(Event(self.plan.events, index))
            return index + 1, following

        return jax.lax.while_loop(lambda cursor: cursor[1] == step, one, cursor)

    def turn(self, event) -> None:
        """The lane fetches other blocks from now on, and the query that goes with them."""
        self._look(event)
        if self.shape.splits:
            pl.when(event.next != plans.SAME)(lambda: self._ask(event))
        else:
            self._ask(event)

    def _look(self, event):
        """Page ids come from the window that was asked for, and the next one is."""
        state, lane, at = self.lanes, event.lane, event.at
        following = self.window(lane, event.following, event.room)
        self.window(lane, 0, 0).wait()
        following.start()
        state.at[lane] = at
        if not self.shape.whole:
            state.last[lane] = event.last
        if self.shape.visible.window is not None:
            state.low[lane] = event.low

    def window(self, lane, row, place) -> Any:
        """The copy of a window of the block table to a place in `ids`."""
        begin = pl.multiple_of(place, self.columns)
        return pltpu.make_async_copy(
            self.refs.table.at[row, 0], self.refs.ids.at[pl.ds(begin, self.columns)], self.refs.windows.at[lane]
        )

    def _ask(self, event):
        place, token = event.query, event.token

        def ask(t, n):
            for copy in self.query(place, token + t, t, n):
                copy.start()

        self.each(event.tokens, ask)

    def change(self, event) -> None:
        """Behind the last block of a unit: it leaves, and the lane takes up the next."""
        if self.shape.splits:
            pl.when(event.next != plans.SAME)(lambda: self._change(event))
        else:
            self._change(event)

    def _change(self, event):
        state, acc, lane, query = self.lanes, event.acc, event.lane, event.query
        self.reset(acc)
        before, old, slot, listed = acc ^ 1, event.old, event.slot, event.listed
        unit = (event.old_token, event.old_count, event.old_gap)
        fields = {
            "row": event.row, "block": event.block, "position": event.position, "kept": before, "acc": acc,
            "query": query,
        }  # fmt: skip
        if not self.shape.visible.causal:
            fields["end"] = event.end
        nulls = event.nulls
        for name, value in fields.items():
            getattr(state, name)[lane] = value
        state.nulls[0] = nulls
        state.ended[0] = listed
        self.list(slot, before, *unit)

        def wait(t, n):
            for copy in self.query(query, 0, 0, n):
                copy.wait()

        self.each(event.tokens, wait)

        @pl.when(old != plans.COMMON)
        def _():
            pl.when(old == plans.KEEP)(lambda: self.copy(before, 2 * self.shape.lanes + lane))
            pl.when(old == plans.FINISH)(lambda: self.finish(before, *unit))

    def query(self, place, token, t, count) -> tuple[Any, Any]:
        """Copies of the queries of `count` tokens, to those of a unit from the t-th on."""
        refs, sem = self.refs, self.refs.asked.at[place]
        source, target = pl.ds(token, count), pl.ds(t, count)
        return (
            pltpu.make_async_copy(refs.query.at[source], refs.queries.at[place, target], sem),
            pltpu.make_async_copy(refs.tail.at[source], refs.tails.at[place, target], sem),
        )
