"""A make-believe device that knows what every block holds, and objects when anything else is read or filed.

A row's tag is the prefix it encodes: the tokens up to it, and the next one as well in a draft group. A state's tag is
its prefix. Tags are numbers of a token tree, so unlike prefixes never agree by accident.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hybrid_kv.cache.reference.lookup import window_units
from hybrid_kv.cache.reference.model import Model, Row, Step, Turn
from hybrid_kv.cache.reference.pool import Block
from hybrid_kv.cache.reference.prefixes import Prefixes
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.cache.reference.rules import Draft
from hybrid_kv.geometry import GroupKind


class Unsound(AssertionError):
    """Content was read, or filed, that is not what it is taken for."""


@dataclasses.dataclass
class _Taken:
    """What a row had to read when it was planned; copies: (source, target)."""

    row: Row
    tables: list[dict[int, Block]]
    reads: list[Block | None]
    copies: list[tuple[Block, Block]]


class Device:
    """Runs the steps of a model: `plan(step)` before the commit, `run(turns)` after it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.rows: dict[Block, dict[int, int]] = {}
        self.states: dict[Block, int] = {}
        self._tree = Prefixes()
        self._tags: dict[Request, list[int]] = {}
        self._taken: list[_Taken] = []
        # Tag of every prefix number of the model, to check names with.
        self._meaning: dict[int, tuple[int, list[int]]] = {}

    def tags(self, request: Request) -> list[int]:
        """Tag of the prefix of every length, from 0; prompts with unlike salts have unlike tags."""
        tags = self._tags.setdefault(request, [self._tree.child(0, ("salt", type(request.salt), request.salt))])
        for token in request.tokens[len(tags) - 1 :]:
            tags.append(self._tree.child(tags[-1], token))
        return tags

    def plan(self, step: Step) -> None:
        """Note what each row reads; states are read before anything of this step is written."""
        self._taken = []
        for row in step.rows:
            request = row.request
            copies = [
                (pair[0], table[pair[1]]) for pair, table in zip(request.copy, request.tables, strict=True) if pair
            ]
            taken = _Taken(row, [dict(table) for table in request.tables], list(request.state_read), copies)
            for group in self.model.rules.geometry.recurrent:
                block = taken.reads[group] or request.tables[group][0]
                if row.start and self.states.get(block) != self.tags(request)[row.start]:
                    raise Unsound(f"{request.name}: state of group {group} at {row.start} is another one")
            self._taken.append(taken)

    def run(self, turns: Sequence[Turn]) -> None:
        """Copy, write, read, save; then look at every name."""
        copies = [pair for taken in self._taken for pair in taken.copies]
        contents = [dict(self.rows.get(source, {})) for source, _ in copies]  # all read before any is written
        self.rows.update(zip((target for _, target in copies), contents, strict=True))
        for taken in self._taken:
            self._write(taken)
        for taken in self._taken:
            self._read(taken)
        for turn in turns:
            for block in turn.blocks:
                self.states[block] = self.tags(turn.request)[turn.boundary]
        self._look_at_names()

    def _ahead(self, group: int) -> int:
        """Tokens behind its own that a row depends on."""
        rules = self.model.rules
        return int(rules.geometry.groups[group].spec.draft and rules.draft is not Draft.NONE)

    def _write(self, taken: _Taken) -> None:
        request, row = taken.row.request, taken.row
        tags = self.tags(request)
        for unit, number in enumerate(request.chain, 1):
            length = unit * self.model.rules.unit
            self._meaning[number] = (length, tags[: length + 1 + self.model.rules.lookahead])
        end = min(row.start + row.length, len(request.tokens) - (row.start + row.length >= len(request.tokens)))
        for group, geometry in enumerate(self.model.rules.geometry.groups):
            if geometry.kind is GroupKind.RECURRENT:
                self.states[taken.tables[group][0]] = tags[end]
                continue
            for position in range(row.start, end):
                block = taken.tables[group].get(position // geometry.block)
                if block is not None:
                    tag = tags[min(position + 1 + self._ahead(group), len(tags) - 1)]
                    self.rows.setdefault(block, {})[position % geometry.block] = tag
        for boundary, blocks in row.emissions:
            for block in blocks:
                self.states[block] = tags[boundary]

    def _read(self, taken: _Taken) -> None:
        row, tags = taken.row, self.tags(taken.row.request)
        for group, geometry in enumerate(self.model.rules.geometry.groups):
            if geometry.kind is GroupKind.RECURRENT:
                continue
            first = 0
            if not geometry.kind.append_only:
                first = window_units(geometry, row.start, 1).start
            for position in range(first, row.start):
                block = taken.tables[group].get(position // geometry.block)
                found = self.rows.get(block, {}).get(position % geometry.block) if block else None
                if found != tags[position + 1 + self._ahead(group)]:
                    raise Unsound(f"{row.request.name}: row {position} of group {group} is another one")

    def _look_at_names(self) -> None:
        unit = self.model.rules.unit
        for group, prefix in self.model.index.names():
            length, tags = self._meaning[prefix]
            geometry = self.model.rules.geometry.groups[group]
            for block in self.model.index.all((group, prefix)):
                if geometry.kind is GroupKind.RECURRENT:
                    if self.states.get(block) != tags[length]:
                        raise Unsound(f"a state of group {group} filed at {length} is another one")
                    continue
                ahead = self._ahead(group)
                end = length - unit * self.model.rules.lag(group)
                for position in range(end - unit, end):
                    found = self.rows.get(block, {}).get(position % geometry.block)
                    if found != tags[position + 1 + ahead]:
                        raise Unsound(f"row {position} of group {group} filed at {end} is another one")


def broken(model: Model) -> list[str]:
    """Every invariant of blocks, holders and names that does not hold."""
    found: list[str] = []
    holders: dict[Block, int] = {}
    for request in model.requests.values():
        for block in request.held():
            holders[block] = holders.get(block, 0) + 1
    for number, pool in enumerate(model.pools):
        free = {*pool.nameless, *pool.named}
        mine = {block for block in holders if block.pool is pool}
        if len(pool.nameless) + len(pool.named) != len(free) or free & mine:
            found.append(f"pool {number}: a block is free twice, or free and held")
        if len(free) + len(mine) != pool.size:
            found.append(f"pool {number}: {len(free)} free and {len(mine)} held blocks of {pool.size}")
        found += [f"pool {number}: block {b.number} waits with no name" for b in pool.named if not b.names]
        found += [f"pool {number}: block {b.number} has a name among the nameless" for b in pool.nameless if b.names]
        found += [f"pool {number}: block {b.number} has {b.holders} holders" for b in free if b.holders]
    for block, count in holders.items():
        if block.holders != count:
            found.append(f"block {block.number}: {block.holders} holders counted, {count} hold it")
    for name in model.index.names():
        found += [f"{name}: block {b.number} does not know it" for b in model.index.all(name) if name not in b.names]
    if len(model.waiting) + len(model.running) != len(model.requests):
        found.append("a request is in no queue, or in two")
    return found
