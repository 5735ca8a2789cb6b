"""Random workloads against the content of every block: shared prompts, small pools, aborts, drafts, steps in flight.

`workload(seed)` draws a system and its traffic from a seed and runs it to the end; what it returns counts the faults.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections import deque
from collections.abc import Iterable, Sequence

from hybrid_kv.cache.emission import SEVERAL, EmissionCapability
from hybrid_kv.cache.reference import Draft, Model, Row, Rules, Step
from hybrid_kv.cache.reference.content import Device, Unsound, broken
from hybrid_kv.cache.reference.events import Cleared, Removed, Stored
from hybrid_kv.cache.reference.external import Offer
from hybrid_kv.cache.reference.snapshot import Snapshot
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, SystemGeometry, resolve

# Steps without a row, and steps in all, after which a workload counts as stalled.
_STALL = 80
_ENDLESS = 2000
_LONGEST_PROMPT, _LONGEST_ANSWER = 60, 12


@dataclasses.dataclass(frozen=True)
class Outcome:
    """fault: "" or what went wrong first. counts: what happened, to see that it did happen."""

    seed: int
    rules: Rules
    fault: str
    counts: collections.Counter[str]


def draw_rules(rng: random.Random) -> Rules:
    """A system: any mix of kinds, one pool or one for each group, any retention and drafter."""
    unit = rng.choice([2, 4])
    drafts = rng.choice([0, 0, 1, 3])
    draft = rng.choice(list(Draft)) if drafts else Draft.NONE
    geometry = _draw_geometry(rng, unit, draft)
    one_pool = rng.random() < 0.5
    context = _LONGEST_PROMPT + _LONGEST_ANSWER + 8
    need = [g.columns(context) + 2 if g.kind.value != "recurrent" else 4 for g in geometry.groups]
    spare = rng.choice([0.8, 1.0, 1.2, 2.0, 5.0])
    pools = (int(sum(need) * spare),) if one_pool else tuple(int(blocks * spare) for blocks in need)
    return Rules(
        geometry=geometry, pool_blocks=pools,
        group_pool=(0,) * len(need) if one_pool else tuple(range(len(need))),
        max_requests=6, max_context=context, token_budget=rng.choice([8, 16, 40]),
        chunk_limit=rng.choice([1 << 30, 5, 16]), retention=rng.choice([None, 0, 0, 2 * geometry.schedule_block]),
        draft=draft, lookahead=rng.choice([1, drafts]) if draft is Draft.LOOKAHEAD else 0,
        slots_ahead=drafts if draft is not Draft.NONE else 0, turn_end=rng.random() < 0.7,
        ladder=rng.choice([(), (4 * unit,)]), priority=rng.random() < 0.2, steps_in_flight=rng.choice([1, 2, 2, 3]),
        max_active=rng.choice([None, None, 3]), chunk_adaptive=rng.random() < 0.3, admit_whole=rng.random() < 0.7,
        emission=rng.choice([SEVERAL, SEVERAL, EmissionCapability(1, unit, False), EmissionCapability(0, 1, True)]),
        events=rng.random() < 0.3, prefill_interval=rng.choice([1, 1, 1, 3]), watermark=rng.choice([0.0, 0.0, 0.1]),
    )  # fmt: skip


def _draw_geometry(rng: random.Random, unit: int, draft: Draft) -> SystemGeometry:
    kinds = rng.choice([
        ["mla"], ["full", "recurrent"], ["mla", "recurrent"], ["mla", "recurrent", "recurrent"],
        ["mla", "recurrent", "recurrent", "recurrent"], ["full", "sliding_window"], ["full", "chunked_local"],
        ["sliding_window"], ["mla", "recurrent", "sliding_window"], ["recurrent"], ["mla", "mla", "recurrent"],
    ])  # fmt: skip
    specs = []
    for number, kind in enumerate(kinds):
        rows = unit * rng.choice([1, 2]) if kind in ("mla", "full", "recurrent") else unit
        drafting = draft is not Draft.NONE and kind in ("mla", "full") and rng.random() < 0.7
        window = unit * rng.choice([2, 3]) - rng.choice([0, 1]) if kind == "sliding_window" else 4 * unit
        specs.append(GroupSpec(
            f"{kind}{number}", kind, rows, draft=drafting, replicated=kind in ("mla", "full") and rng.random() < 0.2,
            window=window if kind in ("sliding_window", "chunked_local") else 0,
        ))  # fmt: skip
    return resolve(specs, dcp=rng.choice([1, 1, 2, 4, 8]), hash_unit=unit)


def _with_positions(rules: Rules, rng: random.Random) -> Rules:
    step = rules.geometry.hit_unit
    return dataclasses.replace(rules, positions=rng.choice([(), (), (3 * step,), (5 * step, step)]))


def workload(seed: int, requests: int = 25) -> Outcome:
    """One system under random traffic; faults: unsound reads and names, broken invariants, stalls, leaks."""
    return _Traffic(seed, requests).run()


class _Store:
    """An external store that has anything at random, and often does not know yet."""

    def __init__(self, rng: random.Random, rules: Rules) -> None:
        self.rng, self.unit = rng, rules.geometry.hit_unit
        self.offered: dict[str, Offer] = {}

    def ask(self, name: str, tokens: Sequence[int], local: int) -> Offer | None:
        """An offer drawn from nothing but chance."""
        rng = self.rng
        if rng.random() < 0.3:
            return None
        longest = rng.randrange(len(tokens) + 1) if rng.random() < 0.7 else len(tokens)
        states = tuple(n for n in range(self.unit, longest + 1, self.unit) if rng.random() < 0.5)
        self.offered[name] = Offer(longest, states, asynchronous=rng.random() < 0.5)
        return self.offered[name]


class _Traffic:
    """Requests that come and go at random; `flying`: steps handed to the device and not committed, oldest first."""

    def __init__(self, seed: int, requests: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.resets = random.Random(f"resets of {seed}")
        self.rules = _with_positions(draw_rules(self.rng), random.Random(f"positions of {seed}"))
        # Drafts of a row; also where no draft layer runs ahead, as with drafts looked up in the text.
        self.drafts = self.rules.slots_ahead or self.rng.choice([0, 0, 0, 3])
        self.store = _Store(self.rng, self.rules)
        self.model = Model(self.rules, self.store if self.rng.random() < 0.4 else None)
        self.device = Device(self.model)
        self.device.has_states = lambda load: load.tokens in self.store.offered[load.request.name].states
        self.flying: deque[Step] = deque()
        self.counts: collections.Counter[str] = collections.Counter()
        self.queue = self._draw_prompts(requests)
        # Keys as a listener knows them.
        self.heard: collections.Counter[tuple[int, int]] = collections.Counter()

    def _draw_prompts(self, requests: int) -> list[list[int]]:
        rng = self.rng
        stems = [[rng.randrange(3) for _ in range(44)] for _ in range(2)]
        queue: list[list[int]] = []
        while len(queue) < requests:
            stem = stems[rng.randrange(2)][: rng.randrange(45)]
            queue += [stem + [rng.randrange(3) for _ in range(rng.randrange(1, 16))]] * rng.choice([1, 1, 2, 3])
        return queue

    def run(self) -> Outcome:
        """Run to the end, or to the first fault."""
        fault, idle = "", 0
        while not fault and (self.queue or self.model.requests or self.flying or self.model.loads):
            self._arrivals()
            try:
                self._load()
                idle = 0 if self._step() or not self.model.requests else idle + 1
            except Unsound as error:
                fault = f"unsound: {error}"
            self.counts["steps"] += 1
            if idle > _STALL or self.counts["steps"] > _ENDLESS:
                fault = "stalled"
            elif not fault and (faults := broken(self.model)):
                fault = f"broken: {faults[0]}"
            elif not fault and self.rules.events:
                fault = self._listen()
        self.counts["evicted"] = self.model.evictions
        return Outcome(self.seed, self.rules, fault or self._leak(), self.counts)

    def _listen(self) -> str:
        """Follow the cache by its events; they must lead to the names that there are."""
        for event in self.model.drain_events():
            if isinstance(event, Stored):
                self.heard.update((event.group, key) for key in event.keys)
            elif isinstance(event, Removed):
                self.heard[event.group, event.key] -= 1
            elif isinstance(event, Cleared):
                self.heard.clear()
        found = {name: len(self.model.index.all(name)) for name in self.model.index.names()}
        return "" if +self.heard == found else "events: they tell of other names than there are"

    def _leak(self) -> str:
        if held := sum(pool.size - pool.free for pool in self.model.pools):
            return f"leak: {held} blocks held at the end"
        return "" if self.model.reset() else "leak: reset refused at the end"

    def _arrivals(self) -> None:
        rng = self.rng
        while self.queue and len(self.model.requests) < 8 and rng.random() < 0.6:
            self.counts["arrived"] += 1
            name, prompt, answer = f"r{self.counts['arrived']}", self.queue.pop(), rng.randrange(1, _LONGEST_ANSWER)
            salt, priority, reads = rng.choice([None] * 8 + ["a"]), rng.randrange(3), rng.random() < 0.95
            try:
                self.model.arrive(name, prompt, answer=answer, salt=salt, priority=priority, read_cache=reads)
            except UserError:
                self.counts["refused"] += 1  # it needs more blocks than there are

    def _step(self) -> bool:
        """Plan a step, and complete the oldest one if as many are in flight as may be; whether anything happened."""
        if self.rng.random() < 0.05:
            self._withdraw()
        if self.resets.random() < 0.005:
            self._reset()
        step = self.model.schedule()
        self._count(step)
        if step.rows:
            self.device.plan(step)
            self.flying.append(step)
            self._propose(row for row in step.rows if row.samples and self.rules.steps_in_flight > 1)
        self.counts["loads"] += len(step.loads)
        self._abort(0.02)  # while it runs
        done = bool(self.flying) and (len(self.flying) >= self.rules.steps_in_flight or not step.rows)
        if done:
            self._complete(self.flying.popleft())
        self._abort(0.04)
        return bool(step.rows) or done

    def _withdraw(self) -> None:
        """Plan a step and take it back; nothing may be left of it."""
        before = Snapshot(self.model)
        self.model.withdraw(self.model.schedule(revocable=True))
        self.counts["withdrawn"] += 1
        if Snapshot(self.model) != before:
            raise Unsound("a withdrawn step left something behind")

    def _reset(self) -> None:
        """Forget everything while requests run and steps are in flight; only a load under way may forbid it."""
        self.counts["reset"] += 1
        done = self.model.reset(preempt_running=True)
        if done == bool(self.model.loads) or (done and list(self.model.index.names())):
            raise Unsound("a reset left something behind")

    def _count(self, step: Step) -> None:
        self.counts.update(hit.reason.name for hit in step.admitted.values())
        self.counts.update(
            preempted=len(step.preempted), copies=step.copies, hits=sum(hit.tokens for hit in step.admitted.values())
        )

    def _load(self) -> None:
        """Loads come through when they like, once they may begin, and not always in good order."""
        rng, groups = self.rng, len(self.rules.geometry.groups)
        for load in list(self.model.loads):
            if load.after in self.flying or rng.random() < 0.5:
                continue
            good = [rng.randrange(load.tokens + 1) for _ in range(groups)] if rng.random() < 0.3 else None
            self.device.load(load, good)
            self.model.loaded(load, good)

    def _complete(self, step: Step) -> None:
        loading = [load.request.name for load in step.loads if not load.asynchronous]
        failed = [name for name in loading if self.rng.random() < 0.2]
        self.counts["failed"] += len(failed)
        answers: dict[str, list[int]] = {}
        ended = []
        for row in step.rows:
            request = row.request
            left = request.prompt + request.answer - len(request.tokens)
            if self.model.requests.get(request.name) is not request or row.void or request.name in failed:
                self.counts["wasted"] += 1
                continue
            if not row.samples:
                continue
            accepted = self.rng.randrange(row.drafts + 1)
            # Now and then a request ends before its longest answer, and nobody could know.
            early = self.rng.random() < 0.05
            answers[request.name] = [self.rng.randrange(3) for _ in range(min(accepted + 1, left))]
            if early or len(answers[request.name]) == left:
                ended.append(request.name)
            self.counts["late"] += row.stale
        self.device.run(step, answers, failed)
        self.model.commit(step, answers, ended, failed)
        self.device.check(step)
        self._propose(row for row in step.rows if row.samples and self.rules.steps_in_flight == 1)

    def _propose(self, rows: Iterable[Row]) -> None:
        """Drafts for the next row of each: known when they are committed, counted on when steps overlap."""
        for row in rows:
            if self.drafts and self.model.requests.get(row.request.name) is row.request:
                self.model.propose(row.request.name, self.rng.randrange(self.drafts + 1))

    def _abort(self, chance: float) -> None:
        if self.model.requests and self.rng.random() < chance:
            self.model.abort(self.rng.choice(sorted(self.model.requests)))
            self.counts["aborted"] += 1
