"""Accumulators: begun, kept, merged, normalised, and sent out."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.pages import LANES
from pallas_kernels.mla.tpu.state import Work

# Scores of keys that are not seen, and the maximum to begin with, which is above: their weight is 0 from the start.
UNSEEN, LOWEST = -(2.0**100), -(2.0**90)


class Outputs(Work):
    """What becomes of units that end."""

    def reset(self, acc) -> None:
        """Begins an accumulator."""
        refs = self.refs
        refs.acc[acc] = jnp.zeros(refs.acc.shape[1:], jnp.float32)
        refs.total[acc] = jnp.zeros(refs.total.shape[1:], jnp.float32)
        refs.top[acc] = jnp.full(refs.top.shape[1:], LOWEST, jnp.float32)

    def list(self, slot, acc, token, count, gap) -> None:
        """Puts a unit on the list of those to be finished; behind the last slot nobody looks."""
        for i, field in enumerate((acc, token, count, gap)):
            self.lanes.ended[2 + i * (self.shape.slots + 1) + slot] = field

    def copy(self, source, target) -> None:
        """One accumulator over another."""
        for ref in (self.refs.acc, self.refs.top, self.refs.total):
            ref[target] = ref[source]

    def merge(self, lane) -> None:
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
            width = refs.acc.shape[2]
            refs.acc[into] = refs.acc[into] * wide(mine, width) + refs.acc[source] * wide(its, width)
            refs.total[into] = refs.total[into] * mine + refs.total[source] * its
            refs.top[into] = top

            @pl.when(count > 0)
            def _():
                if self.shape.slots:
                    pl.when(self.lanes.ended[0] == self.shape.slots)(self.finish_listed)
                    self.list(self.lanes.ended[0], into, token, count, gap)
                    self.lanes.ended[0] += 1
                else:
                    self.finish(into, token, count, gap)

    def finish(self, acc, token, count, gap) -> None:
        """Finishes a unit now."""
        leaving = self.lanes.leaving
        pl.when(leaving[4] == self.shape.spares)(self.drain_spares)
        stage = 2 * self.shape.slots + leaving[4]
        self.normalise(acc, stage)
        leaving[2] += count
        leaving[4] += 1
        self.send(stage, 2, token, count, gap)

    def drain_spares(self) -> None:
        """Waits for units finished on their own: copies behind blocks on their way in take long."""
        self.drain(2)
        self.lanes.leaving[4] = 0

    def finish_listed(self) -> None:
        """Finishes the units on the list now."""
        self.drain_stages()
        self.normalise_listed()
        self.send_listed()

    def stage(self, slot) -> Any:
        """Stages of the slots take turns."""
        return self.lanes.ended[1] * self.shape.slots + slot

    def drain_stages(self) -> None:
        if self.shape.slots:
            self.drain(self.lanes.ended[1])

    def normalise_listed(self) -> None:
        for slot in range(self.shape.slots):
            self.normalise(self.lanes.ended[2 + slot], self.stage(slot))

    def normalise(self, acc, stage) -> None:
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
            if not shape.lse:
                continue
            for i, first in enumerate(range(0, heads, LANES)):
                refs.stage_lse[stage, t, i : i + 1] = _along_lanes(
                    lse[t * heads + first : t * heads + min(first + LANES, heads)]
                )

    def send(self, stage, turn, token, count, gap) -> None:
        """A stage to the unit's tokens, and zeros to the slack behind them."""

        def one(t, n):
            for copy in self._leave(stage, turn, t, token + t, n):
                copy.start()

        self.each(count, one)
        pl.when(gap > 0)(lambda: self.clear(token + count, gap))

    def send_listed(self) -> None:
        """What `normalise_listed` has put into stages."""
        ended, slots = self.lanes.ended, self.shape.slots

        turn = ended[1]

        def one(slot, tokens):
            token, count, gap = (ended[2 + i * (slots + 1) + slot] for i in range(1, 4))
            self.send(self.stage(slot), turn, token, count, gap)
            return tokens + count

        self.lanes.leaving[turn] = jax.lax.fori_loop(0, ended[0], one, 0)
        ended[0] = 0
        ended[1] = 1 - turn

    def _leave(self, stage, turn, t, token, count):
        refs, sem = self.refs, self.refs.left.at[turn]
        source, target = pl.ds(t, count), pl.ds(token, count)
        copies = (
            pltpu.make_async_copy(refs.stage.at[stage, source], refs.out.at[target], sem),
            pltpu.make_async_copy(refs.stage_lse.at[stage, source], refs.lse.at[target], sem),
        )
        return copies if self.shape.lse else copies[:1]

    def drain(self, turn) -> None:
        """Waits until the stages of a turn have been copied out."""

        refs, count = self.refs, self.lanes.leaving[turn]

        def wait(some):
            for ref in (refs.out, refs.lse) if self.shape.lse else (refs.out,):
                part = ref.at[pl.ds(0, some)]
                pltpu.make_async_copy(part, part, refs.left.at[turn]).wait()

        if self.interpreted:
            jax.lax.fori_loop(0, count, lambda t, carry: wait(1), None)
        else:
            wait(count)
        self.lanes.leaving[turn] = 0

    def clear(self, token, count) -> None:
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


def wide(x, width) -> jax.Array:
    """[n, 128] with equal lanes to [n, width]."""
    return jnp.concatenate([x] * (-(-width // LANES)), axis=1)[:, :width]


def _along_lanes(x):
    """[n, 128] with equal lanes, n <= 128, to [1, 128] whose lane i has row i."""
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.sum(jnp.where(row == lane, x, 0.0), axis=0, keepdims=True)
