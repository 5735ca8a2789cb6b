"""Blocks of keys on their way into vector memory, and what must not be multiplied taken out of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.tpu import plan as plans
from pallas_kernels.mla.tpu.state import Work


class Copies(Work):
    """Fetching of blocks."""

    def fetch(self, lane, slot) -> Any:
        """Starts the copies of a lane's next block; returns how many pages come.

        Pages that are not to be read are copies of size 0, and the place for them keeps what it had, which is finite.
        An interpreter has no copies of a size not known before; there they are predicated.
        """
        state, refs, blocks = self.lanes, self.refs, self.shape.blocks
        at, last = state.at[lane], state.last[lane]
        low = None if self.shape.visible.window is None else state.low[lane]
        first, part = at, jnp.int32(0)
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
            # Windows are wide enough for reading behind the last page: there are other ids, all of them in the pool.
            page = refs.ids[column]
            source = refs.cache.at[page, pl.ds(0, count)]
            if blocks.parts > 1:
                rows = pl.ds(pl.multiple_of(part * blocks.piece, blocks.piece), blocks.piece)
                source = refs.cache.at[page, pl.ds(0, count), rows]
            target = refs.buffer.at[slot, pl.ds(self.place(lane, i, 0), count)]
            copy = pltpu.make_async_copy(source, target, refs.arrived.at[slot])
            pl.when(there)(copy.start) if self.interpreted else copy.start()
        state.at[lane] = at + blocks.pages
        return came

    def fetch_all(self, slot) -> None:
        """A step's blocks in a loop over lanes, for the first steps."""
        fetched = self.lanes.fetched
        fetched[slot] = 0

        def one(lane, carry):
            fetched[slot] += self.fetch(lane, slot) * self.shape.blocks.groups
            return carry

        jax.lax.fori_loop(0, self.shape.lanes, one, None)

    def take(self, slot) -> None:
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

    def wipe(self, slot, event) -> None:
        """Zeros to rows that the cache does not have yet, before the page is multiplied: 0 * NaN is NaN."""
        lane, dirty, end, blocks = event.lane, event.page, event.page_end, self.shape.blocks
        part = self.split(self.lanes.block[lane])[1] if blocks.parts > 1 else 0
        self._wipe_page(slot, lane, dirty, part, end)

    def _wipe_page(self, slot, lane, page, part, end):
        """Keeps rows at positions below `end` of a page, whole words of the rows at a time."""
        refs, blocks = self.refs, self.shape.blocks
        pack = refs.words.shape[2]
        bits = 32 // pack
        for kind in range(3):
            halves = []
            for i in range(pack):
                mask = ((1 << bits) - 1) << (bits * i)
                mask = mask - (1 << 32) if mask >= 1 << 31 else mask
                word = jnp.where(refs.words[part, kind, i] < end, jnp.int32(mask), jnp.int32(0))
                halves.append(word)
            keep = functools.reduce(jnp.bitwise_or, halves)
            for group in range(kind, blocks.groups - 1, 2) if kind < 2 else (blocks.groups - 1,):
                rows = refs.buffer[slot, self.place(lane, page, group)]
                words = pltpu.bitcast(rows, jnp.int32) & keep
                refs.buffer[slot, self.place(lane, page, group)] = pltpu.bitcast(words, rows.dtype)

    def hide(self, slot) -> None:
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
                first = self.split(state.block[i])[0]
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
                        refs.buffer[slot, pl.ds(self.place(i, j, 0), blocks.groups)] = blank

                    return carry

                jax.lax.fori_loop(0, blocks.pages, page, None)

            return carry

        @pl.when(state.nulls[0] > 0)
        def _():
            state.nulls[1] = 1
            jax.lax.fori_loop(0, shape.lanes, lane, None)
