#!/usr/bin/env python3
"""What a budget of learned positions serves on published traces, beside the ladder, with an unlimited cache.

    .venv/bin/python scripts/bench_placement.py --traces FOLDER [--trace miniswe ...] [--budget 1 2 4 8] [--json]

Requests one after the other, hit unit 128; every placement keeps tail, turn end and the deepest junction. A budget of M
positions is chosen anew every `--every` admissions from the overlap depths seen so far (`cache.budgeted`), those before
a choice counting `--keep` after it. Hit %, and states written for every 1,000 tokens prefilled.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from hybrid_kv.cache.budgeted import Learner
from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.simulate.placements import Policy, compare, ladder
from hybrid_kv.simulate.workloads import reference

UNIT, LADDER, RUNG, CONTEXT = 128, (512, 2048, 8192), 2048, 1 << 18


@dataclasses.dataclass
class Budget:
    """A learner as a policy of the comparison. rungs: of a ladder that goes with it."""

    learner: Learner
    rungs: tuple[int, ...]

    def positions(self, length: int) -> list[int]:
        return [*self.learner.positions, *ladder(*self.rungs)(length)]

    def watch(self, overlap: int, hit: int) -> None:
        self.learner.admitted(overlap)


def budget(most: int, every: int, keep: float, rungs: tuple[int, ...] = ()) -> Policy:
    groups = [GroupSpec("mla", "mla", UNIT), GroupSpec("kda", "recurrent", UNIT)]
    config = CacheConfig(
        resolve(groups, hash_unit=UNIT), pool_blocks=(64, 64), group_pool=(0, 1), max_requests=1, max_context=CONTEXT,
        token_budget=8192, placement=Placement(positions=(0,) * most),
    )  # fmt: skip
    one = Budget(Learner(config, every, keep), rungs)
    name = f"budget {most}" + "".join(f" + rung {rung}" for rung in rungs)
    return Policy(name, one.positions, one.watch)


def main() -> None:
    """Print one line, or one JSON object, for each trace and placement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--trace", nargs="+", default=["miniswe", "magagent", "synthetic", "conversation+", "cc"])
    parser.add_argument("--budget", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--every", type=int, default=32)
    parser.add_argument("--keep", type=float, default=0.9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        for trace in options.trace:
            policies = [
                Policy("no ladder", ladder()),
                Policy("rung 2048", ladder(RUNG)),
                Policy("ladder", ladder(*LADDER)),
            ]
            for rungs in ((), (RUNG,)):
                policies += [budget(most, options.every, options.keep, rungs) for most in options.budget]
            served = ((one.prompt, one.answer) for one in reference(options.traces, trace))
            ceiling = compare(served, UNIT, policies)
            for policy in policies:
                line = {
                    "trace": trace, "placement": policy.name, "hit %": round(100 * policy.hit_rate, 2),
                    "states per 1k prefilled": round(policy.states_per_1k, 2),
                    "attention %": round(100 * ceiling / policy.prompts, 2),
                }  # fmt: skip
                print(json.dumps(line) if options.json else "  ".join(f"{k} {v}" for k, v in line.items()), flush=True)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
