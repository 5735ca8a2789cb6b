"""Random workloads through the cache's reference model, every block checked against what it holds.

    .venv/bin/python scripts/soak.py --workloads 2000 --json

Exit code 1 if any workload read or filed content of another prefix, broke an invariant, stalled or leaked.
"""

import argparse
import collections
import json
import sys

from hybrid_kv.simulate.soak import workload


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    totals: collections.Counter[str] = collections.Counter()
    faults = []
    for seed in range(options.seed, options.seed + options.workloads):
        outcome = workload(seed)
        totals.update(outcome.counts)
        if outcome.fault:
            faults.append({"seed": seed, "fault": outcome.fault, "rules": str(outcome.rules)})
            print(f"seed {seed}: {outcome.fault}", file=sys.stderr)
    kinds = collections.Counter(fault["fault"].split(":")[0] for fault in faults)
    result = {"workloads": options.workloads, "faulty": len(faults), "kinds": kinds, **totals}
    if options.json:
        print(json.dumps({**result, "faults": faults}))
    else:
        print("  ".join(f"{name} {value if name == 'kinds' else format(value, ',')}" for name, value in result.items()))
    return int(bool(faults) or not options.workloads)


if __name__ == "__main__":
    sys.exit(main())
