"""A store outside the pools that may hold a longer prefix: what it is asked, what it brings, and into which blocks.

An offer is taken if it is longer than the local hit. Append-only groups keep the whole blocks they have and fetch the
rest, windowed groups the window, recurrent groups the state at exactly the offered length: without that state there is
nothing to resume from, however many rows the store has.

A load that is not asynchronous is part of the step that admits its request: it is done before the step's rows. An
asynchronous one runs beside the steps; its request waits, and its blocks belong to the load until it is `loaded`,
whatever becomes of the request. A block may still be written by a step in flight: no load begins before the step that
it names in `after` has run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hybrid_kv.cache.reference import publishing, room
from hybrid_kv.cache.reference.core import Core
from hybrid_kv.cache.reference.lookup import lookup, window_units
from hybrid_kv.cache.reference.plan import Step
from hybrid_kv.cache.reference.pool import Block
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.geometry import GroupKind


class Offer(NamedTuple):
    """tokens: length of the prefix the store has rows of, from the first token on; 0 for none. states: lengths at which
    it has the recurrent states. asynchronous: the load runs beside the steps."""

    tokens: int
    states: tuple[int, ...] = ()
    asynchronous: bool = False


class External(Protocol):
    """The caller's store. It is asked at every attempt to admit a request, so asking must not change anything."""

    def ask(self, name: str, tokens: Sequence[int], local: int) -> Offer | None:
        """What it has of these tokens, `local` of which are here; None while that is not known."""


@dataclasses.dataclass(eq=False)
class Load:
    """Content of the first `tokens` tokens of a request to be written to blocks.

    first: per group, the token from which on it is fetched. tables: per group {column: block} to write (a recurrent
    group: {0: state}). kept: blocks in front of them, held while the load runs. after: the step that must have run
    before, None if none is in flight. gained: tokens beyond the local hit.
    """

    request: Request
    tokens: int
    asynchronous: bool
    first: list[int]
    tables: list[dict[int, Block]]
    kept: list[dict[int, Block]]
    after: Step | None
    gained: int

    def held(self) -> list[Block]:
        return [block for table in [*self.tables, *self.kept] for block in table.values()]

    def drop(self) -> None:
        for block in reversed(self.held()):
            block.pool.drop(block)


class Wanted(NamedTuple):
    """A load before its blocks are taken: columns to write and blocks to keep per group."""

    tokens: int
    first: list[int]
    columns: list[range]
    kept: list[dict[int, Block]]


def usable(core: Core, request: Request, offer: Offer) -> int:
    """Tokens of an offer that can be resumed from: at most all but the last known one, and where the states are."""
    geometry = core.rules.geometry
    most = min(offer.tokens, core.rules.longest_hit(len(request.tokens)))
    if geometry.recurrent:
        return max((n for n in offer.states if n <= most and n % geometry.hit_unit == 0), default=0)
    return max(most // geometry.hit_unit * geometry.hit_unit, 0)


def want(core: Core, request: Request, tokens: int) -> Wanted:
    """What to fetch so that the request can resume at `tokens`."""
    unit = core.rules.unit
    depth = min(lookup(core.rules, request.chain, len(request.tokens), core.index.find).depth, tokens)
    wanted = Wanted(tokens, [], [], [])
    for group, geometry in enumerate(core.rules.geometry.groups):
        kept: dict[int, Block] = {}
        if geometry.kind is GroupKind.RECURRENT:
            first, columns = tokens, range(1)
        elif geometry.kind.append_only:
            first = depth // geometry.block * geometry.block
            for column in range(first // geometry.block):
                block = core.index.find(core.name(request, group, (column + 1) * geometry.block // unit - 1))
                assert block is not None, "the depth promised this block"
                kept[column] = block
            columns = range(first // geometry.block, geometry.columns(tokens))
        else:
            # Whole blocks: one that is found by one of its units has to hold all before it.
            column = window_units(geometry, tokens, unit).start * unit // geometry.block
            first, columns = column * geometry.block, range(column, geometry.columns(tokens))
        wanted.first.append(first)
        wanted.columns.append(columns)
        wanted.kept.append(kept)
    return wanted


def need(core: Core, request: Request, wanted: Wanted, end: int) -> list[int]:
    """Blocks every pool must give for a load and for computing the request up to `end` behind it."""
    count = [0] * len(core.pools)
    reach = room.reach(core.rules, request, end)
    for group, geometry in enumerate(core.rules.geometry.groups):
        columns = len(wanted.columns[group])
        if geometry.kind is GroupKind.RECURRENT:
            columns += 1
        else:
            columns += max(geometry.columns(reach) - geometry.columns(wanted.tokens), 0)
        if geometry.kind.windowed:
            columns = min(columns, room.most_at_once(core.rules, geometry))
        unheld = len({block for block in wanted.kept[group].values() if not block.holders})
        count[core.rules.group_pool[group]] += columns + unheld
    return count


def begin(core: Core, request: Request, wanted: Wanted, asynchronous: bool, gained: int) -> Load:
    """Take the blocks of a load, those to keep first: no group's block may make room for another's."""
    for table in wanted.kept:
        for block in table.values():
            block.pool.hold(block)
    tables = [{column: core.pool(group).take() for column in columns} for group, columns in enumerate(wanted.columns)]
    after = core.flying[-2] if len(core.flying) > 1 else None
    return Load(request, wanted.tokens, asynchronous, wanted.first, tables, wanted.kept, after, gained)


def file(core: Core, load: Load, good: Sequence[int]) -> None:
    """Name what a load has brought: rows of every group up to the first bad token, states that came at all."""
    request, unit = load.request, core.rules.unit
    for group, geometry in enumerate(core.rules.geometry.groups):
        if geometry.kind is GroupKind.RECURRENT:
            if good[group] >= load.tokens:
                publishing.file_state(core, request, group, load.tokens, load.tables[group][0])
            continue
        stop = core.nameable(request, group, min(good[group], load.tokens))
        publishing.file_units(core, request, group, range(-(-load.first[group] // unit), stop), load.tables[group])


def reserved(core: Core, requests: Sequence[Request]) -> list[int]:
    """Blocks that prefills under way, loading ones included, still need: no load may be admitted on their account."""
    total = [0] * len(core.pools)
    for request in requests:
        count = [0] * len(core.pools)
        if load := request.load or request.pins:
            groups = len(load.tables)
            fetched = Wanted(load.tokens, [], [range(0)] * groups, [{}] * groups)
            count = need(core, request, fetched, len(request.tokens))
        elif request.running and request.prefilling:
            count = room.need(core, request, len(request.tokens))
        total = [one + more for one, more in zip(total, count, strict=True)]
    return total
