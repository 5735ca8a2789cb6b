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

from collections.abc import Hashable, Mapping, Sequence

from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference import external, room, why
from hybrid_kv.cache.reference.events import Event
from hybrid_kv.cache.reference.external import External, Load
from hybrid_kv.cache.reference.lookup import Hit, lookup
from hybrid_kv.cache.reference.plan import Step
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.cache.reference.rules import Rules
from hybrid_kv.cache.reference.scheduling import Scheduling
from hybrid_kv.cache.reference.snapshot import Undo, noted
from hybrid_kv.errors import UserError


class Model(Scheduling):
    """See the module. Requests are named by the caller; `requests` holds those that live. external: a store that may
    hold more than the pools, see `external`."""

    def __init__(self, rules: Rules, external: External | None = None) -> None:
        super().__init__(rules, external)
        self._arrivals = 0
        self.undo: Undo | None = None

    @noted
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
        undo = Undo(self) if revocable or self.external else None
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

    @noted
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

    @noted
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

    @noted
    def finish(self, name: str) -> None:
        """The request leaves; what its prefix is worth stays to be found."""
        if name not in self.requests:
            raise UserError("request", name, "finish one that lives")
        self._leave(name)

    @noted
    def abort(self, name: str) -> None:
        """The request leaves at any moment, also between the schedule and the commit of a step."""
        if name in self.requests:
            self._leave(name)

    @noted
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

    @noted
    def reset(self, *, preempt_running: bool = False) -> bool:
        """Forget all content; False, and nothing changed, while any request, step or load holds a block.

        preempt_running: take the blocks of requests and steps first: whoever runs waits again at its old place and is
        computed anew, steps in flight give their tokens and leave nothing. A load under way keeps its blocks.
        """
        if preempt_running and not self.loads:
            self._take_all_back()
        if any(pool.free < pool.size for pool in self.pools):
            return False
        self.index.clear()
        for pool in self.pools:
            pool.reset()
        return True

    def _take_all_back(self) -> None:
        for name in list(self.running):
            self._put_back(self.requests[name])
        for name in self.waiting:
            self._unpin_load(self.requests[name])
            self.requests[name].asked = False
        for step in self.flying:
            for row in step.rows:
                row.drop_emissions()
        self.forget_unheld()

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
