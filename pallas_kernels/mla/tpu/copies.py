"""Blocks of keys on their way into vector memory, and what must not be multiplied taken out of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.pages import LANES
from pallas_kernels.mla.tpu import plan as plans
from pallas_kernels.mla.tpu.state import Work


class Copies(Work):
    """Fetching of blocks."""

    def fetch(self, lane, slot, more, part=None) -> Any:
        """Starts the copies of a lane's next block, if there are `more` steps; returns how many pages are counted.

        part: of the lanes, for a lane that is traced.

        Counted, pages that are not to be read are copies of size 0, and the place for them keeps what it had, which is
        finite. Else all pages of the block come (`Shape.whole`), and `wipe` takes out what must not be multiplied.
        An interpreter has no copies of a size not known before; there they are predicated.
        """
        state, refs, blocks, whole = self.lanes, self.refs, self.shape.blocks, self.shape.whole
        first = state.at[lane]
        part = lane // self.share if part is None else part
        buffer, held = refs.buffers[part], lane - part * self.share
        came, there = 0, [more] * blocks.pages
        if not whole:
            came, there = self._counted(lane, first)
        for i in range(blocks.pages):
            column = first + i
            count = blocks.groups if self.interpreted else jnp.where(there[i], blocks.groups, 0)
            # Windows are wide enough for reading behind the last page: there are other ids, all of them in the pool.
            page = refs.ids[column]
            source = refs.cache.at[page, pl.ds(0, count)]
            target = buffer.at[slot, pl.ds(self.place(held, i, 0), count)]
            copy = pltpu.make_async_copy(source, target, refs.arrived.at[slot])
            pl.when(there[i])(copy.start) if self.interpreted else copy.start()
        state.at[lane] = first + blocks.pages
        return came

    def _counted(self, lane, first) -> tuple[Any, list[Any]]:
        """How many pages from a column on are read, and which."""
        state, pages = self.lanes, self.shape.blocks.pages
        last = state.last[lane]
        came, there = jnp.clip(last + 1 - first, 0, pages), [first + i <= last for i in range(pages)]
        if self.shape.visible.window is not None:
            low = state.low[lane]
            came = jnp.maximum(came - jnp.maximum(low - first, 0), 0)
            there = [fits & (first + i >= low) for i, fits in enumerate(there)]
        return came, there

    def fetch_all(self, slot, more) -> None:
        """A step's blocks in a loop over lanes, for the first steps."""
        fetched = self.lanes.fetched
        fetched[slot] = 0

        def one(part, lane):
            fetched[slot] += self.fetch(part * self.share + lane, slot, more, part) * self.shape.blocks.groups

        for part in range(self.shape.buffers):
            jax.lax.fori_loop(0, self.share, lambda lane, _, part=part: one(part, lane), None)

    def take(self, slot) -> None:
        """Waits for a buffer to have what was sent for."""
        refs, groups = self.refs, self.shape.blocks.groups

        def wait(count):
            for buffer in refs.buffers:
                some = buffer.at[slot, pl.ds(0, count)]
                pltpu.make_async_copy(some, some, refs.arrived.at[slot]).wait()

        if self.shape.whole:
            wait(refs.buffers[0].shape[1])
            return
        if not self.interpreted:
            wait(self.lanes.fetched[slot])
            return

        def page(i, carry):
            wait(groups)
            return carry

        jax.lax.fori_loop(0, jax.lax.div(self.lanes.fetched[slot], groups), page, None)

    def wipe(self, part, slot, event) -> None:
        """Zeros behind the last row that the cache has, before the block is multiplied: 0 * NaN is NaN."""
        lane, last, blocks, clean = event.lane - part * self.share, event.page, self.shape.blocks, self.plan.scalars[3]
        self._wipe_page(self.refs.buffers[part], slot, lane, last, event.page_rows)
        if not self.shape.whole:
            return

        def behind(page, carry):
            self.blank(self.refs.buffers[part], slot, lane, page)
            return carry

        jax.lax.fori_loop(last + 1, jnp.where(clean == 1, 0, blocks.pages), behind, None)

    def _wipe_page(self, buffer, slot, lane, page, count):
        """Keeps the first `count` rows of a page, whole words of the rows at a time."""
        refs, blocks = self.refs, self.shape.blocks
        pack, words = refs.keep.shape[0], refs.keep.shape[1] // 2

        def keep(count):
            count = jnp.clip(count, 0, blocks.piece)
            full = jax.lax.shift_right_logical(count, pack.bit_length() - 1)
            return refs.keep[count & (pack - 1), pl.ds(words - full, words)]

        first, second = keep(count), keep(count - blocks.rows // 2)
        tails = jnp.where(jax.lax.broadcasted_iota(jnp.int32, first.shape, 1) < LANES // 2, first, second)
        for group in range(blocks.groups):
            place = self.place(lane, page, group)
            rows = buffer[slot, place]
            words = pltpu.bitcast(rows, jnp.int32) & (
                tails if group == blocks.groups - 1 else (first, second)[group % 2]
            )
            buffer[slot, place] = pltpu.bitcast(words, rows.dtype)

    def blank(self, buffer, slot, lane, page) -> None:
        """Zeros to a page of a block."""
        groups = self.shape.blocks.groups
        zeros = jnp.zeros((groups, *buffer.shape[2:]), buffer.dtype)
        buffer[slot, pl.ds(self.place(lane, page, 0), groups)] = zeros

    def hide(self, slot) -> None:
        """Keys of null blocks, where a lane is at a unit that has some: not seen, and wiped."""
        state, refs, shape = self.lanes, self.refs, self.shape
        blocks, spare = shape.blocks, 2 * shape.lanes * self.columns

        def lane(i, carry):
            @pl.when(state.row[i] >= 0)
            def _():
                first = state.block[i] * blocks.pages
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
                        self.where(i, lambda buffer, held: self.blank(buffer, slot, held, j))

                    return carry

                jax.lax.fori_loop(0, blocks.pages, page, None)

            return carry

        now = state.nulls[0]

        @pl.when(now + state.nulls[1] > 0)
        def _():
            state.nulls[1] = now
            refs.hidden[...] = jnp.zeros(refs.hidden.shape, jnp.int32)
            pl.when(now > 0)(lambda: jax.lax.fori_loop(0, shape.lanes, lane, None))
