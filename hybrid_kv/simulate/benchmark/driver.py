"""A core without a model: requests are lengths and keys, and the seconds of every transition are kept."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import jax
import numpy as np

from hybrid_kv.cache import flights, transitions
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import RUNNING, CacheState, initial_state, layout
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.hashing import KEY_WORDS
from hybrid_kv.schedule.programs import compiled
from hybrid_kv.schedule.stepper import Stepper

UNIT, BUDGET = 64, 16_384


def configuration(recurrent: int, running: int, context: int, rows: int, states: int, **more) -> CacheConfig:
    """One MLA group and `recurrent` recurrent ones, blocks and units of 64, a pool each.

    running: request slots. context: tokens. rows, states: blocks of the MLA pool, and of each of the others.
    """
    groups = [GroupSpec("mla", "mla", UNIT), *(GroupSpec(f"kda{n}", "recurrent", UNIT) for n in range(recurrent))]
    return CacheConfig(
        resolve(groups, hash_unit=UNIT),
        pool_blocks=(rows, *[states] * recurrent),
        group_pool=tuple(range(1 + recurrent)),
        max_requests=running,
        max_context=context,
        token_budget=max(BUDGET, running),
        **more,
    )


class Step(NamedTuple):
    """By request slot: tokens scheduled i32[R], whether it runs bool[R]. seconds: of schedule and commit."""

    scheduled: np.ndarray
    running: np.ndarray
    seconds: float

    @property
    def decodes(self) -> bool:
        """Every row is one token, and all that run have one."""
        return bool((self.scheduled[self.running] == 1).all() and self.running.any())


class Driver:
    """seconds: of all calls since `forget_times`, by transition."""

    def __init__(self, config: CacheConfig) -> None:
        self.config, self.fields = config, layout(config)
        self.seconds: dict[str, list[float]] = {}
        self._arrive, self._read = compiled(transitions.arrive, config), compiled(_newest, config, consumes=False)
        self.rng = np.random.default_rng(0)
        self.start_over()
        begun = time.perf_counter()
        self.arrive(1, self.chain(0))
        self.step(np.ones(config.max_requests, bool))
        self.first_step = time.perf_counter() - begun
        self.start_over()

    def start_over(self) -> None:
        """An empty cache."""
        self.state, self._stepper = initial_state(self.config), Stepper(self.config)
        self.forget_times()

    def forget_times(self) -> None:
        self.seconds = {"arrive": [], "schedule": [], "commit": []}

    def chain(self, units: int) -> np.ndarray:
        """Keys of a prompt that nobody shares, u32[config.units, 4]."""
        keys = np.zeros((self.config.units, KEY_WORDS), np.uint32)
        keys[:units] = self.rng.integers(0, 1 << 32, (units, KEY_WORDS), dtype=np.uint32)
        return keys

    @property
    def status(self) -> np.ndarray:
        """FREE, WAITING or RUNNING, by request slot."""
        return np.asarray(self.state.requests)[self.fields.STATUS]

    def arrive(self, tokens: int, keys: np.ndarray | None = None) -> int:
        """Queue a prompt: its slot."""
        keys = self.chain(tokens // UNIT) if keys is None else keys
        begun = time.perf_counter()
        self.state, slot = self._arrive(self.state, np.int32(tokens), np.int32(0), keys)
        number = int(np.asarray(slot))
        self.seconds["arrive"].append(time.perf_counter() - begun)
        return number

    def step(self, ends: np.ndarray | None = None) -> Step:
        """Plan a step and commit it. ends: bool[R] requests that end with their next token."""
        config, slots = self.config, self.config.max_requests
        keys = self.rng.integers(0, 1 << 32, (slots, transitions.keys_per_append(config), KEY_WORDS), dtype=np.uint32)
        begun = time.perf_counter()
        self.state, _ = self._stepper.schedule(self.state)
        self.state.requests.block_until_ready()
        planned = time.perf_counter()
        rows = np.asarray(self.state.requests)
        flight = jax.device_get(self._read(self.state))
        finished = np.zeros(slots, bool) if ends is None else ends & (flight.promised > 0)
        outcome = transitions.Outcome(flight.promised, finished, keys)
        handed = time.perf_counter()
        self.state = self._stepper.commit(self.state, outcome)
        self.state.requests.block_until_ready()
        done = time.perf_counter()
        self.seconds["schedule"].append(planned - begun)
        self.seconds["commit"].append(done - handed)
        running = rows[self.fields.STATUS] == RUNNING
        return Step(flight.scheduled, running, planned - begun + done - handed)

    def fill(self, lengths: list[int]) -> None:
        """Take in prompts of so many tokens, and go on until all of them decode."""
        for tokens in lengths:
            self.arrive(tokens)
        while not (step := self.step()).decodes or step.running.sum() < len(lengths):
            pass

    def total(self, *names: str) -> float:
        """Seconds of these transitions, of all if none is named."""
        return sum(sum(self.seconds[name]) for name in names or self.seconds)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def _newest(config: CacheConfig, state: CacheState) -> flights.Flight:
    return flights.at(config, state.requests, flights.newest(config, state))
