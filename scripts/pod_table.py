#!/usr/bin/env python3
"""Compiles the slices of `configs/slices`, and writes the table of docs/18-pods.md.

    scripts/pod_table.py --json results.json                        all slices and steps: an hour on two cores
    scripts/pod_table.py --json results.json --slice v6e-8 --step decode
    scripts/pod_table.py --json results.json --print                the table of what is in the file
    scripts/pod_table.py --json results.json --print --markdown     as the page has it

Results are added to the file as they come, so that a run can go on where another ended. Each step is compiled in a
process of its own: what one leaves in memory does not weigh on the next.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from hybrid_kv.chipless import pod_report
from hybrid_kv.chipless.pods import pod
from hybrid_kv.chipless.slices import Slice, read_slice, slice_names
from hybrid_kv.chipless.steps import KINDS
from hybrid_kv.geometry import format_table


def main() -> int:
    """Exit code 1 if a step does not compile or does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    parser.add_argument("--slice", default="", help="only slices whose name has this in it")
    parser.add_argument("--step", choices=KINDS, help="only this step")
    parser.add_argument("--again", action="store_true", help="compile what is in the file already, too")
    parser.add_argument("--print", action="store_true", help="compile nothing")
    parser.add_argument("--markdown", action="store_true", help="the table as it stands on the page")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_one(*options.one)))
        return 0
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    wanted = [(name, kind) for kind in KINDS for name in slice_names() if options.slice in name]
    for name, kind in [] if options.print else wanted:
        key = f"{name}: {kind}"
        if options.step in (None, kind) and (options.again or key not in results):
            print(key, flush=True)
            results[key] = _apart(name, kind)
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    print((markdown if options.markdown else format_table)(*table(results)))
    return 0 if all(result.get("fits") for result in results.values()) else 1


def _apart(name: str, kind: str) -> dict:
    command = [sys.executable, __file__, "--json", "-", "--one", name, kind]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def _one(name: str, kind: str) -> dict:
    """What is kept of one step; bytes and seconds of one device."""
    chosen = Slice(**read_slice(name))
    slice_ = pod(chosen.topology)
    result = pod_report.report(chosen.setting(), slice_, [kind])
    (step,) = result.steps
    layers = [layer for layer in pod_report.LAYERS if step.work.layers[layer] and step.work.wire[layer]]
    return {
        "topology": chosen.topology,
        "mesh": chosen.mesh,
        "devices": len(slice_.devices),
        "refused": step.refused,
        "fits": not step.over and not step.refused,
        "over": step.over,
        "seconds": round(step.seconds, 1),
        "memory": step.memory,
        "hbm": result.hbm,
        "capacity": {"batch": result.capacity.batch, "context": result.capacity.context},
        "wire": step.wire,
        "least_wire": step.work.wire,
        "wire_excess": max((step.wire[k] / step.work.wire[k] - 1 for k in layers), default=0.0) if step.wire else None,
        "kernels": sorted(step.kernels),
        "times": step.times,
    }


HEAD = ("slice: step", "mesh", "compiled", "GB of", "weights", "pools", "temporary", "wire", "HBM / MXU / links, ms",
        "rows that fit", "context that fits")  # fmt: skip


def table(results: dict) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head, and one line a step."""
    rows: list[tuple[str, ...]] = []
    for key, r in sorted(results.items(), key=lambda item: (item[0].split(": ")[1], item[0])):
        if "failed" in r:
            rows.append((key, "-", "failed", r["failed"][:60], *["-"] * (len(HEAD) - 4)))
            continue
        memory = r["memory"]
        held = sum(memory.values())
        pools = sum(memory[name] for name in ("mla", "kda", "conv"))
        done = f"{r['seconds']:.0f} s" if not r["refused"] else "refused"
        fits = f"{held / 1e9:.1f} of {r['hbm'] / 1e9:.1f}" if r["fits"] else f"{r['over'] / 1e9:.1f} over"
        wire = "-" if r["wire_excess"] is None else f"+{100 * r['wire_excess']:.1f} %"
        times = " / ".join(f"{1e3 * r['times'][unit]:.2f}" for unit in pod_report.UNITS)
        sizes = [f"{size / 1e9:.2f}" for size in (memory["weights"], pools, memory.get("temporary", 0))]
        room = str(r["capacity"]["batch"]), str(r["capacity"]["context"])
        rows.append((key, r["mesh"], done, fits, *sizes, wire, times, *room))
    return HEAD, rows


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table for a page, without times of compilation, which depend on the machine and on what else it does."""
    lines = ([cell for name, cell in zip(head, row, strict=True) if name != "compiled"] for row in (head, *rows))
    first, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join((first, "|---" * (len(head) - 1) + "|", *others))


if __name__ == "__main__":
    sys.exit(main())
