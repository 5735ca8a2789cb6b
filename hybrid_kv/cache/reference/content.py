"""A make-believe device that knows what every block holds, and objects when anything else is read or filed.

A row's tag is the prefix it encodes: the tokens up to it, and the next one as well in a draft group. A state's tag is
its prefix. Tags are numbers of a token tree, so unlike prefixes never agree by accident. What refused drafts and rows
of requests that have ended leave behind is tagged as waste.

The device keeps tokens and positions of its own, as a real one does: a row begins where the one before it ended,
whatever the plan counted on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from hybrid_kv.cache.reference.external import Load
from hybrid_kv.cache.reference.lookup import window_units
from hybrid_kv.cache.reference.model import Model
from hybrid_kv.cache.reference.plan import Row, Step
from hybrid_kv.cache.reference.pool import Block, Name
from hybrid_kv.cache.reference.prefixes import Prefixes
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.cache.reference.rules import Draft
from hybrid_kv.geometry import GroupKind

WASTE = -1


class Unsound(AssertionError):
    """Content was read, or filed, that is not what it is taken for."""


@dataclasses.dataclass
class _Taken:
    """A row with the tables it was planned with; start, end: as they turn out, end without refused drafts; ruined:
    a load it rests on has failed."""

    row: Row
    tables: list[dict[int, Block]]
    start: int = 0
    end: int = 0
    ruined: bool = False


class Device:
    """Runs the steps of a model: `plan(step)` once it is scheduled, `run(step, answers)` before it is committed and in
    the order of planning, `check(step)` after the commit."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.rows: dict[Block, dict[int, int]] = {}
        self.states: dict[Block, int] = {}
        self._tree = Prefixes()
        self._tokens: dict[Request, list[int]] = {}
        self._tags: dict[Request, list[int]] = {}
        # Per request: the epoch it is in, and the tokens computed in it.
        self._done: dict[Request, tuple[int, int]] = {}
        self._planned: dict[Step, list[_Taken]] = {}
        # Whether the store had the states that a load asks for.
        self.has_states: Callable[[Load], bool] = lambda load: True
        # For every prefix number of the model its length and the tags of a request that has it, to check names with.
        self._meaning: dict[int, tuple[int, list[int]]] = {}

    def plan(self, step: Step) -> None:
        """Take over what each row reads and writes; nothing runs yet."""
        self._planned[step] = [_Taken(row, [dict(table) for table in row.request.tables]) for row in step.rows]
        for row in step.rows:
            self._tokens.setdefault(row.request, list(row.request.tokens[: row.request.prompt]))

    def run(self, step: Step, answers: Mapping[str, Sequence[int]], failed: Sequence[str] = ()) -> None:
        """Load, copy, write, read, save; answers: tokens that the rows of living requests give; failed: requests whose
        load in this step brings nothing."""
        taken = self._planned.pop(step)
        for load in step.loads:
            if not load.asynchronous:
                self.load(load, [0] * len(load.tables) if load.request.name in failed else None)
        for one in taken:
            one.ruined = one.row.void or (self._lives(one.row) and one.row.request.name in failed)
            self._place(one, answers)
        for one in taken:
            self._read_states(one)
        copies = [pair for one in taken for pair in one.row.copies]
        contents = [dict(self.rows.get(source, {})) for source, _ in copies]  # all read before any is written
        self.rows.update(zip((target for _, target in copies), contents, strict=True))
        self._one_writer(taken)
        for one in taken:
            self._write(one)
        for one in taken:
            self._read_rows(one)
            self._save(one)

    def check(self, step: Step) -> None:
        """Look at every name, the requests of this step having filed theirs."""
        for row in step.rows:
            self._learn(row.request)
        self._look_at_names()

    def load(self, load: Load, good: Sequence[int] | None = None) -> None:
        """Write what a load brings; good: per group, tokens that arrive in good order."""
        if load.after in self._planned:
            raise Unsound(f"{load.request.name}: a load begins before a step that may write to its blocks")
        self._tokens.setdefault(load.request, list(load.request.tokens))
        self._learn(load.request)
        for group, geometry in enumerate(self.model.rules.geometry.groups):
            sound = load.tokens if good is None else good[group]
            if geometry.kind is GroupKind.RECURRENT:
                whole = sound >= load.tokens and self.has_states(load)
                tag = self._tag(load.request, load.tokens) if whole else WASTE
                self.states[load.tables[group][0]] = tag
                continue
            for position in range(load.first[group], load.tokens):
                tag = self._tag(load.request, position + 1 + self._ahead(group)) if position < sound else WASTE
                block = load.tables[group][position // geometry.block]
                self.rows.setdefault(block, {})[position % geometry.block] = tag

    def length_of(self, name: Name) -> int:
        """Tokens of the prefix that a name stands for."""
        return self._meaning[name[1]][0]

    # Running

    def tags_of(self, request: Request) -> list[int]:
        """Tag of the prefix of every length, from 0; prompts with unlike salts have unlike tags."""
        tags = self._tags.setdefault(request, [self._tree.child(0, ("salt", type(request.salt), request.salt))])
        for token in self._tokens[request][len(tags) - 1 :]:
            tags.append(self._tree.child(tags[-1], token))
        return tags

    def _learn(self, request: Request) -> None:
        """Note what the prefix numbers of a request stand for."""
        tags = self.tags_of(request)
        for unit, number in enumerate(request.chain, 1):
            self._meaning.setdefault(number, (unit * self.model.rules.unit, tags))

    def _lives(self, row: Row) -> bool:
        return self.model.requests.get(row.request.name) is row.request

    def _place(self, taken: _Taken, answers: Mapping[str, Sequence[int]]) -> None:
        """Where the row begins and how far it stands, now that the steps before it have run."""
        row, request = taken.row, taken.row.request
        epoch, done = self._done.get(request, (-1, 0))
        taken.start = done if epoch == row.epoch else row.start
        taken.end = taken.start + row.length
        if self._lives(row) and not taken.ruined:
            if not row.start - row.slack <= taken.start <= row.start:
                raise Unsound(f"{request.name}: a row planned at {row.start} begins at {taken.start}")
            sampled = list(answers.get(request.name, ()))
            if sampled and taken.end - row.drafts != len(self._tokens[request]):
                raise Unsound(f"{request.name}: a token behind {taken.end - row.drafts} comes out of order")
            taken.end -= row.drafts - max(len(sampled) - 1, 0)
            self._tokens[request] += sampled
        self._done[request] = row.epoch, taken.end

    def _tag(self, request: Request, length: int) -> int:
        tags = self.tags_of(request)
        return tags[length] if length < len(tags) else WASTE

    def _read_states(self, taken: _Taken) -> None:
        """States are read before anything of this step is written."""
        request = taken.row.request
        for group in self.model.rules.geometry.recurrent:
            block = taken.row.reads[group] or taken.tables[group][0]
            read = taken.start and self._lives(taken.row) and not taken.ruined
            if read and self.states.get(block) != self._tag(request, taken.start):
                raise Unsound(f"{request.name}: state of group {group} at {taken.start} is another one")

    def _one_writer(self, taken: Sequence[_Taken]) -> None:
        writers: dict[Block, Row] = {}
        for one in taken:
            for block in self._written(one):
                if writers.setdefault(block, one.row) is not one.row:
                    raise Unsound(f"block {block.number} is written by two rows of a step")

    def _written(self, taken: _Taken) -> set[Block]:
        blocks = {block for _, some in [*taken.row.emissions, *taken.row.turns] for block in some}
        for group, geometry in enumerate(self.model.rules.geometry.groups):
            columns = range(taken.start // geometry.block, geometry.columns(taken.start + taken.row.length))
            if geometry.kind is GroupKind.RECURRENT:
                columns = range(1)
            blocks |= {taken.tables[group][column] for column in columns if column in taken.tables[group]}
        return blocks

    def _ahead(self, group: int) -> int:
        """Tokens behind its own that a row depends on."""
        rules = self.model.rules
        return int(rules.geometry.groups[group].spec.draft and rules.draft is not Draft.NONE)

    def _write(self, taken: _Taken) -> None:
        request = taken.row.request
        for group, geometry in enumerate(self.model.rules.geometry.groups):
            if geometry.kind is GroupKind.RECURRENT:
                self.states[taken.tables[group][0]] = WASTE if taken.ruined else self._tag(request, taken.end)
                continue
            ahead = self._ahead(group)
            for position in range(taken.start, taken.start + taken.row.length):
                block = taken.tables[group].get(position // geometry.block)
                if block is not None:
                    stands = position < taken.end and not taken.ruined
                    tag = self._tag(request, position + 1 + ahead) if stands else WASTE
                    self.rows.setdefault(block, {})[position % geometry.block] = tag

    def _read_rows(self, taken: _Taken) -> None:
        """Every row before the first one of this step, as far as the windows go."""
        request = taken.row.request
        if not self._lives(taken.row) or taken.ruined:
            return
        for group in self.model.row_groups:
            geometry = self.model.rules.geometry.groups[group]
            first = 0 if geometry.kind.append_only else window_units(geometry, taken.start, 1).start
            for position in range(first, taken.start):
                block = taken.tables[group].get(position // geometry.block)
                found = self.rows.get(block, {}).get(position % geometry.block) if block else None
                if found != self._tag(request, position + 1 + self._ahead(group)):
                    raise Unsound(f"{request.name}: row {position} of group {group} is another one")

    def _save(self, taken: _Taken) -> None:
        rules, row = self.model.rules, taken.row
        inside = [boundary for boundary, _ in [*row.emissions, *row.turns] if row.fixed and boundary != row.end]
        if len(inside) > rules.emission.max_per_chunk:
            raise Unsound(f"{row.request.name}: {len(inside)} states inside a chunk")
        for boundary in inside:
            if not rules.can_save(taken.start, taken.end, boundary):
                raise Unsound(f"{row.request.name}: no state can be saved at {boundary} of {row.start} to {row.end}")
        for boundary, blocks in [*row.emissions, *row.turns]:
            if taken.start < boundary <= taken.end and (row.fixed or rules.saves_anywhere or boundary == taken.end):
                for block in blocks:
                    self.states[block] = WASTE if taken.ruined else self._tag(taken.row.request, boundary)

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
    held = [block for request in model.requests.values() for block in request.held()]
    held += [
        block for step in model.flying for row in step.rows for emission in row.emissions for block in emission.blocks
    ]
    held += [block for load in model.loads for block in load.held()]
    for block in held:
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
