"""A make-believe device that tags every row and state with the prefix it encodes.

It takes a `StepPlan` literally, in the order of a device step (copies, reads, writes, emissions),
and fails where a row would read anything but the content its positions name. Driving the cache
with it checks soundness of hits, copies and checkpoints without any numerics.
"""

from __future__ import annotations

import functools

import jax
import numpy as np

from hybrid_kv import hashing
from hybrid_kv.cache import transitions
from hybrid_kv.cache.check import check
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.state import initial_state
from hybrid_kv.plan import StepPlan, plan_step

# Small states are bound by the number of operations, so the machine code need not be optimised.
_jit = functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
_arrive, _plan, _commit = _jit(transitions.arrive), _jit(plan_step), _jit(transitions.commit)
_abort, _withdraw = _jit(transitions.abort), _jit(transitions.withdraw)


class Serving:
    """Cache, make-believe device and make-believe sampler of one configuration."""

    def __init__(self, config: CacheConfig, seed: int = 0) -> None:
        self.config, self.state = config, initial_state(config)
        self.rng = np.random.default_rng(seed)
        self.rows: list[dict] = [{} for _ in config.geometry.attention]
        self.states: list[dict] = [{} for _ in config.geometry.recurrent]
        self.live: dict[int, list] = {}
        self.admissions: list[tuple[int, int, int, str]] = []
        self.preemptions = 0

    def add(self, prompt, answer: int = 1, flags: int = 0) -> int:
        tokens = [int(t) for t in prompt]
        chain = hashing.chain(np.array(tokens, np.int32), self.config.unit, hashing.seed())
        keys = np.zeros((self.config.units, 4), np.uint32)
        keys[: len(chain)] = chain
        self.state, slot = _arrive(self.config, self.state, len(tokens), flags, keys)
        assert int(slot) >= 0
        self.live[int(slot)] = [tokens, len(tokens) + answer]
        return int(slot)

    def plan(self) -> StepPlan:
        self.state, plan = _plan(self.config, self.state)
        return jax.tree.map(np.asarray, plan)

    def step(self) -> StepPlan:
        plan = self.plan()
        self.execute(plan)
        self.commit(plan)
        return plan

    def execute(self, plan: StepPlan) -> None:
        for position in range(len(self.rows)):
            copied = {}
            for source, target in plan.copies[position]:
                if target:
                    copied.update({(target, o): v for (b, o), v in self.rows[position].items() if b == source})
            self.rows[position].update(copied)
        reads = [[self.states[g].get(plan.read[g][i]) for i in range(plan.rows)] for g in range(len(self.states))]
        for i in range(int(plan.rows)):
            tokens, _ = self.live[int(plan.slot[i])]
            start, end = int(plan.start[i]), int(plan.start[i] + plan.length[i])
            prefix = _prefixes(tuple(tokens[:end]))
            for position, group in enumerate(self.config.geometry.attention):
                self._attend(position, self.config.group(group).block, plan.tables[position][i], prefix, start, end)
            for group in range(len(self.states)):
                expected = prefix[start] if start else None
                got = reads[group][i] if plan.read[group][i] else None
                assert got == expected, f"row {i} reads a state of another prefix at {start}"
                assert plan.write[group][i] > 0
                self.states[group][int(plan.write[group][i])] = prefix[end]
                for at, slot in zip(plan.emit_position[i], plan.emit_slot[group][i], strict=True):
                    if slot:
                        assert start < at <= end
                        self.states[group][int(slot)] = prefix[at]

    def _attend(self, position, block, table, prefix, start, end) -> None:
        rows = self.rows[position]
        for p in range(start, end):
            assert table[p // block] > 0
            rows[int(table[p // block]), p % block] = prefix[p + 1]
        for p in range(end):
            assert rows.get((int(table[p // block]), p % block)) == prefix[p + 1], f"position {p} is not its own"

    def commit(self, plan: StepPlan) -> None:
        requests, unit = self.config.max_requests, self.config.unit
        produced, finished = np.zeros(requests, np.int32), np.zeros(requests, bool)
        keys = np.zeros((requests, transitions.keys_per_append(self.config), 4), np.uint32)
        for i in range(int(plan.rows)):
            slot = int(plan.slot[i])
            if plan.admitted[i]:
                reason = Reason(int(plan.reason[i])).name
                self.admissions.append((slot, int(plan.hit[i]), int(plan.junction[i]), reason))
            if slot in self.live and plan.samples[i]:
                tokens, limit = self.live[slot]
                tokens.append(int(self.rng.integers(0, 3)))
                produced[slot], finished[slot] = 1, len(tokens) >= limit
                if len(tokens) % unit == 0:
                    keys[slot, 0] = hashing.chain(np.array(tokens, np.int32), unit, hashing.seed())[-1]
        self.preemptions = int(plan.counters[2])
        self.state = _commit(self.config, self.state, transitions.Outcome(produced, finished, keys))
        for slot in np.flatnonzero(finished):
            del self.live[int(slot)]

    def abort(self, slot: int) -> None:
        self.state = _abort(self.config, self.state, slot)
        del self.live[slot]

    def withdraw(self) -> None:
        self.state = _withdraw(self.config, self.state)

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


@functools.lru_cache(maxsize=4096)
def _prefixes(tokens: tuple[int, ...]) -> list[int]:
    """A tag for every prefix length."""
    tags, tag = [0], 0
    for token in tokens:
        tag = hash((tag, token))
        tags.append(tag)
    return tags
