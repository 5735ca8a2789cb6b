"""The scheduler and the cache, written to be read: state in plain objects, one rule at a time.

A step is `schedule()`, which plans and allocates, and `commit(step, answers)`, which says what the device made of it.
Keys are filed by `commit`. A request admitted in the same step as the writer of content it could share takes whole
blocks of it at once, since all rows of a step are written before any is read, and otherwise waits for the commit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from hybrid_kv.cache.reference.lookup import Hit, lookup, window_units
from hybrid_kv.cache.reference.pool import Block, Index, Name, Pool
from hybrid_kv.cache.reference.prefixes import Prefixes
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.cache.reference.rules import Rules
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupGeometry, GroupKind


@dataclasses.dataclass
class Row:
    """start, length: tokens computed, drafts included. drafts: of those. emissions: (boundary, a block for each
    recurrent group) saved inside the row."""

    request: Request
    start: int
    length: int
    drafts: int
    emissions: list[tuple[int, list[Block]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Turn:
    """The state of a decoding request at its last boundary, saved over the one before; a block a recurrent group."""

    request: Request
    boundary: int
    blocks: list[Block]


@dataclasses.dataclass
class Step:
    """rows: in scheduling order. admitted: request -> its hit. preempted, copies: names and number of copies."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    admitted: dict[str, Hit] = dataclasses.field(default_factory=dict)
    preempted: list[str] = dataclasses.field(default_factory=list)
    copies: int = 0


