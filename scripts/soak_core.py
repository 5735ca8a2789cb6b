"""Random workloads through the compiled core, every row and state checked against what it holds.

    .venv/bin/python scripts/soak_core.py --workloads 200 --json

The configurations are those of tests/cache/test_random_traffic.py: compiling one takes longer than running many
workloads. Exit code 1 if any workload read content of another prefix, broke an invariant, stalled or leaked.
"""

import argparse
import collections
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests are not installed

from tests.cache.test_random_traffic import CONFIGS, traffic


def main() -> int:
    """Run the workloads, each configuration's together; print totals."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    totals: collections.Counter[str] = collections.Counter()
    faults = []
    for turn, (name, config) in enumerate(CONFIGS.items()):
        for seed in range(options.seed + turn, options.seed + options.workloads, len(CONFIGS)):
            totals["workloads"] += 1
            try:
                totals.update(traffic(config, seed))
            except AssertionError as error:
                faults.append({"configuration": name, "seed": seed, "fault": str(error)})
                print(f"{name}, seed {seed}: {error}", file=sys.stderr)
    result = {"faulty": len(faults), **totals}
    if options.json:
        print(json.dumps({**result, "faults": faults}))
    else:
        print("  ".join(f"{name} {value:,}" for name, value in result.items()))
    return int(bool(faults) or not options.workloads)


if __name__ == "__main__":
    sys.exit(main())
