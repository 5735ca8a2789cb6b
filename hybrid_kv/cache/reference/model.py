"""The scheduler and the cache, written to be read: state in plain objects, one rule at a time.

A step is `schedule()`, which plans and allocates, and `commit(step, answers)`, which says what the device made of it.
Keys are filed by `commit`. A request admitted while the writer of content it could share is on its way takes whole
blocks of it at once, since steps run in order and all rows of a step are written before any is read, and otherwise
waits for the commit.

With two steps in flight, step n + 1 is planned before step n is committed. The device runs steps in the order they were
planned, so a block may be given to a new writer at once, whoever still reads or writes it: those come first. What
remains to be watched:

- The plan does not know how many drafts of step n stand. It counts on all of them, `Row.slack` says how far it may be
  off, and the device starts the row where the one before it ended.
- A request may turn out to have ended, or been aborted, while a row of it is on its way. The row writes behind what
  stands and over a state that the turn could have left: the states of a turn go round a ring of slots (`turns`), and
  what such a row writes over is not filed.
- A request that is preempted gives its blocks back at once. Its row in flight still gives tokens, and nothing else; it
  is admitted again when they have come.
- What a step was going to hold is not shared once the block has lost its holders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference import admission, external, publishing, room, states, why, windows
from hybrid_kv.cache.reference.core import Core
from hybrid_kv.cache.reference.events import Event
from hybrid_kv.cache.reference.external import External, Load
from hybrid_kv.cache.reference.lookup import Hit, lookup
from hybrid_kv.cache.reference.plan import Row, Step
from hybrid_kv.cache.reference.pool import Block
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.cache.reference.rules import Rules
from hybrid_kv.cache.reference.snapshot import Snapshot
from hybrid_kv.cache.reference.turns import Ring
from hybrid_kv.errors import UserError


class _Undo:
    """What to go back to if a step is withdrawn, and what has been asked for since it was planned."""

    def __init__(self, model: Model) -> None:
        self.before = Snapshot(model)
        self.events = len(model.index.events or ())
        self.index = model.index
        self.step: Step | None = None
        self.since: list[Callable[[], Any]] = []

    def go_back(self) -> None:
        self.before.restore()
        if self.index.events is not None:
            del self.index.events[self.events :]


def _noted(transition: Callable[..., Any]) -> Callable[..., Any]:
    """A transition that is done again if the step before it is withdrawn."""

    @functools.wraps(transition)
    def noted(self: Model, *arguments: Any, **named: Any) -> Any:
        result = transition(self, *arguments, **named)
        if self.undo is not None:
            self.undo.since.append(lambda: transition(self, *arguments, **named))
        return result

    return noted


class Model(Core):
    """See the module. Requests are named by the caller; `requests` holds those that live. external: a store that may
    hold more than the pools, see `external`."""

    def __init__(self, rules: Rules, external: External | None = None) -> None:
        super().__init__(rules)
        self.external = external
        # Loads that run beside the steps; their blocks are theirs until they are through.
        self.loads: list[Load] = []
        self.requests: dict[str, Request] = {}
        self.waiting: list[str] = []
        self.running: list[str] = []
        self._arrivals = 0
        self._steps = self._last_prefill = 0
        self._deferring = False
        self.undo: _Undo | None = None

    # Transitions

    @_noted
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
        request = Request(name, list(prompt), len(prompt), answer, priority, salt, read_cache, self._arrivals)
        self._clear(request)
        for number, (blocks, pool) in enumerate(zip(room.need(self, request, longest), self.pools, strict=True)):
            if blocks > pool.size:
                raise UserError(f"pool_blocks[{number}]", pool.size, f"this request alone needs {blocks} blocks")
        self.hash(request)
        self._arrivals += 1
        self.requests[name] = request
        self.waiting.append(name)

    def schedule(self, *, revocable: bool = False) -> Step:
        """Plan one step: running requests in order of admission, then waiting ones while nobody was preempted.

        A step with rows is in flight until it is committed, or withdrawn if it was planned as revocable. If the store
        raises, or offers what makes no sense, nothing has changed.
        """
        if len(self.flying) >= self.rules.steps_in_flight:
            raise UserError("schedule", f"{len(self.flying)} steps in flight", "commit the oldest first")
        undo = _Undo(self) if revocable or self.external else None
        self.undo = undo if revocable else None
        step = Step()
        if self.undo:
            self.undo.step = step
        try:
            self._plan(step)
        except BaseException:
            # Only the store can fail: it is the caller's.
            if undo:
                self.undo = None
                undo.go_back()
            raise
        return step

    def withdraw(self, step: Step) -> None:
        """Take back a step that was not handed to the device: all is as if it had never been planned.

        What was asked for since, arrivals and commits of earlier steps included, is done again on the state before.
        """
        undo = self.undo
        if undo is None or undo.step is not step:
            raise UserError("step", "not revocable", "withdraw the last one, planned with revocable=True, uncommitted")
        self.undo = None
        undo.go_back()
        for transition in undo.since:
            transition()

    @_noted
    def commit(
        self,
        step: Step,
        answers: Mapping[str, Sequence[int]],
        ended: Sequence[str] = (),
        failed: Sequence[str] = (),
    ) -> None:
        """What the device did: tokens sampled by each row (after 0 or more accepted drafts), and who is through.

        failed: requests whose load in this step brought nothing they could read; they start again without it.

        ended: requests that leave after their tokens were taken. Rows of requests that left meanwhile count for
        nothing, those of preempted ones for their tokens. Steps are committed in the order they were planned; one
        without rows need not be. Raises UserError, and nothing has changed, if an answer does not fit its row.
        """
        if not step.rows:
            return
        if not self.flying or self.flying[0] is not step:
            raise UserError(
                "step", "one that is not the oldest in flight", "commit steps in the order they were planned"
            )
        self._check_failed(step, failed)
        self._check_answers(step, answers, failed)
        if self.undo and self.undo.step is step:
            self.undo = None
        self.flying.popleft()
        ran = set()
        for row in step.rows:
            row.request.rows.remove(row)
            lives = self.requests.get(row.request.name) is row.request
            if lives and row.request.name in failed:
                self._fail(row.request)
            if lives and not row.void and row.request.name not in failed:
                ran.add(row.request)
                self._take_answer(row, list(answers.get(row.request.name, ())))
            else:
                row.drop_emissions()
        for name in ended:
            if self.requests.get(name) in ran:
                self._leave(name)

    @_noted
    def loaded(self, load: Load, good: Sequence[int] | None = None) -> None:
        """An asynchronous load is through, and nothing writes to its blocks any more: also when it was given up.

        good: tokens of every group that arrived in good order, counted from the first token on; None for all. What is
        good is named and found at the next admission of anybody; its request is tried first, and is not asked for again
        if anything failed.
        """
        if load not in self.loads:
            raise UserError("load", load.request.name, "report a load that is under way, once")
        groups = len(self.rules.geometry.groups)
        if good is not None and (len(good) != groups or min(good) < 0):
            raise UserError("good", good, f"give the good tokens of each of {groups} groups")
        self.loads.remove(load)
        external.file(self, load, [load.tokens] * groups if good is None else good)
        request = load.request
        if self.requests.get(request.name) is not request or request.load is not load:
            load.drop()
            return
        request.load, request.pins, request.asked = None, load, True
        request.refused = good is not None and min(good) < load.tokens

    @_noted
    def finish(self, name: str) -> None:
        """The request leaves; what its prefix is worth stays to be found."""
        if name not in self.requests:
            raise UserError("request", name, "finish one that lives")
        self._leave(name)

    @_noted
    def abort(self, name: str) -> None:
        """The request leaves at any moment, also between the schedule and the commit of a step."""
        if name in self.requests:
            self._leave(name)

    @_noted
    def propose(self, name: str, drafts: int) -> None:
        """Draft tokens to verify in the request's next row; with two steps in flight, those its last row will have."""
        if name not in self.requests:
            raise UserError("request", name, "propose drafts for a request that lives")
        if drafts < 0:
            raise UserError("drafts", drafts, "use 0 or more")
        self.requests[name].drafts = drafts

    def probe(self, prompt: Sequence[int], salt: Hashable = None) -> Hit:
        """The hit a prompt would get, and why it is not more; changes nothing that a request could notice."""
        if not self.rules.caching:
            return Hit(0, 0, Reason.CACHING_OFF)
        chain = self.prefixes.known(prompt, self.rules.unit, self.rules.lookahead, salt)
        hit = lookup(self.rules, chain, len(prompt), self.index.find)
        return hit._replace(reason=why.reason(self, chain, prompt, salt, hit))

    @_noted
    def reset(self) -> bool:
        """Forget all content; False, and nothing changed, while any request or step holds a block."""
        if any(pool.free < pool.size for pool in self.pools):
            return False
        self.index.clear()
        for pool in self.pools:
            pool.reset()
        return True

    def drain_events(self) -> list[Event]:
        """What was filed and lost since the last call; events of a step that may still be withdrawn come later."""
        events = self.index.events
        if events is None:
            raise UserError("events", False, "make the model with Rules(events=True)")
        count = self.undo.events if self.undo else len(events)
        if self.undo:
            self.undo.events = 0
        drained, events[:count] = events[:count], []
        return drained

    # Scheduling

    def _plan(self, step: Step) -> None:
        self.flying.append(step)
        self._steps += 1
        self._deferring = self._prefills_wait()
        for name in list(self.running):
            if name in self.running and self._budget(step):
                self._continue(step, self.requests[name])
        self.short = bool(step.preempted)
        for name in self._queue():
            full = len(self.running) >= self.rules.most_running
            if step.preempted or self._deferring or full or not self._budget(step):
                break
            if not self._admit(step, self.requests[name]):
                self.short = True
                break
        if not step.rows:
            self.flying.remove(step)
        elif any(row.length - row.drafts > 1 for row in step.rows):
            self._last_prefill = self._steps

    def _budget(self, step: Step) -> int:
        return self.rules.token_budget - step.tokens

    def _queue(self) -> list[str]:
        """Waiting requests in the order they are tried: those whose content was fetched, then by priority, else those
        that were preempted first."""

        def rank(name: str) -> tuple[int, int, int]:
            request = self.requests[name]
            urgent = request.priority if self.rules.priority else not request.epoch
            return request.pins is None, urgent, request.order

        return sorted(self.waiting, key=rank)

    def _continue(self, step: Step, request: Request) -> None:
        """A row for a running request; the newest give way if blocks lack."""
        sure = sum(row.samples for row in request.rows)
        if request.rows and len(request.tokens) + sure >= request.prompt + request.answer:
            return  # the rows in flight end it
        if self._deferring and request.prefilling:
            return
        known, most = request.known, self.rules.max_context
        drafts = request.drafts if request.planned == known - 1 else 0
        drafts = max(min(drafts, self._budget(step) - 1, most - known), 0)
        length = min(known - request.planned + drafts, self._budget(step), most - request.planned)
        if not drafts:
            length = min(length, self.rules.longest_chunk(len(self.requests)))
            length = states.cut(self, request, request.planned + length) - request.planned
        if length < 1:
            return
        while not self.fits(room.need(self, request, request.planned + length)):
            victim = self._newest()
            self._preempt(step, victim)
            if victim is request:
                return
        self._row(step, request, length, drafts)

    def _admit(self, step: Step, request: Request) -> bool:
        """A first chunk for a waiting request, if it can have one now; False if nobody after it may start either, since
        it does not fit."""
        if request.awaits_tokens or request.load:
            return True
        hit, find = admission.find_hit(self, request)
        if hit is None:
            return True
        if (fetched := self._fetch(step, request, hit)) is not None:
            return fetched
        adopted = admission.served(self, request, hit.tokens, find)
        if not self._fits_with(request, adopted, hit.tokens):
            if self.running:
                return False
            self._unpin_fetched()
        if not self._fits_with(request, adopted, hit.tokens):
            # Alone, and it still lacks blocks: those of the hit and of its copy. Without the hit it fits, see `arrive`.
            hit = hit._replace(tokens=0, reason=Reason.CAPPED if hit.tokens else hit.reason)
            adopted = [{} for _ in adopted]
            if not self._fits_with(request, adopted, 0):
                return False  # steps in flight hold the rest
        admission.adopt(self, request, hit, adopted)
        self._start(step, request, hit)
        return True

    def _start(self, step: Step, request: Request, hit: Hit) -> None:
        """From the queue to those that run, with a first row."""
        self.waiting.remove(request.name)
        self.running.append(request.name)
        request.running = True
        step.admitted[request.name] = hit
        self.statistics.admitted(len(request.tokens), hit, resumed=request.epoch > 0)
        load = request.unproven or request.pins
        if load:
            self.statistics.external += max(min(hit.tokens, load.tokens) - (load.tokens - load.gained), 0)
        self._unpin_load(request)
        publishing.report_hit(self, request)
        end = hit.tokens + min(len(request.tokens) - hit.tokens, self._first_chunk(step))
        self._row(step, request, states.cut(self, request, end) - hit.tokens, 0)

    def _fetch(self, step: Step, request: Request, hit: Hit) -> bool | None:
        """Have content fetched that reaches beyond the local hit. None: there is none, go on with the hit; True: the
        request is served, or waits without holding up others; False: nobody after it may start either."""
        if self.external is None or request.asked or request.refused or not (self.rules.caching and request.read_cache):
            return None
        offer = self.external.ask(request.name, tuple(request.tokens), hit.tokens)
        if offer is None:
            return True
        if offer.tokens < 0 or min(offer.states, default=0) < 0:
            raise UserError("offer", offer, "use lengths of 0 tokens or more")
        tokens = external.usable(self, request, offer)
        if tokens <= hit.tokens:
            return None
        wanted = external.want(self, request, tokens)
        count = external.need(self, request, wanted, len(request.tokens))
        if offer.asynchronous:
            held = external.reserved(self, list(self.requests.values()))
            count = [blocks + others for blocks, others in zip(count, held, strict=True)]
        if not self.fits(count):
            return False if self.running or self.loads else None
        load = external.begin(self, request, wanted, offer.asynchronous, tokens - hit.tokens)
        step.loads.append(load)
        if offer.asynchronous:
            request.load = load
            self.loads.append(load)
        else:
            hit = Hit(tokens, max(tokens, hit.depth), Reason.NONE)
            admission.adopt_load(self, request, hit, load)
            self._start(step, request, hit)
        return True

    def _unpin_load(self, request: Request) -> None:
        if request.pins:
            request.pins.drop()
            request.pins = None

    def _unpin_fetched(self) -> None:
        """When nothing runs and nothing fits, what was fetched for others is kept no longer than the cache can."""
        for name in self.waiting:
            self._unpin_load(self.requests[name])

    def _fits_with(self, request: Request, adopted: Sequence[dict[int, Block]], hit: int) -> bool:
        """Whether a waiting request finds blocks, those that serve its hit included, and leaves what must stay free."""
        rules, known = self.rules, len(request.tokens)
        end = known if rules.admit_whole else min(known, hit + self._first_chunk(self.flying[-1]))
        spare = [int(rules.watermark * pool.size) if self.running else 0 for pool in self.pools]
        count = room.need(self, request, end, adopted, hit)
        return self.fits([blocks + free for blocks, free in zip(count, spare, strict=True)])

    def _first_chunk(self, step: Step) -> int:
        return min(self._budget(step), self.rules.longest_chunk(len(self.requests)))

    def _prefills_wait(self) -> bool:
        """Whether this step is left to those that decode."""
        if self._steps - self._last_prefill >= self.rules.prefill_interval or not self._last_prefill:
            return False
        return any(not self.requests[name].prefilling for name in self.running)

    def _leave(self, name: str) -> None:
        request = self.requests.pop(name)
        self._release(request)
        (self.running if request.running else self.waiting).remove(name)

    def _newest(self) -> Request:
        requests = [self.requests[name] for name in self.running]
        if self.rules.priority:
            return max(requests, key=lambda one: (one.priority, one.order))
        return requests[-1]

    def _preempt(self, step: Step, request: Request) -> None:
        """Back to the queue; what was computed stays to be found."""
        for row in [row for row in step.rows if row.request is request]:
            step.rows.remove(row)
            request.rows.remove(row)
            row.drop_emissions()
        self._release(request)
        self._clear(request)
        request.running = False
        request.epoch += 1
        self.running.remove(request.name)
        self.waiting.append(request.name)
        step.preempted.append(request.name)
        self.statistics.preemptions += 1

    def _row(self, step: Step, request: Request, length: int, drafts: int) -> None:
        """Take the blocks of a row, plan the states it saves, and say what it will have written."""
        start, end = request.planned, request.planned + length
        row = Row(request, start, length, drafts, end - drafts >= request.known, epoch=request.epoch)
        row.slack = sum(other.drafts for other in request.rows)
        row.reads = [None] * len(request.tables)
        if request.name in step.admitted:
            row.reads = list(request.state_read)
            pairs = zip(request.copy, request.tables, strict=True)
            row.copies = [(pair[0], table[pair[1]]) for pair, table in pairs if pair]
        room.take(self, request, end)
        states.plan(self, row)
        request.planned, request.drafts = end, 0
        request.promised += row.promised
        request.rows.append(row)
        step.rows.append(row)
        publishing.announce(self, step, row)

    # Settling

    def _check_failed(self, step: Step, failed: Sequence[str]) -> None:
        loading = {load.request.name for load in step.loads if not load.asynchronous}
        for name in failed:
            if name not in loading:
                raise UserError("failed", name, "name requests that this step loads something for")

    def _check_answers(self, step: Step, answers: Mapping[str, Sequence[int]], failed: Sequence[str]) -> None:
        for row in step.rows:
            name = row.request.name
            if self.requests.get(name) is row.request and not row.void and name not in failed:
                given, least = len(answers.get(name, ())), int(row.samples)
                if not least <= given <= row.promised:
                    raise UserError(f"answers[{name}]", given, f"this row gives {least} to {row.promised} tokens")

    def _take_answer(self, row: Row, sampled: Sequence[int]) -> None:
        request = row.request
        request.tokens += sampled
        if row.stale:
            self.hash(request)
            row.drop_emissions()
            return
        start = request.computed
        request.computed += row.stands(len(sampled))
        request.planned -= row.length - (request.computed - start)
        request.promised -= row.promised
        self.hash(request)
        if request.unproven:
            self._prove(request)
        self._unpin(request)
        states.file(self, row, start)
        publishing.publish(self, request)
        windows.leave(self, request)

    def _prove(self, request: Request) -> None:
        """The step has run on what it loaded: its states may be found, like its rows."""
        for group in self.rules.geometry.recurrent:
            if (state := request.state_read[group]) is not None:
                publishing.file_state(self, request, group, request.hit, state)
        request.unproven = None

    def _fail(self, request: Request) -> None:
        """Nothing that was computed on a failed load counts: the request waits again, and the store is not asked."""
        for row in request.rows:
            row.void = True
        self._release(request)
        self._clear(request)
        request.epoch += 1
        request.refused = True
        if request.running:
            request.running = False
            self.running.remove(request.name)
            self.waiting.append(request.name)

    def _unpin(self, request: Request) -> None:
        """Let go of what the first row of an admission read."""
        for group in range(len(self.rules.geometry.groups)):
            if (read := request.state_read[group]) is not None:
                read.pool.drop(read)
                request.state_read[group] = None
            if (pair := request.copy[group]) is not None:
                pair[0].pool.drop(pair[0])
                request.copy[group] = None

    def _release(self, request: Request) -> None:
        """Give everything back: the turn's end is filed, tails of tables are dropped before heads."""
        states.refresh(self, request)
        self._unpin(request)
        self._unpin_load(request)
        states.end_turn(self, request)
        states.leave_prefill(self, request)
        for group, geometry in enumerate(self.rules.geometry.groups):
            table = request.tables[group]
            if geometry.kind.windowed:
                windows.part(self, request, group, sorted(table))
            for column in sorted(table, reverse=True):
                table[column].pool.drop(table[column])
        self.forget_unheld()

    def _clear(self, request: Request) -> None:
        count = len(self.rules.geometry.groups)
        request.tables = [{} for _ in range(count)]
        request.state_read, request.copy = [None] * count, [None] * count
        request.published = [0] * count
        request.turns = Ring(self.rules.turn_slots)
        request.computed = request.planned = request.promised = request.drafts = 0
        request.unproven, request.asked = None, False
