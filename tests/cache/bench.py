"""The reference model with a make-believe device that objects to every wrong read: what case tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hybrid_kv.cache.emission import EmissionCapability
from hybrid_kv.cache.reference import Model, Rules, Step
from hybrid_kv.cache.reference.content import Device, broken
from hybrid_kv.cache.reference.pool import Block
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.geometry import GroupSpec, resolve

# Back ends that save one state inside a chunk, at multiples of 16 tokens from its start, or none.
ONE = EmissionCapability(max_per_chunk=1, alignment=16, anchored=False)
NONE = EmissionCapability(max_per_chunk=0, alignment=1, anchored=True)


def full(block: int, name: str = "full", **options) -> GroupSpec:
    return GroupSpec(name, "full", block, **options)


def state(block: int, name: str = "kda") -> GroupSpec:
    return GroupSpec(name, "recurrent", block)


def window(block: int, width: int, name: str = "window", **options) -> GroupSpec:
    return GroupSpec(name, "sliding_window", block, window=width, **options)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << 30, count).tolist()


class Bench:
    """A model and its device. blocks: of the one pool, or of a pool for each group.

    hits, ends: of every request so far, its last hit and where its rows ended.
    """

    def __init__(
        self, specs: Sequence[GroupSpec], unit: int, dcp: int = 1, blocks: int | tuple[int, ...] = 4000, **options
    ) -> None:
        self.geometry = resolve(specs, dcp=dcp, hash_unit=unit)
        pools = blocks if isinstance(blocks, tuple) else (blocks,)
        groups = range(len(specs)) if isinstance(blocks, tuple) else [0] * len(specs)
        self.model = Model(Rules(self.geometry, pools, tuple(groups), **options))
        self.device = Device(self.model)
        self.answers: dict[str, int] = {}
        self.hits: dict[str, int] = {}
        self.ends: dict[str, list[int]] = {}

    def arrive(self, name: str, prompt: Sequence[int], answer: int = 1, **options) -> Request:
        self.model.arrive(name, prompt, answer=answer, **options)
        self.answers[name] = answer
        return self.model.requests[name]

    def step(self, budget: int | None = None, accept: int = 0) -> Step:
        """Schedule, run and commit one step. budget: tokens of this step. accept: drafts that hold, of each row."""
        step = self.schedule(budget)
        self.commit(step, accept)
        return step

    def schedule(self, budget: int | None = None) -> Step:
        if budget is not None:
            self.model.rules = dataclasses.replace(self.model.rules, token_budget=budget)
        step = self.model.schedule()
        self.device.plan(step)
        self.hits |= {name: hit.tokens for name, hit in step.admitted.items()}
        for row in step.rows:
            self.ends.setdefault(row.request.name, []).append(row.start + row.length)
        written = self._written(step)
        assert len(set(written)) == len(written), "a block has two writers in one step"
        return step

    def commit(self, step: Step, accept: int = 0) -> None:
        answers, ended = {}, []
        for row in step.rows:
            request = row.request
            if row.start + row.length - row.drafts < len(request.tokens):
                continue
            left = self.answers[request.name] - (len(request.tokens) - request.prompt)
            answers[request.name] = [1] * min(1 + min(accept, row.drafts), left)
            if len(answers[request.name]) == left:
                ended.append(request.name)
        self.device.run(step, answers)
        self.model.commit(step, answers, ended)
        self.device.check(step)
        assert broken(self.model) == []

    def _written(self, step: Step) -> list[Block]:
        """States and copies that the rows of a step write."""
        blocks = [block for row in step.rows for one in row.emissions for block in one.blocks]
        for row in step.rows:
            tables = row.request.tables
            blocks += [tables[group][0] for group in self.geometry.recurrent]
            blocks += [table[pair[1]] for pair, table in zip(row.request.copy, tables, strict=True) if pair]
        return blocks

    def drain(self, budget: int | None = None, steps: int = 2000) -> None:
        """Step until nothing is live."""
        for _ in range(steps):
            if not self.model.requests:
                return
            self.step(budget)
        raise AssertionError("no end in sight")

    def serve(self, **prompts: Sequence[int]) -> list[int]:
        """Requests that arrive together, run to the end; their hits."""
        for name, prompt in prompts.items():
            self.arrive(name, prompt)
        self.drain()
        return [self.hits[name] for name in prompts]

    def filed(self, prompt: Sequence[int], group: int) -> list[int]:
        """Lengths of `prompt` at which something of a group can be found: ends of its units, or its states."""
        rules = self.model.rules
        chain = self.model.prefixes.known(prompt, rules.unit, rules.lookahead)
        lag = rules.lag(group)
        return [
            (unit + 1 - lag) * rules.unit
            for unit, prefix in enumerate(chain)
            if unit >= lag and self.model.index.find((group, prefix))
        ]

    def forget(self, prompt: Sequence[int], group: int, end: int) -> None:
        """Evict the block of a group that holds the unit, or the state, of `prompt` that ends at `end` tokens."""
        rules = self.model.rules
        chain = self.model.prefixes.known(prompt, rules.unit, rules.lookahead)
        block = self.model.index.find((group, chain[end // rules.unit - 1 + rules.lag(group)]))
        block.pool.forget(block)
        if not block.holders:
            del block.pool.named[block]
            block.pool.nameless.append(block)

    @property
    def free(self) -> list[int]:
        return [pool.free for pool in self.model.pools]
