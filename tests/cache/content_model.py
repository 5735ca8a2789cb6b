"""A make-believe device that tags every row and state with the prefix it encodes.

It takes a `StepPlan` literally, in the order of a device step (copies, reads, writes, emissions),
and fails where a row would read anything but the content its positions name. Driving the cache
with it checks soundness of hits, copies and checkpoints without any numerics. It runs steps in the order they were
planned, as soon as they are planned; the cache hears of them later where several are in flight. Where the
configuration keeps a log, a listener follows it after every transition.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

from hybrid_kv import hashing
from hybrid_kv.cache import external, pool, transitions
from hybrid_kv.cache.check import check
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.drafts import Draft
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference.lookup import window_units
from hybrid_kv.cache.state import PREEMPTED, CacheState, initial_state
from hybrid_kv.plan import StepPlan, spell_out
from hybrid_kv.schedule.programs import compiled
from hybrid_kv.schedule.steady import can_commit, commit_steady, schedule_steady
from hybrid_kv.schedule.stepper import Stepper
from tests.cache.listener import Listener


@dataclasses.dataclass
class Sequence:
    """A request as the device knows it. tokens: prompt and sampled ones. computed: of those."""

    tokens: list[int]
    limit: int
    computed: int = 0


class Span(NamedTuple):
    """One row. sampled: its tokens. prefix: a tag for every length. start, end, stop: where it starts, where what is
    kept of it ends, and where it ends; what starts at its end computes nothing that counts."""

    sampled: list[int]
    prefix: list[int]
    start: int
    end: int
    stop: int


class Flying(NamedTuple):
    """A step that has run and is not committed: per row whose it is and what it sampled."""

    plan: StepPlan
    owners: list[Sequence]
    sampled: list[list[int]]


def assert_same(one: CacheState, other: CacheState) -> None:
    for name, ours, theirs in zip(one._fields, one, other, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


class Serving:
    """Cache, make-believe device and make-believe sampler of one configuration. compiled: its transitions. listener:
    None where there is no log. steady_steps: None, or every step is also made by `schedule.steady` and has to come out
    the same, and so many were."""

    def __init__(self, config: CacheConfig, seed: int = 0, steady: bool = False) -> None:
        self.config, self.state = config, initial_state(config)
        self.steady_steps = 0 if steady else None
        names = ("arrive", "propose", "reset", "preempt_running")
        steps = {name: getattr(transitions, name) for name in names}
        steps |= {name: getattr(external, name) for name in ("undecided", "restore", "loaded")}
        if steady:
            steps |= {"schedule_steady": schedule_steady, "commit_steady": commit_steady}
        self.stepper = Stepper(config, consumes=False)
        self.compiled = {name: compiled(step, config, consumes=False) for name, step in steps.items()}
        self.compiled["spell_out"] = compiled(spell_out, config, consumes=False, kernels="many")
        self.rng = np.random.default_rng(seed)
        self.rows: list[dict] = [{} for _ in config.geometry.paged]
        self.states: list[dict] = [{} for _ in config.geometry.recurrent]
        self.listener = Listener(config, self.rows, self.states) if config.events else None
        self.live: dict[int, list] = {}
        self.runs: dict[int, Sequence] = {}
        self.flying: collections.deque[Flying] = collections.deque()
        self.loads: dict[int, tuple[external.Load, Sequence]] = {}
        self.admissions: list[tuple[int, int, int, str]] = []
        self.preemptions = 0

    def add(self, prompt, answer: int = 1, flags: int = 0, priority: int = 0) -> int:
        tokens = [int(t) for t in prompt]
        chain = unit_keys(self.config, tokens)
        keys = np.zeros((self.config.units, 4), np.uint32)
        keys[: len(chain)] = chain
        self.state, slot = self.compiled["arrive"](self.state, len(tokens), flags, keys, priority, len(tokens) + answer)
        assert int(slot) >= 0
        self.live[int(slot)] = [tokens, len(tokens) + answer]
        self.runs[int(slot)] = Sequence(list(tokens), len(tokens) + answer)
        self._learn(tokens)
        return int(slot)

    def plan(self) -> StepPlan:
        before = self.state
        self.state, there = self.stepper.schedule_whole(before)
        plan = self.compiled["spell_out"](self.state, np.bool_(there))
        if self.steady_steps is not None:
            planned, whether = self.compiled["schedule_steady"](before)
            self.steady_steps += int(whether)
            assert_same(planned, self.state if whether else before)
        self.follow()
        return jax.tree.map(np.asarray, plan)

    def step(self) -> StepPlan:
        """Plan a step and run it; commit the oldest once as many are in flight as may be, or nothing was planned."""
        plan = self.plan()
        self.execute(plan)
        if len(self.flying) >= self.config.steps_in_flight or (self.flying and not plan.rows):
            self.commit()
        return plan

    def execute(self, plan: StepPlan) -> None:
        """Sample, then run the step: a drafter's rows know the token that was sampled behind them."""
        if not plan.rows:
            return
        self.preemptions = int(plan.counters[PREEMPTED])
        owners = [self.runs[int(slot)] for slot in plan.slot[: int(plan.rows)]]
        spans = [self._span(plan, i, owner) for i, owner in enumerate(owners)]
        self.flying.append(Flying(plan, owners, [span.sampled for span in spans]))
        for position in range(len(self.rows)):
            # All sources are read before any target is written.
            copied = {}
            for source, target in plan.copies[position]:
                if target:
                    copied.update({(target, o): v for (b, o), v in self.rows[position].items() if b == source})
            self.rows[position].update(copied)
        reads = [[self.states[g].get(plan.read[g][i]) for i in range(plan.rows)] for g in range(len(self.states))]
        for position, group in enumerate(self.config.geometry.paged):
            tables = plan.tables[position]
            for i, span in enumerate(spans):
                self._write(position, group, tables[i], span)
            for i, span in enumerate(spans):
                if span.end > span.start:
                    self._read(position, group, tables[i], span.prefix, span.start)
        for i, span in enumerate(spans):
            for group in range(len(self.states)):
                self._advance(plan, i, span, group, reads[group][i])

    def _advance(self, plan: StepPlan, i: int, span: Span, group: int, read: object) -> None:
        """Take a recurrent state from where a row starts to where it ends; save it on the way."""
        assert plan.write[group][i] > 0
        saved = [(int(at), int(slot)) for at, slot in zip(plan.emit_position[i], plan.emit_slot[group][i], strict=True)]
        # What kernels may rely on, see `pallas_kernels.kda.api`.
        assert not {slot for _, slot in saved if slot} & {int(plan.read[group][i]), int(plan.write[group][i])}
        if span.end == span.start:
            # The request has ended: the row goes on from the wrong token.
            self.states[group].update({slot: "beyond" for at, slot in saved if slot and at > span.start})
            self.states[group][int(plan.write[group][i])] = "beyond"
            return
        expected = span.prefix[span.start] if span.start else None
        assert (read if plan.read[group][i] else None) == expected, (
            f"row {i} reads a state of another prefix at {span.start}"
        )
        self.states[group][int(plan.write[group][i])] = span.prefix[span.end]
        fixed = not (plan.drafts[i] or plan.slack[i])
        inside = [at for at, slot in saved if slot and span.start < at < span.end]
        if fixed and not self.config.saves_anywhere:
            assert len(inside) <= self.config.emission.max_per_chunk
            assert all(self.config.can_save(span.start, span.end, at) for at in inside)
        for at, slot in saved:
            anywhere = fixed or self.config.saves_anywhere
            if slot and span.start < at <= span.end and (anywhere or at == span.end):
                self.states[group][slot] = span.prefix[at]
            assert not slot or at > int(plan.start[i]) - int(plan.slack[i])

    def _span(self, plan: StepPlan, i: int, owner: Sequence) -> Span:
        """Where a row really starts and ends, and what it samples."""
        start = int(plan.start[i]) if plan.admitted[i] else owner.computed
        stop = start + int(plan.length[i])
        if len(owner.tokens) >= owner.limit:
            return Span([], _prefixes(tuple(owner.tokens)), start, start, stop)
        assert 0 <= int(plan.start[i]) - start <= int(plan.slack[i])
        sampled = []
        if plan.samples[i]:
            accepted = int(self.rng.integers(0, plan.drafts[i] + 1))
            count = min(accepted + 1, owner.limit - len(owner.tokens))
            sampled = self.rng.integers(0, 3, count).tolist()
            assert stop - int(plan.drafts[i]) == len(owner.tokens)
        end = stop - int(plan.drafts[i]) + (len(sampled) - 1 if plan.drafts[i] else 0)
        owner.tokens += sampled
        owner.computed = end
        return Span(sampled, _prefixes(tuple(owner.tokens)), start, end, stop)

    def restore(self, slot: int, tokens: int) -> external.Load:
        """Begin to load a prefix of a waiting request; 0 tokens if that is refused."""
        self.state, load = self.compiled["restore"](self.state, slot, tokens)
        load = jax.tree.map(np.asarray, load)
        if load.tokens:
            self.loads[slot] = load, self.runs[slot]
        return load

    def bring(self, slot: int, good: list[int] | None = None) -> None:
        """The load of a request is through; good: tokens of every group that arrived undamaged, None for all."""
        load, owner = self.loads.pop(slot)
        length, prefix = int(load.tokens), _prefixes(tuple(owner.tokens))
        good = [length] * len(self.config.geometry.groups) if good is None else good
        for position, group in enumerate(self.config.geometry.paged):
            block, first = self.config.group(group).block, self.config.column_offset[position]
            for p in range(int(load.first[group]), length):
                target = int(load.tables[first + p // block]) - self.config.offset(group)
                assert target > 0
                tag = prefix[p + 1 + self._ahead(group)] if p < good[group] else "damaged"
                self.rows[position][target, p % block] = tag
        for position, group in enumerate(self.config.geometry.recurrent):
            target = int(load.states[position]) - self.config.offset(group)
            self.states[position][target] = prefix[length] if good[group] >= length else "damaged"
        self.state = self.compiled["loaded"](self.state, slot, np.array(good, np.int32))
        self.follow()

    def _ahead(self, group: int) -> int:
        """Tokens behind its own that a row depends on."""
        return int(self.config.group(group).spec.draft and self.config.draft is not Draft.NONE)

    def _write(self, position, group, table, span) -> None:
        rows, block = self.rows[position], self.config.group(group).block
        last = min(span.stop + self.config.slots_ahead, self.config.max_context)
        for p in range(span.start, last):
            # A block is there for every row, drafts and the drafter's own included.
            assert table[p // block] > 0
            tag = span.prefix[min(p + 1 + self._ahead(group), len(span.prefix) - 1)] if p < span.end else "rejected"
            rows[int(table[p // block]), p % block] = tag

    def _read(self, position, group, table, prefix, start) -> None:
        rows, geometry = self.rows[position], self.config.group(group)
        first = window_units(geometry, start, 1).start if geometry.kind.windowed else 0
        for p in range(first, start):
            found = rows.get((int(table[p // geometry.block]), p % geometry.block))
            assert table[p // geometry.block] > 0 and found == prefix[p + 1 + self._ahead(group)], (
                f"position {p} of {geometry.name} is not its own"
            )

    def commit(self) -> None:
        """Tell the cache what came of the oldest step in flight."""
        plan, owners, sampled = self.flying.popleft()
        requests = self.config.max_requests
        produced, finished = np.zeros(requests, np.int32), np.zeros(requests, bool)
        keys = np.zeros((requests, transitions.keys_per_append(self.config), 4), np.uint32)
        for i, (owner, tokens) in enumerate(zip(owners, sampled, strict=True)):
            slot = int(plan.slot[i])
            if plan.admitted[i]:
                reason = Reason(int(plan.reason[i])).name
                self.admissions.append((slot, int(plan.hit[i]), int(plan.junction[i]), reason))
            if self.runs.get(slot) is not owner or not tokens:
                continue
            known, limit = self.live[slot]
            before = hashing.key_count(len(known), self.config.unit, self.config.lookahead)
            known += tokens
            self._learn(known)
            produced[slot], finished[slot] = len(tokens), len(known) >= limit
            fresh = unit_keys(self.config, known)[before:]
            keys[slot, : len(fresh)] = fresh
        outcome, before = transitions.Outcome(produced, finished, keys), self.state
        self.state = self.stepper.commit(before, outcome)
        decodes = (plan.length - plan.drafts <= 1).all() and not plan.admitted.any()
        steady = decodes and not finished.any() and can_commit(self.config) and not pool.is_due(self.config, before)
        if self.steady_steps is not None and steady:
            assert_same(self.compiled["commit_steady"](before, outcome)[0], self.state)
        self.follow()
        for slot in np.flatnonzero(finished):
            del self.live[int(slot)], self.runs[int(slot)]
        if self.config.max_drafts:
            drafts = self.rng.integers(0, self.config.max_drafts + 1, requests)
            self.state = self.compiled["propose"](self.state, drafts.astype(np.int32))

    def abort(self, slot: int) -> None:
        self.state = self.stepper.abort(self.state, slot)
        del self.live[slot], self.runs[slot]
        self.follow()

    def withdraw(self) -> None:
        """Take back the step planned last; it has not run."""
        self.state = self.stepper.withdraw(self.state)
        self.follow()

    def preempt_running(self) -> None:
        self.state = self.compiled["preempt_running"](self.state)
        self.follow()

    def reset(self) -> bool:
        self.state, done = self.compiled["reset"](self.state)
        self.follow()
        return bool(done)

    def follow(self) -> None:
        if self.listener:
            self.listener.follow(self.state)

    def _learn(self, tokens: list[int]) -> None:
        if self.listener:
            self.listener.learn(unit_keys(self.config, tokens), _prefixes(tuple(tokens)))

    def run(self, steps: int = 100_000) -> int:
        """Serve until nothing is live; checks invariants and progress after every step."""
        done = 0
        while self.live and done < steps:
            waited = not self.flying
            plan = self.step()
            assert plan.rows > 0 or not waited, "requests wait and nothing runs"
            self.assert_sound()
            done += 1
        return done

    def assert_sound(self) -> None:
        problems = check(self.config, self.state)
        assert not problems, problems

    @property
    def hits(self) -> list[int]:
        return [hit for _, hit, _, _ in self.admissions]


def unit_keys(config: CacheConfig, tokens: list[int]) -> np.ndarray:
    """Keys of the units of `tokens` that have one."""
    return hashing.chain(np.array(tokens, np.int32), config.unit, hashing.seed(), lookahead=config.lookahead)


@functools.lru_cache(maxsize=4096)
def _prefixes(tokens: tuple[int, ...]) -> list[int]:
    """A tag for every prefix length."""
    tags, tag = [0], 0
    for token in tokens:
        tag = hash((tag, token))
        tags.append(tag)
    return tags
