#!/usr/bin/env python3
"""What the Pallas kernels cost on named chips, by the schedule of the real compiler; no chip is needed.

    scripts/bench_kernels.py [--kernel conv1d ...] [--chip v6e ...] [--case decode-128 ...] [--json] [--details]
                             [--composite [NAME ...]]

Needs `pip install 'hybrid-kv[aot]'` (scripts/test makes such an environment: .venv/bin/python). Without --case, the
cases with stored limits for the chip. With --composite, functions whose kernels run inside of loops: cases of the
kernels, what XLA estimates for the rest, and the sum. Exit code 1 if one is over its limit. docs/11-chipless.md
explains the columns.
"""

import argparse
import importlib.metadata
import json
import sys
from dataclasses import asdict

from hybrid_kv.chipless.cases import kernel_names
from hybrid_kv.chipless.measure import Measurement, Sum, add_up_on, measure_on
from hybrid_kv.chipless.targets import CHIPS, compiler_installed
from hybrid_kv.errors import UserError

_HEAD = (
    f"{'kernel case':<30}{'chip':<7}{'bundles':>8}{'spills':>7}{'VMEM':>8}{'issued':>11}{'cycles':>11}{'limit':>17}"
    f"{'of limit':>9}{'each':>18}{'allowed':>11}"
)


def row(found: Measurement) -> str:
    """One line of the table."""
    name = f"{found.kernel} {found.case}"
    if found.error:
        return f"{name:<30}{found.chip:<7} does not compile: {found.error}"
    limit = f"{found.limit:,.0f} {found.limit_unit}"
    each = f"{found.cycles_each:,.2f} / {found.per}"
    return (
        f"{name:<30}{found.chip:<7}{found.bundles:>8,}{found.spills:>7,}{found.vmem_bytes >> 10:>7,}K"
        f"{found.issued:>11,}{found.cycles:>11,}{limit:>17}{found.share_of_limit:>9.0%}{each:>18}"
        f"{found.allowed_cycles:>11,}"
    )


def lines_of(found: Sum) -> list[str]:
    """A line for each part of a composite, and the sum."""
    name = f"{found.kernel} {found.composite}"
    if found.error:
        return [f"{name:<38}{found.chip:<7} cannot be added up: {found.error}"]
    lines = [f"{name:<38}{found.chip:<7}"]
    lines += [f"    {what:<41}{cycles:>11,}" for what, cycles in (found.parts or {}).items()]
    limit = f"{found.share_of_limit:.0%} of {found.limit:,.0f} {found.limit_unit}"
    return [*lines, f"    {'together':<41}{found.cycles:>11,}   {limit}"]


def main() -> None:
    """Print a line, or a JSON object, for each case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernel", nargs="+", choices=kernel_names(), default=kernel_names())
    parser.add_argument("--chip", nargs="+", choices=sorted(CHIPS), default=["v6e", "tpu7x"])
    parser.add_argument("--case", nargs="+", default=[], help="these, with stored limits or without")
    parser.add_argument("--composite", nargs="*", metavar="NAME", help="add up these, or all, instead of cases")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--details", action="store_true", help="loop trees, unit shares and where the cycles went")
    options = parser.parse_args()
    if not compiler_installed():
        parser.error("libtpu is not installed; install it with: pip install 'hybrid-kv[aot]'")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    bad = False
    if not options.json:
        print(", ".join(f"{name} {version}" for name, version in versions.items()))
        if options.composite is None:
            print(_HEAD)
    for kernel in options.kernel:
        for chip in options.chip:
            if options.composite is not None:
                for total in add_up_on(kernel, chip, tuple(options.composite)):
                    bad |= bool(total.error)
                    as_json = json.dumps(asdict(total) | {"cycles": total.cycles} | versions)
                    print(*([as_json] if options.json else lines_of(total)), sep="\n", flush=True)
                continue
            try:
                measurements = measure_on(kernel, chip, tuple(options.case), options.details)
            except UserError as error:
                parser.error(str(error))
            for found in measurements:
                bad |= bool(found.too_slow)
                if options.json:
                    print(json.dumps(asdict(found) | {"share_of_limit": found.share_of_limit} | versions), flush=True)
                    continue
                print(row(found), *(f"    {what}" for what in found.too_slow), sep="\n", flush=True)
                if found.moved_to_vmem:
                    print(f"    in vector memory before the call: {', '.join(found.moved_to_vmem)}")
                if found.details:
                    print(found.details)
    sys.exit(bad)


if __name__ == "__main__":
    main()
