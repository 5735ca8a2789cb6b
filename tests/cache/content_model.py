"""A make-believe device that tags every row and state with the prefix it encodes.

It takes a `StepPlan` literally, in the order of a device step (copies, reads, writes, emissions),
and fails where a row would read anything but the content its positions name. Driving the cache
with it checks soundness of hits, copies and checkpoints without any numerics. Where the configuration keeps a log, a
listener follows it after every transition.
"""

from __future__ import annotations

import functools

import jax
import numpy as np

from hybrid_kv import hashing
from hybrid_kv.cache import transitions
from hybrid_kv.cache.check import check
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.drafts import Draft
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference.lookup import window_units
from hybrid_kv.cache.state import PREEMPTED, initial_state
from hybrid_kv.plan import StepPlan, plan_step
from hybrid_kv.schedule.programs import compiled
from tests.cache.listener import Listener


class Serving:
    """Cache, make-believe device and make-believe sampler of one configuration. compiled: its transitions. listener:
    None where there is no log."""

    def __init__(self, config: CacheConfig, seed: int = 0) -> None:
        self.config, self.state = config, initial_state(config)
        names = ("arrive", "commit", "abort", "withdraw", "propose", "reset")
        steps = {"plan": plan_step, **{name: getattr(transitions, name) for name in names}}
        self.compiled = {name: compiled(step, config, consumes=False) for name, step in steps.items()}
        self.rng = np.random.default_rng(seed)
        self.rows: list[dict] = [{} for _ in config.geometry.paged]
        self.states: list[dict] = [{} for _ in config.geometry.recurrent]
        self.listener = Listener(config, self.rows, self.states) if config.events else None
        self.live: dict[int, list] = {}
        self.admissions: list[tuple[int, int, int, str]] = []
        self.preemptions = 0
        self._sampled: dict[int, list[int]] = {}

    def add(self, prompt, answer: int = 1, flags: int = 0, priority: int = 0) -> int:
        tokens = [int(t) for t in prompt]
        chain = unit_keys(self.config, tokens)
        keys = np.zeros((self.config.units, 4), np.uint32)
        keys[: len(chain)] = chain
        self.state, slot = self.compiled["arrive"](self.state, len(tokens), flags, keys, priority)
        assert int(slot) >= 0
        self.live[int(slot)] = [tokens, len(tokens) + answer]
        self._learn(tokens)
        return int(slot)

    def plan(self) -> StepPlan:
        self.state, plan = self.compiled["plan"](self.state)
        self.follow()
        return jax.tree.map(np.asarray, plan)

    def step(self) -> StepPlan:
        plan = self.plan()
        self.execute(plan)
        self.commit(plan)
        return plan

    def execute(self, plan: StepPlan) -> None:
        """Sample, then run the step: a drafter's rows know the token that was sampled behind them."""
        self._sample(plan)
        for position in range(len(self.rows)):
            # All sources are read before any target is written.
            copied = {}
            for source, target in plan.copies[position]:
                if target:
                    copied.update({(target, o): v for (b, o), v in self.rows[position].items() if b == source})
            self.rows[position].update(copied)
        reads = [[self.states[g].get(plan.read[g][i]) for i in range(plan.rows)] for g in range(len(self.states))]
        spans = [self._span(plan, i) for i in range(int(plan.rows))]
        for position, group in enumerate(self.config.geometry.paged):
            tables = plan.tables[position]
            for i, span in enumerate(spans):
                self._write(position, group, tables[i], *span)
            for i, (prefix, start, end, _) in enumerate(spans):
                self._read(position, group, tables[i], prefix, start, end)
        for i, (prefix, start, end, _) in enumerate(spans):
            for group in range(len(self.states)):
                expected = prefix[start] if start else None
                got = reads[group][i] if plan.read[group][i] else None
                assert got == expected, f"row {i} reads a state of another prefix at {start}"
                assert plan.write[group][i] > 0
                self.states[group][int(plan.write[group][i])] = prefix[end]
                for at, slot in zip(plan.emit_position[i], plan.emit_slot[group][i], strict=True):
                    if slot and at <= end:
                        assert start < at
                        self.states[group][int(slot)] = prefix[at]

    def _sample(self, plan: StepPlan) -> None:
        self._sampled = {}
        for i in range(int(plan.rows)):
            slot = int(plan.slot[i])
            if plan.samples[i]:
                tokens, limit = self.live[slot]
                accepted = int(self.rng.integers(0, plan.drafts[i] + 1))
                count = min(accepted + 1, limit - len(tokens))
                self._sampled[slot] = self.rng.integers(0, 3, count).tolist()

    def _span(self, plan: StepPlan, i: int) -> tuple[list[int], int, int, int]:
        """Tags of a row's prefixes, and where it starts, where what is kept of it ends, and where it ends."""
        slot = int(plan.slot[i])
        sampled = self._sampled.get(slot, [])
        start, stop = int(plan.start[i]), int(plan.start[i] + plan.length[i])
        end = stop - int(plan.drafts[i]) + (len(sampled) - 1 if plan.drafts[i] else 0)
        return _prefixes(tuple(self.live[slot][0] + sampled)), start, end, stop

    def _ahead(self, group: int) -> int:
        """Tokens behind its own that a row depends on."""
        return int(self.config.group(group).spec.draft and self.config.draft is not Draft.NONE)

    def _write(self, position, group, table, prefix, start, end, stop) -> None:
        rows, block = self.rows[position], self.config.group(group).block
        last = min(stop + self.config.slots_ahead, self.config.max_context)
        for p in range(start, last):
            # A block is there for every row, drafts and the drafter's own included.
            assert table[p // block] > 0
            tag = prefix[min(p + 1 + self._ahead(group), len(prefix) - 1)] if p < end else "rejected"
            rows[int(table[p // block]), p % block] = tag

    def _read(self, position, group, table, prefix, start, end) -> None:
        rows, geometry = self.rows[position], self.config.group(group)
        first = window_units(geometry, start, 1).start if geometry.kind.windowed else 0
        for p in range(first, start):
            found = rows.get((int(table[p // geometry.block]), p % geometry.block))
            assert table[p // geometry.block] > 0 and found == prefix[p + 1 + self._ahead(group)], (
                f"position {p} of {geometry.name} is not its own"
            )

    def commit(self, plan: StepPlan) -> None:
        requests = self.config.max_requests
        produced, finished = np.zeros(requests, np.int32), np.zeros(requests, bool)
        drafts = np.zeros(requests, np.int32)
        keys = np.zeros((requests, transitions.keys_per_append(self.config), 4), np.uint32)
        for i in range(int(plan.rows)):
            slot = int(plan.slot[i])
            if plan.admitted[i]:
                reason = Reason(int(plan.reason[i])).name
                self.admissions.append((slot, int(plan.hit[i]), int(plan.junction[i]), reason))
            if slot in self.live and slot in self._sampled:
                tokens, limit = self.live[slot]
                before = hashing.key_count(len(tokens), self.config.unit, self.config.lookahead)
                tokens += self._sampled[slot]
                self._learn(tokens)
                produced[slot], finished[slot] = len(self._sampled[slot]), len(tokens) >= limit
                fresh = unit_keys(self.config, tokens)[before:]
                keys[slot, : len(fresh)] = fresh
                drafts[slot] = self.rng.integers(0, self.config.max_drafts + 1)
        self.preemptions = int(plan.counters[PREEMPTED])
        self.state = self.compiled["commit"](self.state, transitions.Outcome(produced, finished, keys))
        if self.config.max_drafts:
            self.state = self.compiled["propose"](self.state, drafts)
        self.follow()
        for slot in np.flatnonzero(finished):
            del self.live[int(slot)]

    def abort(self, slot: int) -> None:
        self.state = self.compiled["abort"](self.state, slot)
        del self.live[slot]
        self.follow()

    def withdraw(self) -> None:
        self.state = self.compiled["withdraw"](self.state)
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
            plan = self.step()
            assert plan.rows > 0, "requests wait and nothing runs"
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
