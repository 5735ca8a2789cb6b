#!/usr/bin/env python3
"""Time of a decode step of the core, schedule and commit, with everything running.

    .venv/bin/python scripts/bench_core.py [--running 64 256 1024] [--steps 300] [--json]

One MLA group with one, and with three, recurrent groups; blocks and hash units of 64 tokens; prompts of 1,000 to 2,000
tokens. Every step gives each request a token and now and then completes a unit. Medians, and the worst step.
"""

import argparse
import json
import statistics
import time

import jax
import numpy as np

from hybrid_kv import hashing
from hybrid_kv.cache import flights, transitions
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import RUNNING, initial_state, layout
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.schedule.programs import compiled
from hybrid_kv.schedule.step import schedule

UNIT, SHORTEST, LONGEST = 64, 1_000, 2_000


def configuration(running: int, recurrent: int) -> CacheConfig:
    """Room for `running` requests of the longest prompt and 1,000 more tokens."""
    groups = [GroupSpec("mla", "mla", UNIT), *(GroupSpec(f"kda{n}", "recurrent", UNIT) for n in range(recurrent))]
    context = LONGEST + 1_000
    blocks = running * (-(-context // UNIT) + 2)
    return CacheConfig(
        resolve(groups, hash_unit=UNIT),
        pool_blocks=(blocks, *[8 * running] * recurrent),
        group_pool=tuple(range(1 + recurrent)),
        max_requests=running,
        max_context=context,
        token_budget=max(16_384, running),
    )


def measure(running: int, recurrent: int, steps: int) -> dict:
    """Seconds of compilation, and milliseconds of schedule and of commit."""
    config = configuration(running, recurrent)
    fields = layout(config)
    arrive, plan, commit = (compiled(one, config) for one in (transitions.arrive, schedule, transitions.commit))
    state, rng = initial_state(config), np.random.default_rng(0)
    started = time.perf_counter()
    for _ in range(running):
        length = int(rng.integers(SHORTEST, LONGEST))
        chain = hashing.chain(rng.integers(0, 1 << 17, length).astype(np.int32), UNIT, hashing.seed())
        keys = np.zeros((config.units, hashing.KEY_WORDS), np.uint32)
        keys[: len(chain)] = chain
        state, _ = arrive(state, np.int32(length), np.int32(0), keys)
    finished = np.zeros(running, bool)
    times: dict[str, list[float]] = {"schedule": [], "commit": [], "both": []}
    compile_seconds = None
    while len(times["both"]) < steps:
        start = time.perf_counter()
        state = plan(state)
        state.requests.block_until_ready()
        planned = time.perf_counter()
        rows = np.asarray(state.requests)
        row = jax.device_get(flights.at(config, state.requests, 0))
        scheduled, produced = row.scheduled, row.promised
        keys = rng.integers(0, 1 << 32, (running, 1, hashing.KEY_WORDS), dtype=np.uint32)
        outcome = transitions.Outcome(produced, finished, keys)
        handed = time.perf_counter()
        state = commit(state, outcome)
        state.requests.block_until_ready()
        ended = time.perf_counter()
        compile_seconds = compile_seconds or ended - started
        if (rows[:, fields.STATUS] == RUNNING).all() and (scheduled == 1).all():
            times["schedule"].append(planned - start)
            times["commit"].append(ended - handed)
            times["both"].append(planned - start + ended - handed)
    result = {name: round(1e3 * statistics.median(values), 3) for name, values in times.items()}
    return {
        "running": running,
        "recurrent groups": recurrent,
        "steps": steps,
        **{f"{name} ms": value for name, value in result.items()},
        "worst ms": round(1e3 * max(times["both"]), 3),
        "first step s": round(compile_seconds or 0, 1),
        "state MB": round(sum(part.nbytes for part in state) / 1e6, 1),
    }


def main() -> None:
    """Print one line, or one JSON object, for each size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--recurrent", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for recurrent in options.recurrent:
        for running in options.running:
            result = measure(running, recurrent, options.steps)
            print(json.dumps(result) if options.json else "  ".join(f"{k} {v}" for k, v in result.items()), flush=True)


if __name__ == "__main__":
    main()
