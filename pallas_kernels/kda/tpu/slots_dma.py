"""Streams states of a pool through VMEM: read ahead by (layer, slot), changed on the way, written behind.

A unit is the state of one row for the heads of one program, [H', K, V], contiguous in the pool. Units are visited
in one order over the whole call: head groups outside, present rows inside. While unit n is worked on, units
up to n + ahead are on their way in and the ones before n on their way out. Which rows are present is settled before the
call (`Order`), so an absent row costs nothing, not even a branch.

What comes in and what goes out have buffers of their own: the compiler cannot tell two places of one buffer apart and
would order every load of a state behind every store of another.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int32

# Fields of the cursor, the next unit to fetch.
_GROUP, _INDEX, _UNIT = range(3)


class Order(NamedTuple):
    """Present entries (rows, or several visits of a row) in order, and where those of each block begin among them.

    Attributes:
      bounds: [blocks + 1] index of the first present entry of each block; the last is their number.
      entry: [n] entries in order; beyond the number of present ones 0.
    """

    bounds: Int32[Array, "blocks1"]
    entry: Int32[Array, "n"]

    def pick(self, field: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """A field of the entries in this order."""
        return field[self.entry]


def order_of(present: Bool[Array, "n"], block: int) -> Order:
    """The order of the entries that are present, cut into blocks of `block` entries."""
    count = present.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    edges = jnp.minimum(jnp.arange(-(-count // block) + 1, dtype=jnp.int32) * block, count)
    rank = jnp.sum(present[None, :] & (index[None, :] < index[:, None]), axis=1, dtype=jnp.int32)
    # Comparisons instead of a sort or scatter: R squared is small, and they fuse into one loop.
    placed = (rank[None, :] == index[:, None]) & present[None, :]
    entry = jnp.sum(jnp.where(placed, index[None, :], 0), axis=1, dtype=jnp.int32)
    bounds = jnp.sum(present[None, :] & (index[None, :] < edges[:, None]), axis=1, dtype=jnp.int32)
    return Order(bounds, entry)


class StateStream(NamedTuple):
    """Refs of one call; `read` is indexed by the order of rows, and read 0 means a state of zeros.

    Attributes:
      source, target: pool in HBM, [layers, S, H, K, V], to read from and to write to (one buffer).
      layer: SMEM [1].
      read: SMEM [R] slots.
      coming, going: VMEM [n, H', K, V] and [m, H', K, V], n and m powers of two; unit i has places i mod n and i mod m.
      arrived, left: DMA semaphores [n] and [m].
      cursor: SMEM [3]; group, index in the order, and number of the next unit to fetch.
      leaving: SMEM [m], copies out of each place not yet waited for.
      count: present rows.
      groups: head groups, static.
      ahead: units fetched ahead, static; a place is free again when `fetch` comes to it.
    """

    source: Any
    target: Any
    layer: Any
    read: Any
    coming: Any
    going: Any
    arrived: Any
    left: Any
    cursor: Any
    leaving: Any
    count: Any
    groups: int
    ahead: int

    @property
    def heads(self) -> int:
        return self.coming.shape[1]

    def arrival(self, unit: Any) -> Any:
        """Place of a unit in `coming`."""
        return unit & (self.coming.shape[0] - 1)

    def departure(self, unit: Any) -> Any:
        """Place of a unit in `going`."""
        return unit & (self.going.shape[0] - 1)

    def _state(self, pool: Any, slot: Any, group: Any) -> Any:
        first = pl.multiple_of(group * self.heads, self.heads) if self.groups > 1 else 0
        return pool.at[self.layer[0], slot, pl.ds(first, self.heads)]

    def _load(self, place: Any, slot: Any, group: Any) -> Any:
        return pltpu.make_async_copy(
            self._state(self.source, slot, group), self.coming.at[place], self.arrived.at[place]
        )

    def _store(self, place: Any, slot: Any, group: Any) -> Any:
        return pltpu.make_async_copy(self.going.at[place], self._state(self.target, slot, group), self.left.at[place])

    def begin(self) -> None:
        """Before the first unit."""

        def clear(place, carry):
            self.leaving[place] = 0
            return carry

        if self.going is not None:
            jax.lax.fori_loop(0, self.going.shape[0], clear, None)
        self.cursor[_UNIT] = 0
        self.cursor[_INDEX] = 0
        self.cursor[_GROUP] = jnp.where(self.count > 0, 0, self.groups)

        def first(i, carry):
            self.fetch(i - self.ahead)
            return carry

        jax.lax.fori_loop(0, self.ahead, first, None)

    def fetch(self, unit: Any) -> None:
        """Starts the unit `ahead` behind this one on its way in, if there is one; one call for each unit in order."""
        if self.groups == 1:
            later = unit + self.ahead

            @pl.when(later < self.count)
            def _():
                self._load(self.arrival(later), self.read[later], 0).start()

            return
        # Finding group and index takes a division, or a cursor that is carried along.
        later, index, group = self.cursor[_UNIT], self.cursor[_INDEX], self.cursor[_GROUP]

        @pl.when(group < self.groups)
        def _():
            self._load(self.arrival(later), self.read[index], group).start()
            last = index + 1 == self.count
            self.cursor[_UNIT] = later + 1
            self.cursor[_INDEX] = jnp.where(last, 0, index + 1)
            self.cursor[_GROUP] = jnp.where(last, group + 1, group)

    def take(self, unit: Any) -> None:
        """Waits until a unit lies in its place."""
        self._load(self.arrival(unit), 0, 0).wait()

    def wipe_null(self, places: list[Any], slots: list[Any]) -> None:
        """Zeros where the null slot was read: it comes like any other, which saves predicates, and holds anything."""

        def wipe(place):
            def clear(h, carry):
                self.coming[place, h] = jnp.zeros(self.coming.shape[2:], self.coming.dtype)
                return carry

            jax.lax.fori_loop(0, self.heads, clear, None)

        @pl.when(functools.reduce(jnp.minimum, slots) == 0)
        def _():
            for place, slot in zip(places, slots, strict=True):
                pl.when(slot == 0)(functools.partial(wipe, place))

    def make_room(self, place: Any) -> None:
        """Waits until everything that leaves a place of `going` has left."""

        def one(_, carry):
            self._store(place, 0, 0).wait()
            return carry

        jax.lax.fori_loop(0, self.leaving[place], one, None)
        self.leaving[place] = 0

    def put(self, places: list[Any], slots: list[Any], group: Any, rare: bool = False) -> None:
        """Starts places of `going` on their way to slots of a head group; slot 0 takes nothing.

        With `rare` one branch goes past all of it if no slot is given.
        """

        def start(place, slot):
            self._store(place, slot, group).start()
            self.leaving[place] += 1

        def start_all():
            for place, slot in zip(places, slots, strict=True):
                pl.when(slot != 0)(functools.partial(start, place, slot))

        if rare and len(slots) > 1:
            pl.when(functools.reduce(jnp.maximum, slots) != 0)(start_all)
        else:
            start_all()

    def end(self) -> None:
        """After the last unit: waits for all that is on its way out."""

        def one(place, carry):
            self.make_room(place)
            return carry

        jax.lax.fori_loop(0, self.going.shape[0], one, None)