class Model:
    """See the module. Requests are named by the caller; `requests` holds those that live."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.index = Index()
        self.pools = [Pool(blocks, self.index) for blocks in rules.pool_blocks]
        self.prefixes = Prefixes()
        self.requests: dict[str, Request] = {}
        self.waiting: list[str] = []
        self.running: list[str] = []
        self._pending: dict[Name, Block] = {}
        self._arrivals = 0
        # Wanted states that no block was spent on.
        self.skipped_states = 0
        # Whether the last step had work that found no blocks: then only states that a resume needs are saved.
        self._short = False

    # Transitions

    def arrive(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        answer: int = 1,
        salt: Hashable = None,
        priority: int = 0,
        read_cache: bool = True,
    ) -> None:
        """A new request, waiting; answer: its longest answer, in tokens.

        Raises UserError for one that can never run; nothing has changed then.
        """
        if answer < 1:
            raise UserError("answer", answer, "use at least 1 token")
        longest = len(prompt) + answer
        if not prompt or longest > self.rules.max_context:
            raise UserError("prompt", len(prompt), f"use 1 to {self.rules.max_context - answer} tokens")
        if name in self.requests:
            raise UserError("request", name, "this name is in use")
        request = Request(name, list(prompt), len(prompt), priority, salt, read_cache, self._arrivals)
        self._clear(request)
        for number, (blocks, pool) in enumerate(zip(self._need(request, longest), self.pools, strict=True)):
            if blocks > pool.size:
                raise UserError(f"pool_blocks[{number}]", pool.size, f"this request alone needs {blocks} blocks")
        self._hash(request)
        self._arrivals += 1
        self.requests[name] = request
        self.waiting.append(name)

    def schedule(self) -> Step:
        """Plan one step: running requests in order of admission, then waiting ones while nobody was preempted."""
        step = Step()
        self._pending.clear()
        budget = self.rules.token_budget
        for name in list(self.running):
            if name in self.running and budget:
                budget -= self._continue(step, self.requests[name], budget)
        for name in self._queue():
            if step.preempted or not budget or len(self.running) >= self.rules.max_requests:
                break
            taken = self._admit(step, self.requests[name], budget)
            if taken is None:
                self._short = True
                return step
            budget -= taken
        self._short = bool(step.preempted)
        return step

    def commit(self, step: Step, answers: Mapping[str, Sequence[int]], ended: Sequence[str] = ()) -> list[Turn]:
        """What the device did: tokens sampled by each row (after 0 or more accepted drafts), and who is through.

        ended: requests that leave after their tokens were taken. Rows of requests that left meanwhile count for
        nothing. Returns the states at the end of each turn that the rows have saved.
        """
        turns: list[Turn] = []
        for row in step.rows:
            request, sampled = row.request, list(answers.get(row.request.name, ()))
            if self.requests.get(request.name) is not request:
                self._drop_emissions(row)
                continue
            advance = row.length - row.drafts + max(len(sampled) - 1, 0) if row.drafts else row.length
            request.computed = row.start + advance
            request.tokens += sampled
            request.drafts = 0
            self._hash(request)
            self._settle(request, row)
            turns += self._follow_turn(request, row)
            self._leave_windows(request)
        ran = {row.request for row in step.rows}
        for name in ended:
            if self.requests.get(name) in ran:
                self.finish(name)
        return turns

    def finish(self, name: str) -> None:
        """The request leaves; what its prefix is worth stays to be found."""
        request = self.requests.pop(name)
        self._release(request)
        (self.running if request.running else self.waiting).remove(name)

    def abort(self, name: str) -> None:
        """The request leaves at any moment, also between the schedule and the commit of a step."""
        if name in self.requests:
            self.finish(name)

    def propose(self, name: str, drafts: int) -> None:
        """Draft tokens to verify in the request's next row."""
        self.requests[name].drafts = drafts

    def probe(self, prompt: Sequence[int], salt: Hashable = None) -> Hit:
        """The hit a prompt would get; changes nothing that a request could notice."""
        chain = self.prefixes.known(prompt, self.rules.unit, self.rules.lookahead, salt)
        return lookup(self.rules, chain, len(prompt), self.index.find) if self.rules.caching else Hit(0, 0)

    def reset(self) -> bool:
        """Forget all content; False, and nothing changed, while any request holds a block."""
        if any(pool.free < pool.size for pool in self.pools):
            return False
        for pool in self.pools:
            pool.reset()
        return True

    # Scheduling

    def _queue(self) -> list[str]:
        """Waiting requests in the order they are tried: by priority, else those that were preempted first."""

        def rank(name: str) -> tuple[int, int]:
            request = self.requests[name]
            return request.priority if self.rules.priority else not request.preemptions, request.order

        return sorted(self.waiting, key=rank)

    def _continue(self, step: Step, request: Request, budget: int) -> int:
        """A row for a running request; the newest give way if blocks lack. Tokens taken."""
        known = len(request.tokens)
        drafts = request.drafts if request.computed == known - 1 else 0
        drafts = min(drafts, budget - 1, self.rules.max_context - known)
        length = min(known - request.computed + drafts, budget)
        if drafts == 0:
            length = min(length, self.rules.chunk_limit)
        while not self._fits(self._need(request, request.computed + length)):
            victim = self._newest()
            self._preempt(step, victim)
            if victim is request:
                return 0
        self._row(step, request, length, drafts)
        return length

    def _admit(self, step: Step, request: Request, budget: int) -> int | None:
        """A first chunk for a waiting request. Tokens taken, 0 to try again next step; None if nobody after it may
        start either, since it does not fit."""
        hit, find = self._hit(request)
        if hit is None:
            return 0
        length = min(len(request.tokens) - hit.tokens, budget, self.rules.chunk_limit)
        adopted = self._served(request, hit.tokens, find)
        if not self._fits(self._need(request, len(request.tokens), adopted, hit.tokens)):
            if self.running:
                return None
            # Alone, and it still lacks blocks: those of the hit and of its copy. Without the hit it fits, see `arrive`.
            hit = hit._replace(tokens=0)
            length = min(len(request.tokens), budget, self.rules.chunk_limit)
            adopted = [{} for _ in adopted]
        self._adopt(step, request, hit, adopted)
        self.waiting.remove(request.name)
        self.running.append(request.name)
        request.running = True
        step.admitted[request.name] = hit
        self._row(step, request, length, 0)
        return length

    def _hit(self, request: Request):
        """(hit, where its blocks are found), or (None, ...) if the request should wait for content in the making."""
        if not (self.rules.caching and request.read_cache):
            return Hit(0, 0), self.index.find
        known = len(request.tokens)
        now = lookup(self.rules, request.chain, known, self.index.find)

        def find(name: Name) -> Block | None:
            return self.index.find(name) or self._pending.get(name)

        soon = lookup(self.rules, request.chain, known, find)
        if soon.tokens <= now.tokens:
            return now._replace(depth=max(now.depth, soon.depth)), self.index.find
        unit = self.rules.unit
        for group, geometry in enumerate(self.rules.geometry.groups):
            copied = geometry.kind is not GroupKind.RECURRENT and soon.tokens % geometry.block
            if not (copied or geometry.kind is GroupKind.RECURRENT):
                continue
            if self.index.find(self._name(request, group, soon.tokens // unit - 1)) is None:
                return None, find
        return soon, find

    def _served(self, request: Request, hit: int, find) -> list[dict[int, Block]]:
        """Per group the blocks that serve a hit: {column: block}, the state as column 0."""
        tables: list[dict[int, Block]] = []
        for group, geometry in enumerate(self.rules.geometry.groups):
            table: dict[int, Block] = {}
            if geometry.kind is GroupKind.RECURRENT:
                units = range(hit // self.rules.unit - 1, hit // self.rules.unit) if hit else range(0)
            elif geometry.kind.append_only:
                units = range(hit // self.rules.unit)
            else:
                units = window_units(geometry, hit, self.rules.unit)
            for i in units:
                block = find(self._name(request, group, i))
                assert block is not None, "lookup promised this unit"
                # The unit found last in a column has the block that holds all before it as well.
                table[0 if geometry.kind is GroupKind.RECURRENT else i * self.rules.unit // geometry.block] = block
            tables.append(table)
        return tables

    def _need(self, request: Request, end: int, adopted: Sequence[dict[int, Block]] = (), hit: int = 0) -> list[int]:
        """New blocks every pool must give so that the request can be computed up to `end` tokens."""
        need = [0] * len(self.pools)
        end = min(end + self.rules.slots_ahead, self.rules.max_context)
        for group, geometry in enumerate(self.rules.geometry.groups):
            pool = self.rules.group_pool[group]
            table = adopted[group] if adopted else request.tables[group]
            if adopted:
                need[pool] += len({block for block in table.values() if not block.holders})
            if geometry.kind is GroupKind.RECURRENT:
                need[pool] += 1 if adopted or not table else 0
                continue
            start = hit if adopted else request.computed
            held = set(table)
            if adopted and hit % geometry.block:
                held.discard(hit // geometry.block)  # shared, so it is copied
            fresh = sum(column not in held for column in range(start // geometry.block, geometry.columns(end)))
            need[pool] += min(fresh, self._most_at_once(geometry)) if geometry.kind.windowed else fresh
        return need

    def _most_at_once(self, geometry: GroupGeometry) -> int:
        """Blocks a windowed group holds at most: a prompt longer than its window gives them back as it goes."""
        chunk = min(self.rules.token_budget, self.rules.chunk_limit) + self.rules.slots_ahead
        return geometry.columns(geometry.spec.window - 1 + chunk) + 1

    def _pool(self, group: int) -> Pool:
        return self.pools[self.rules.group_pool[group]]

    def _fits(self, need: Sequence[int]) -> bool:
        return all(blocks <= pool.free for blocks, pool in zip(need, self.pools, strict=True))

    def _newest(self) -> Request:
        requests = [self.requests[name] for name in self.running]
        if self.rules.priority:
            return max(requests, key=lambda one: (one.priority, one.order))
        return requests[-1]

    def _preempt(self, step: Step, request: Request) -> None:
        """Back to the queue; what was computed stays to be found."""
        for row in [row for row in step.rows if row.request is request]:
            step.rows.remove(row)
            self._drop_emissions(row)
        self._release(request)
        self._clear(request)
        request.running = False
        request.preemptions += 1
        self.running.remove(request.name)
        self.waiting.append(request.name)
        self._pending = {name: block for name, block in self._pending.items() if block.holders}
        step.preempted.append(request.name)

    def _row(self, step: Step, request: Request, length: int, drafts: int) -> None:
        """Take the blocks of a row, plan the states it saves, and say what it will have written."""
        end = request.computed + length
        for group, geometry in enumerate(self.rules.geometry.groups):
            pool = self._pool(group)
            table = request.tables[group]
            if geometry.kind is GroupKind.RECURRENT:
                if not table:
                    table[0] = pool.take()
                continue
            upto = geometry.columns(min(end + self.rules.slots_ahead, self.rules.max_context))
            for column in range(request.computed // geometry.block, upto):
                if column not in table:
                    table[column] = pool.take()
        row = Row(request, request.computed, length, drafts)
        row.emissions = self._emissions(request, request.computed, end - drafts if drafts else end)
        step.rows.append(row)
        self._announce(request, row)

    def _emissions(self, request: Request, start: int, end: int) -> list[tuple[int, list[Block]]]:
        """States to save inside a row, most wanted first, as long as blocks are free."""
        recurrent = self.rules.geometry.recurrent
        if not (recurrent and self.rules.caching):
            return []
        chosen = []
        for boundary in sorted(self._wanted(request, start, end), key=lambda b: (b not in request.points, -b)):
            prefix = request.chain[boundary // self.rules.unit - 1]
            if all(self._exists((group, prefix)) for group in recurrent):
                continue
            optional = boundary in request.rungs or boundary not in request.points
            if not (self._short and optional) and self._room_for_states(boundary in request.shared):
                chosen.append((boundary, [self._pool(group).take() for group in recurrent]))
            else:
                self.skipped_states += 1
        return chosen

    def _room_for_states(self, proven: bool) -> bool:
        """Whether a state of every recurrent group can be taken. One that nobody is known to share must not take the
        place of one that was reused."""
        recurrent = self.rules.geometry.recurrent
        pools = [self._pool(group) for group in recurrent]
        for pool in pools:
            victims = pool.next(pools.count(pool))
            states = [one for one in victims if one.reused and any(group in recurrent for group, _ in one.names)]
            if len(victims) < pools.count(pool) or (states and not proven):
                return False
        return True

    def _exists(self, name: Name) -> bool:
        return self.index.find(name) is not None or name in self._pending

    def _wanted(self, request: Request, start: int, end: int) -> set[int]:
        """Boundaries in (start, end] whose state is worth a block of its own."""
        hashed = len(request.chain) * self.rules.unit
        wanted = {point for point in request.points if start < point <= min(end, hashed)}
        for every in self._grids():
            wanted |= set(range(start // every * every + every, min(end, hashed) + 1, every))
        return wanted

    def _grids(self) -> set[int]:
        """Distances at which retention keeps states, one for each recurrent group at most."""
        geometry, retention = self.rules.geometry, self.rules.retention
        if retention is None:
            return {math.lcm(geometry.groups[group].block, geometry.hit_unit) for group in geometry.recurrent}
        return {retention} if retention and geometry.recurrent else set()

    def _first_to_go(self, request: Request, boundary: int) -> bool:
        """Whether a state is taken again before everything else: a rung of a ladder, or one of a grid, but for those at
        1, 2, 4, 8, ... times its distance. However many go, a fork still finds one more than half way to it."""
        if boundary in request.points:
            return boundary in request.rungs
        return all(boundary % every or (boundary // every).bit_count() > 1 for every in self._grids())

    def _announce(self, request: Request, row: Row) -> None:
        """Content that exists once this step has run, for sharing inside it."""
        if not self.rules.caching:
            return
        unit = self.rules.unit
        end = row.start + row.length - row.drafts
        for group, geometry in enumerate(self.rules.geometry.groups):
            if geometry.kind is GroupKind.RECURRENT:
                continue
            for name, block in self._parts(request, group, row.start // unit, self._nameable(request, group, end)):
                self._pending.setdefault(name, block)
        for boundary, blocks in row.emissions:
            for group, block in zip(self.rules.geometry.recurrent, blocks, strict=True):
                self._pending.setdefault((group, request.chain[boundary // unit - 1]), block)

    def _adopt(self, step: Step, request: Request, hit: Hit, adopted: Sequence[dict[int, Block]]) -> None:
        """Hold all blocks of the hit in every group, then take the ones to copy into."""
        for table in adopted:
            for block in table.values():
                block.pool.hold(block)
        for group, geometry in enumerate(self.rules.geometry.groups):
            pool = self._pool(group)
            table = dict(adopted[group])
            if geometry.kind is GroupKind.RECURRENT:
                request.state_read[group] = table.pop(0, None)
            elif hit.tokens % geometry.block:
                column = hit.tokens // geometry.block
                request.copy[group] = (table[column], column)
                table[column] = pool.take()
                step.copies += 1
            request.tables[group] = table
        request.computed = request.hit = hit.tokens
        # A block that was copied into holds the units before the hit as well.
        first = min((hit.tokens // g.block * g.block for g in self.rules.geometry.groups
                     if g.kind is not GroupKind.RECURRENT), default=hit.tokens)  # fmt: skip
        request.published = [first // self.rules.unit] * len(self.rules.geometry.groups)
        request.points = self._points(request, hit)

    def _points(self, request: Request, hit: Hit) -> set[int]:
        rules, unit = self.rules, self.rules.unit
        known = len(request.tokens)
        points = rules.resume_points(request.prompt, known) if rules.tail else set()
        request.shared = set()
        if rules.junctions and hit.depth > hit.tokens:
            step = rules.geometry.hit_unit
            forks = [i * unit for i in range(hit.tokens // unit + 1, hit.depth // unit)
                     if i * unit % step == 0 and self.prefixes.forks(request.chain[i - 1])]  # fmt: skip
            request.shared = {hit.depth // step * step, *forks[len(forks) - min(rules.junctions - 1, len(forks)) :]}
            points |= request.shared
        request.rungs = {(request.prompt - 1) // grid * grid for grid in rules.ladder} - points
        return {point for point in points | request.rungs if point > hit.tokens}

    # Settling

    def _settle(self, request: Request, row: Row) -> None:
        """After a row has run: unpin what it read, file what it wrote."""
        recurrent = self.rules.geometry.recurrent
        for group in range(len(self.rules.geometry.groups)):
            if (read := request.state_read[group]) is not None:
                read.pool.drop(read)
                request.state_read[group] = None
            if (pair := request.copy[group]) is not None:
                pair[0].pool.drop(pair[0])
                request.copy[group] = None
        unit = self.rules.unit
        for boundary, blocks in row.emissions:
            for group, block in zip(recurrent, blocks, strict=True):
                if boundary <= request.computed:
                    self.index.add((group, request.chain[boundary // unit - 1]), block)
                block.spare = self._first_to_go(request, boundary)
                block.pool.drop(block)
        self._publish(request)

    def _publish(self, request: Request) -> None:
        if not self.rules.caching:
            return
        for group, geometry in enumerate(self.rules.geometry.groups):
            if geometry.kind is GroupKind.RECURRENT:
                continue
            done = self._nameable(request, group, request.computed)
            for name, block in self._parts(request, group, request.published[group], done):
                self.index.add(name, block)
            request.published[group] = max(done, request.published[group])

    def _name(self, request: Request, group: int, unit: int) -> Name:
        """What a group's part of a unit goes by."""
        return group, request.chain[unit + self.rules.lag(group)]

    def _parts(self, request: Request, group: int, first: int, stop: int) -> Iterator[tuple[Name, Block]]:
        """Name and block of a group's part of the units [first, stop), where the request still holds it."""
        per_block = self.rules.geometry.groups[group].block // self.rules.unit
        for unit in range(first, stop):
            if (block := request.tables[group].get(unit // per_block)) is not None:
                yield self._name(request, group, unit), block

    def _nameable(self, request: Request, group: int, computed: int) -> int:
        """Leading units of a group that have content and a name."""
        return min(computed // self.rules.unit, len(request.chain) - self.rules.lag(group))

    def _follow_turn(self, request: Request, row: Row) -> list[Turn]:
        """While decoding, the state at each boundary overwrites a private block of the request.

        Where later tokens must be known before anyone can resume there, the one before is kept until they are.
        """
        recurrent, rules = self.rules.geometry.recurrent, self.rules
        if not (recurrent and rules.caching and rules.turn_end) or request.computed <= request.prompt:
            return []
        boundary = request.computed // rules.geometry.hit_unit * rules.geometry.hit_unit
        if not max(row.start, request.prompt - 1) < boundary:
            return []
        ready = sum(end <= self._turn_end(request) for end, _ in request.ending)
        superseded = ready if boundary <= self._turn_end(request) else ready - 1
        if superseded > 0:
            blocks = request.ending.pop(0)[1]
        elif not self._short and self._room_for_states(False):
            blocks = [self._pool(group).take() for group in recurrent]
        else:
            return []
        request.ending.append((boundary, blocks))
        return [Turn(request, boundary, blocks)]

    def _turn_end(self, request: Request) -> int:
        """The last boundary of what is computed at which a later request can resume."""
        step = self.rules.geometry.hit_unit
        named = (len(request.chain) - self.rules.longest_lag) * self.rules.unit
        return min(request.computed, named) // step * step

    def _leave_windows(self, request: Request) -> None:
        """Blocks that no later token of the request reads; they stay findable if a point needs them."""
        for group, geometry in enumerate(self.rules.geometry.groups):
            if geometry.kind.windowed:
                first = window_units(geometry, request.computed, 1).start
                left = [column for column in request.tables[group] if (column + 1) * geometry.block <= first]
                self._part(request, group, sorted(left))

    def _part(self, request: Request, group: int, columns: Sequence[int]) -> None:
        """Drop windowed blocks, last column first; content nobody will look for loses its names."""
        unit, geometry = self.rules.unit, self.rules.geometry.groups[group]
        table = request.tables[group]
        needed = self._needed_units(request, group)
        for column in reversed(columns):
            block = table.pop(column)
            units = range(column * geometry.block // unit, (column + 1) * geometry.block // unit)
            block.kept |= needed is None or not needed.isdisjoint(units)
            if block.holders == 1 and not block.kept:
                block.pool.forget(block)
            block.pool.drop(block)

    def _needed_units(self, request: Request, group: int) -> set[int] | None:
        """Units of a windowed group that resuming at one of the request's points reads; None for all."""
        rules = self.rules
        if rules.retention is None:
            return None
        # Where one request resumed, the next may.
        points = request.points | {request.hit}
        if not rules.geometry.recurrent:
            # No states tie a hit to the points: a prompt that is edited in the unit before one resumes there.
            points |= {point - rules.geometry.hit_unit for point in request.points}
        if rules.turn_end:
            points.add(self._turn_end(request))
        if rules.retention:
            points |= set(range(rules.retention, request.computed + 1, rules.retention))
        units: set[int] = set()
        for point in points:
            units |= set(window_units(rules.geometry.groups[group], point, rules.unit))
        return units

    def _release(self, request: Request) -> None:
        """Give everything back: the turn's end is filed, tails of tables are dropped before heads.

        States of the prefix count as used now, like its rows: one is worth nothing without the other.
        """
        for boundary in sorted(request.points | {request.hit}):
            if 0 < boundary <= request.computed and boundary // self.rules.unit <= len(request.chain):
                for group in self.rules.geometry.recurrent:
                    state = self.index.find((group, request.chain[boundary // self.rules.unit - 1]))
                    if state is not None:
                        state.pool.refresh(state)
        ready = [pair for pair in request.ending if pair[0] <= self._turn_end(request)]
        for boundary, blocks in ready[-1:]:
            for group, block in zip(self.rules.geometry.recurrent, blocks, strict=True):
                self.index.add((group, request.chain[boundary // self.rules.unit - 1]), block)
        for _, blocks in request.ending:
            for block in blocks:
                block.pool.drop(block)
        for group, geometry in enumerate(self.rules.geometry.groups):
            if (pair := request.copy[group]) is not None:
                pair[0].pool.drop(pair[0])
            if (read := request.state_read[group]) is not None:
                read.pool.drop(read)
            table = request.tables[group]
            if geometry.kind.windowed:
                self._part(request, group, sorted(table))
            for column in sorted(table, reverse=True):
                table[column].pool.drop(table[column])

    def _drop_emissions(self, row: Row) -> None:
        for _, blocks in row.emissions:
            for block in blocks:
                block.pool.drop(block)
        row.emissions = []

    def _clear(self, request: Request) -> None:
        count = len(self.rules.geometry.groups)
        request.tables = [{} for _ in range(count)]
        request.state_read, request.copy, request.ending = [None] * count, [None] * count, []
        request.published = [0] * count
        request.computed = request.drafts = 0

    def _hash(self, request: Request) -> None:
        self.prefixes.extend(request.chain, request.tokens, self.rules.unit, self.rules.lookahead, request.salt)
