#!/usr/bin/env python3
"""What the core costs on the host, against its bars: medians, for one MLA group with one and with three recurrent ones.

    .venv/bin/python scripts/bench_core.py [--only decode lookup ...] [--running 64 256 1024] [--steps 200] [--json]
                                           [--plot FILE]

Blocks and hash units of 64 tokens. decode: schedule and commit while everything decodes. flat: the same at long
contexts and in large pools. lookup: of 131,072 tokens. hash: keys on the host. admission: 1,000 requests that share
half of their prompts. mix: prefills beside decodes. cold: nothing shared, with the cache and without. size: bytes and
compilation. No model runs; keys are drawn where they are not what is measured. Nearly all of the time is compilation.
"""

import argparse
from pathlib import Path

from hybrid_kv.errors import UserError
from hybrid_kv.plan import spell_out
from hybrid_kv.schedule.programs import dispatch_inline
from hybrid_kv.simulate.benchmark import measures
from hybrid_kv.simulate.benchmark.report import as_json, as_text, write_png

KINDS = ("hash", "decode", "flat", "lookup", "admission", "mix", "cold", "size")


def measure(kind: str, recurrent: int, options: argparse.Namespace) -> list[measures.Line]:
    """Lines of one kind for one number of recurrent groups."""
    if kind == "decode":
        lines = [measures.decode_steps(recurrent, running, options.steps) for running in options.running]
        return [line for part in lines for line in part]
    return {
        "hash": lambda: measures.hashing_speed(),
        "flat": lambda: measures.flatness(recurrent, options.steps),
        "lookup": lambda: measures.lookups(recurrent),
        "admission": lambda: measures.admission(recurrent),
        "mix": lambda: measures.mix(recurrent, options.steps),
        "cold": lambda: measures.cold(recurrent),
        "size": lambda: measures.whole_core(recurrent, spell_out),
    }[kind]()


def main() -> None:
    """Print one line, or one JSON object, for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--recurrent", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, default=None, help="write a picture (.png) too")
    options = parser.parse_args()
    dispatch_inline()
    lines = []
    for kind in options.only:
        for recurrent in [0] if kind == "hash" else options.recurrent:
            for line in measure(kind, recurrent, options):
                print(as_json(line) if options.json else as_text(line), flush=True)
                lines.append(line)
    if options.plot:
        try:
            write_png(options.plot, lines)
        except UserError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
