#!/usr/bin/env python3
"""Random workloads through the cache, every block checked against what it holds.

    .venv/bin/python scripts/soak.py --workloads 2000 --json
    .venv/bin/python scripts/soak.py --workloads 200 --compiled

Through the reference model, a system of its own for each workload; with --compiled through the compiled core, on the
configurations of tests/cache/test_random_traffic.py in turn, since compiling one takes longer than many workloads.
Exit code 1 if any workload read or filed content of another prefix, broke an invariant, stalled or leaked.
"""

import argparse
import collections
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

Ended = tuple[dict[str, object], Mapping[str, int], str]  # what it was, what happened, and what went wrong


def through_the_model(seeds: range) -> Iterator[Ended]:
    from hybrid_kv.simulate.soak import workload

    for seed in seeds:
        outcome = workload(seed)
        yield {"seed": seed, "rules": str(outcome.rules)}, outcome.counts, outcome.fault


def through_the_core(seeds: range) -> Iterator[Ended]:
    sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests are not installed
    from tests.cache.test_random_traffic import CONFIGS, traffic

    for turn, (name, config) in enumerate(CONFIGS.items()):
        for seed in seeds[turn :: len(CONFIGS)]:
            what: dict[str, object] = {"seed": seed, "configuration": name}
            try:
                yield what, traffic(config, seed), ""
            except AssertionError as error:
                yield what, {}, str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    parser.add_argument("--compiled", action="store_true", help="through the compiled core")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    totals: collections.Counter[str] = collections.Counter()
    faults = []
    run = through_the_core if options.compiled else through_the_model
    for what, counts, fault in run(range(options.seed, options.seed + options.workloads)):
        totals.update(counts)
        if fault:
            faults.append({**what, "fault": fault})
            print(f"seed {what['seed']}: {fault}", file=sys.stderr)
    kinds = collections.Counter(str(one["fault"]).split(":")[0] for one in faults)
    result = {"workloads": options.workloads, "faulty": len(faults), "kinds": kinds, **totals}
    if options.json:
        print(json.dumps({**result, "faults": faults}))
    else:
        print("  ".join(f"{name} {value if name == 'kinds' else format(value, ',')}" for name, value in result.items()))
    return int(bool(faults) or not options.workloads)


if __name__ == "__main__":
    sys.exit(main())
