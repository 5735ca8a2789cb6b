"""Measurements of the core, each a function that returns lines: what, how much, and the bar it is held against."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from hybrid_kv import hashing
from hybrid_kv.cache import lookup, transitions
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import RUNNING, WAITING, initial_state
from hybrid_kv.cache.statistics import statistics as totals
from hybrid_kv.cache.transitions import Outcome, keys_per_append
from hybrid_kv.schedule.programs import compile_together, compiled
from hybrid_kv.schedule.stepper import Stepper
from hybrid_kv.simulate.benchmark.driver import UNIT, Driver, configuration

SHORT, LONG, SPARE = 2_000, 131_072, 1_024
# Milliseconds of schedule and commit, by running requests.
_DECODE_BARS = {64: 0.3, 256: 0.5, 1_024: 1.0}


class Line(NamedTuple):
    """recurrent: groups (0: none matter). bar: None where there is none; at_least: it is a floor. more: what else."""

    what: str
    recurrent: int
    measured: float
    unit: str
    bar: float | None = None
    at_least: bool = False
    more: Mapping[str, Any] = {}

    @property
    def holds(self) -> bool | None:
        if self.bar is None:
            return None
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar


def hashing_speed(rounds: int = 9) -> list[Line]:
    """Tokens a second at units of 64, by the clock; and by the time this process had, which others do not lengthen."""
    tokens = np.random.default_rng(0).integers(0, 1 << 17, 1 << 20).astype(np.int32)
    spent, own = [], []
    for _ in range(rounds):
        begun, begun_own = time.perf_counter(), time.process_time()
        hashing.KeyChain(UNIT, hashing.seed()).extend(tokens)
        spent.append(time.perf_counter() - begun)
        own.append(time.process_time() - begun_own)
    medians = (statistics.median(spent), min(spent), statistics.median(own))
    speed, best, alone = (round(len(tokens) / 1e6 / seconds, 1) for seconds in medians)
    more = {"best": best, "by CPU time": alone}
    return [Line("hashing at units of 64", 0, speed, "M tokens/s", 60.0, True, more)]


def decode_steps(recurrent: int, running: int, steps: int) -> list[Line]:
    """Schedule and commit while everything decodes; prompts of 1,000 to 2,000 tokens."""
    context = SHORT + SPARE
    blocks = running * (-(-context // UNIT) + 2)
    driver = Driver(configuration(recurrent, running, context, blocks, 8 * running))
    driver.fill(driver.rng.integers(SHORT // 2, SHORT, running).tolist())
    driver.forget_times()
    spent = [driver.step().seconds for _ in range(steps)]
    more = {
        "schedule ms": round(1e3 * driver.median("schedule"), 3), "commit ms": round(1e3 * driver.median("commit"), 3),
        "best ms": round(1e3 * min(spent), 3), "worst ms": round(1e3 * max(spent), 3),
        "first step s": round(driver.first_step, 1),
    }  # fmt: skip
    bar = _DECODE_BARS.get(running)
    return [Line(f"decode step, {running} running", recurrent, 1e3 * statistics.median(spent), "ms", bar, more=more)]


def flatness(recurrent: int, steps: int, running: int = 64) -> list[Line]:
    """A decode step at contexts of 2k and of 128k tokens, and in pools of 64k and of 1M blocks, in turn."""
    small = configuration(recurrent, running, LONG + SPARE, 1 << 16, 8 * running)
    large = dataclasses.replace(small, pool_blocks=(1 << 20, *small.pool_blocks[1:]))
    drivers = [Driver(small), Driver(large), Driver(large)]
    for driver, tokens in zip(drivers, (SHORT, SHORT, LONG), strict=True):
        driver.fill((tokens - driver.rng.integers(0, UNIT, running)).tolist())
    spent = [[driver.step().seconds for driver in drivers] for _ in range(steps)]
    low, base, deep = (1e3 * statistics.median(column) for column in zip(*spent, strict=True))
    # Of steps that were taken one after the other: what slows the machine down slows both.
    contexts = statistics.median(deep / base for _, base, deep in spent)
    pools = statistics.median(base / low for low, base, _ in spent)
    return [
        Line("decode step, context 128k : 2k", recurrent, contexts, "x", 1.3,
             more={"2k ms": round(base, 3), "128k ms": round(deep, 3)}),
        Line("decode step, pool 1M : 64k blocks", recurrent, pools, "x", 1.3,
             more={"64k ms": round(low, 3), "1M ms": round(base, 3)}),
    ]  # fmt: skip


def lookups(recurrent: int, rounds: int = 50) -> list[Line]:
    """Of a prompt of 131,072 tokens: cached, unknown, and with its rows but no state."""
    driver = Driver(configuration(recurrent, 64, LONG + SPARE, 1 << 16, 512))
    look = compiled(lookup.lookup, driver.config, consumes=False)
    prompt, ends = driver.chain(LONG // UNIT), np.ones(driver.config.max_requests, bool)

    def seen(keys: np.ndarray) -> lookup.Hit:
        return look(driver.state, keys, np.int32(LONG), np.int32(0))

    def line(what: str, keys: np.ndarray) -> Line:
        found, spent = seen(keys), []
        for _ in range(rounds):
            begun = time.perf_counter()
            seen(keys).hit.block_until_ready()
            spent.append(time.perf_counter() - begun)
        more = {"hit": int(found.hit), "junction": int(found.junction)}
        return Line(
            f"lookup of 131,072 tokens, {what}", recurrent, 1e3 * statistics.median(spent), "ms", 0.3, more=more
        )

    def serve(tokens: int, keys: np.ndarray | None) -> None:
        driver.arrive(tokens, keys)
        while driver.status.any():
            driver.step(ends)

    serve(LONG, prompt)
    lines = [line("cached", prompt), line("unknown", driver.chain(LONG // UNIT))]
    for _ in range(driver.config.capacity[1]):
        if int(seen(prompt).hit) == 0:
            break
        serve(4 * UNIT, None)
    return [*lines, line("state evicted", prompt)]


def admission(recurrent: int, requests: int = 1_000, prefixes: int = 4) -> list[Line]:
    """Requests of 8,192 tokens that share the first half with others, all there at once, until the last is admitted;
    those admitted go on decoding."""
    driver = Driver(crowd(recurrent))
    half = 4_096
    text = driver.rng.integers(0, 1 << 17, (prefixes + requests, half)).astype(np.int32)
    prompts = [np.concatenate([text[number % prefixes], text[prefixes + number]]) for number in range(requests)]
    begun = time.perf_counter()
    keys = [hashing.KeyChain(UNIT, hashing.seed()).extend(prompt) for prompt in prompts]
    hashed = time.perf_counter() - begun
    for chain in keys:
        driver.arrive(2 * half, np.pad(chain, ((0, driver.config.units - len(chain)), (0, 0))))
    while (driver.status == WAITING).any():
        driver.step()
    arrived, steps = driver.total("arrive"), driver.total("schedule", "commit")
    seen = totals(driver.config, driver.state)
    more = {
        "hashing s": round(hashed, 3), "arrive s": round(arrived, 3), "steps s": round(steps, 3),
        "steps": len(driver.seconds["commit"]), "hit %": round(100 * seen.hits / seen.queries, 1),
    }  # fmt: skip
    return [Line(f"admission of {requests} x 8,192 tokens", recurrent, hashed + arrived + steps, "s", 0.3, more=more)]


def mix(recurrent: int, steps: int, decoding: int = 512) -> list[Line]:
    """Steps of 16,384 tokens in which hundreds decode and prompts of 8,192 tokens come in."""
    driver = Driver(crowd(recurrent))
    driver.fill([1_000] * decoding)
    ends = np.arange(driver.config.max_requests) >= decoding
    spent: list[float] = []
    rows: list[int] = []
    while len(spent) < steps:
        while (driver.status > 0).sum() < decoding + 4:
            driver.arrive(8_192)
        step = driver.step(ends)
        if step.scheduled.max() > 1:
            spent.append(step.seconds)
            rows.append(int((step.scheduled > 1).sum()))
    more = {"prefill rows": statistics.median(rows), "worst ms": round(1e3 * max(spent), 3)}
    return [
        Line(f"step of 16,384 tokens, {decoding} decode", recurrent, 1e3 * statistics.median(spent), "ms", more=more)
    ]


def crowd(recurrent: int) -> CacheConfig:
    """1,024 requests of up to 8,704 tokens."""
    return configuration(recurrent, 1_024, 8_192 + 512, 1 << 17, 1 << 12)


def cold(recurrent: int, requests: int = 200, rounds: int = 5) -> list[Line]:
    """Prompts that share nothing, 64 at a time, with the cache and without: seconds of the scheduler."""
    caching = configuration(recurrent, 64, 6_144 + SPARE, 1 << 15, 1 << 10)
    drivers = [Driver(caching), Driver(dataclasses.replace(caching, prefix_caching=False))]
    lengths = np.random.default_rng(1).integers(2_048, 6_144, requests).tolist()
    spent = [[_serve(driver, lengths) for driver in drivers] for _ in range(rounds)]
    on, off = (statistics.median(column) for column in zip(*spent, strict=True))
    ratio = statistics.median(on / off for on, off in spent)
    states = totals(caching, drivers[0].state).states / recurrent / sum(lengths) * 1e3
    more = {"on s": round(on, 3), "off s": round(off, 3), "states per 1k prefilled": round(states, 3)}
    more["us a prefilled token more"] = round(1e6 * (on - off) / sum(lengths), 3)
    return [Line("cold trace, caching on : off", recurrent, ratio, "x", 1.03, more=more)]


def _serve(driver: Driver, lengths: list[int], answer: int = 32) -> float:
    """Serve prompts with as many at a time as there are slots: seconds."""
    driver.start_over()
    slots = driver.config.max_requests
    left, waiting = np.zeros(slots, int), list(lengths)
    while waiting or left.any():
        while waiting and (left == 0).any():
            left[driver.arrive(waiting.pop())] = answer
        before = np.asarray(driver.state.requests)[driver.fields.KNOWN].copy()
        step = driver.step(left == 1)
        after = np.asarray(driver.state.requests)
        gained = np.where(after[driver.fields.STATUS] == RUNNING, after[driver.fields.KNOWN] - before, 0)
        gone = step.running & (after[driver.fields.STATUS] == 0)
        left = np.where(gone, 0, left - gained)
    return driver.total()


def whole_core(recurrent: int, spell_out: Callable[..., Any]) -> list[Line]:
    """Compilation of all that an engine compiles, and bytes of the state, for 1,024 requests of 1M tokens, a pool of 1M
    blocks of rows and pools of 64k states. Nothing is allocated. spell_out: `plan.spell_out`, which an engine reads its
    plans with."""
    config = configuration(recurrent, 1_024, 1 << 20, 1 << 20, 1 << 16)
    state = jax.eval_shape(lambda: initial_state(config))
    parts = {name: math.prod(part.shape) * part.dtype.itemsize for name, part in zip(state._fields, state, strict=True)}
    word, slots = jax.ShapeDtypeStruct((), np.int32), config.max_requests
    keys = jax.ShapeDtypeStruct((config.units, hashing.KEY_WORDS), np.uint32)
    produced, finished = np.zeros(slots, np.int32), np.zeros(slots, bool)
    outcome = Outcome(produced, finished, np.zeros((slots, keys_per_append(config), hashing.KEY_WORDS), np.uint32))
    begun, begun_own = time.perf_counter(), time.process_time()
    others = [
        (compiled(transitions.reset, config, seldom=True), (state,)),
        (compiled(transitions.arrive, config), (state, word, word, keys)),
        (compiled(spell_out, config, consumes=False, kernels="many"), (state, np.bool_(True))),
    ]
    compile_together([*Stepper(config).calls(state, outcome), *others])
    spent, own = time.perf_counter() - begun, time.process_time() - begun_own
    largest = {f"{name} MB": round(size / 1e6) for name, size in parts.items() if size > 1e7}
    what = "1,024 requests of 1M tokens, 1M blocks of rows, 64k states"
    return [
        Line(f"state for {what}", recurrent, sum(parts.values()) / 1e9, "GB", 1.5, more=largest),
        Line(f"compilation for {what}", recurrent, spent, "s", 20.0, more={"CPU s": round(own, 1)}),
    ]
