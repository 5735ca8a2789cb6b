#!/usr/bin/env python3
"""Whether tiny models give the same greedy tokens on every mesh, interleave and chunk size, from the cache or not.

    .venv/bin/python scripts/check_meshes.py [--model tiny-k3] [--mesh model=2,dcp=4] [--seed 0] [--json FILE]

For each model: random weights, four prompts of which three share prefixes, 24 greedy tokens each; expected is what one
device answers without a cache. On every mesh of up to eight stand-in devices, answers are compared cold and warm (with
the hits of the warm run), in chunks with a wide interleave, and without a cache; with several replicas, with experts
over the tensor group and over the whole mesh. Cold and warm also with KDA over `model` alone and replicated, each with
the residual stream replicated and split by tokens.
--model and --mesh may be repeated.
About 20 seconds of one core a case. Exit code 1 if any answer differs.
"""

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Before anything imports JAX: it reads these when it starts its CPU devices.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import numpy as np

from hybrid_kv.models.make_tiny import TINY, make_tiny
from hybrid_kv.runtime.engine import CacheOptions, Engine, SamplingParams
from hybrid_kv.sharding import MeshSpec

MESHES = ("1x1", "model=2", "model=4", "model=8", "dcp=2", "dcp=4", "dcp=8", "model=2,dcp=2", "model=2,dcp=4",
          "model=4,dcp=2", "data=2,model=2,dcp=2")  # fmt: skip
PLAIN = CacheOptions(max_context=256, max_requests=4, token_budget=128, token_buckets=(128,), hash_unit=16)
# Spreads of KDA and of the residual stream besides the usual one.
OTHERS = [(kda, residual) for residual in ("replicated", "sequence") for kda in ("tensor", "model", "replicated")][1:]
GREEDY = SamplingParams(max_tokens=24, ignore_stop=True)


@dataclasses.dataclass(frozen=True)
class Spread:
    """What is spread over which devices, as `Engine.from_checkpoint` takes it."""

    experts: str = "tensor"
    kda: str = "tensor"
    residual: str = "replicated"

    def __str__(self) -> str:
        usual = dataclasses.asdict(Spread())
        chosen = {name: value for name, value in dataclasses.asdict(self).items() if value != usual[name]}
        return "".join(f", {name} {value}" for name, value in chosen.items())


@dataclasses.dataclass(frozen=True)
class Case:
    """One engine and what its answers were like: equal to the expected ones cold and warm, hits of the warm run."""

    model: str
    mesh: str
    spread: Spread
    options: CacheOptions
    equal: tuple[bool, bool]
    hits: tuple[int, ...]
    sound: bool
    seconds: float

    @property
    def right(self) -> bool:
        return all(self.equal) and self.sound and bool(any(self.hits)) == self.options.prefix_caching

    def line(self) -> str:
        how = f"interleave {self.options.interleave}, chunk {self.options.chunk_limit or 'none'}"
        how += "" if self.options.prefix_caching else ", no cache"
        how += str(self.spread)
        verdict = "equal" if self.right else "DIFFERENT"
        return f"{self.model:17} {self.mesh:20} {how:70} {verdict}, warm hits {list(self.hits)}, {self.seconds:.0f} s"


def prompts() -> list[list[int]]:
    """Four prompts of 9 to 160 tokens, below the special ones."""
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 500, 100)
    return [[*stem[:shared].tolist(), *rng.integers(0, 500, own).tolist()] for shared, own in
            ((0, 9), (60, 5), (100, 30), (100, 60))]  # fmt: skip


def variants(mesh: str) -> Iterator[tuple[Spread, CacheOptions]]:
    """Cold and warm; in chunks, with the widest interleave of a block of one row a rank or more; without a cache."""
    sizes = MeshSpec.parse(mesh)
    chunks = dataclasses.replace(PLAIN, chunk_limit=48, interleave=16 // sizes.dcp if sizes.dcp > 1 else 1)
    for experts in ("tensor", "mesh") if sizes.data > 1 else ("tensor",):
        for options in (PLAIN, chunks, dataclasses.replace(PLAIN, prefix_caching=False)):
            yield Spread(experts), options
        for kda, residual in OTHERS if sizes.tensor > 1 else ():
            yield Spread(experts, kda, residual), PLAIN


def run(folder: Path, model: str, mesh: str, spread: Spread, options: CacheOptions, expected: list[list[int]]) -> Case:
    """Both runs of one engine, against the expected answers."""
    begin = time.perf_counter()
    engine = Engine.from_checkpoint(folder, mesh=mesh, cache=options, **dataclasses.asdict(spread))
    cold, warm = engine.generate(prompts(), GREEDY), engine.generate(prompts(), GREEDY)
    equal = tuple([r.tokens for r in results] == expected for results in (cold, warm))
    hits, seconds = tuple(r.hit for r in warm), time.perf_counter() - begin
    return Case(model, mesh, spread, options, equal, hits, not engine.check(), seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=TINY)
    parser.add_argument("--mesh", action="append", help=f"of {', '.join(MESHES)}, or another")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cases = []
    for model in options.model or TINY:
        with tempfile.TemporaryDirectory() as folder:
            print(make_tiny(folder, model, options.seed).partition(": ")[2], flush=True)
            plain = Engine.from_checkpoint(folder, cache=dataclasses.replace(PLAIN, prefix_caching=False))
            expected = [result.tokens for result in plain.generate(prompts(), GREEDY)]
            for mesh in options.mesh or MESHES:
                for spread, variant in variants(mesh):
                    cases.append(run(Path(folder), model, mesh, spread, variant, expected))
                    print(cases[-1].line(), flush=True)
                # A program on the CPU takes a thousand memory maps; Linux allows a process 65,530.
                jax.clear_caches()
                gc.collect()
    if options.json:
        records = [dataclasses.asdict(case) | {"right": case.right} for case in cases]
        Path(options.json).write_text(json.dumps(records, indent=2) + "\n")
    wrong = sum(not case.right for case in cases)
    print(f"{len(cases)} cases, {wrong} different")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
