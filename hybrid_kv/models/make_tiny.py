"""Writes a checkpoint of random weights: a model with a name, in its published layout, the same for the same seed.

python -m hybrid_kv.models.make_tiny DIR [--model tiny-k3] [--seed 0] [--shards 1]

config.json and safetensors, with an index if there are several files. K3 comes in its wrapper, with the tensor names of
the published files and experts packed in MXFP4. Full-size names would not fit a disk and are refused.
"""

import argparse
import math
import sys
from pathlib import Path

from hybrid_kv.errors import UserError
from hybrid_kv.models.checkpoint_io import random_checkpoint
from hybrid_kv.models.parameters import inventory
from hybrid_kv.models.published import NAMES, named

TINY = tuple(name for name in NAMES if name.startswith("tiny-"))


def make_tiny(path: str | Path, model: str, seed: int, shards: int = 1) -> str:
    """Writes the checkpoint and says in one line what it is.

    Raises:
      UserError: no such tiny model, a negative seed, fewer than one file, or a folder that cannot be written.
    """
    if model not in TINY:
        raise UserError("model", model, f"use one of: {', '.join(TINY)}")
    if seed < 0:
        raise UserError("seed", seed, "use 0 or more")
    if shards < 1:
        raise UserError("shards", shards, "use at least 1")
    try:
        config = random_checkpoint(path, named(model), seed, shards)
    except OSError as error:
        raise UserError("path", str(path), f"give a folder that can be written ({error})") from error
    table = inventory(config).values()
    tensors = sum(len(entry.source.tensors()) for entry in table)
    size = sum(math.prod(entry.shape) for entry in table)
    return f"{path}: {model}, seed {seed}, {config.layers} layers, {tensors} tensors, {size:,} parameters"


def main(arguments: list[str] | None = None) -> int:
    """The command; 2 for what a user can put right."""
    parser = argparse.ArgumentParser(description="Writes a tiny checkpoint of random weights in the published layout.")
    parser.add_argument("path", metavar="DIR", help="made if absent; files of the same names are replaced")
    parser.add_argument("--model", default="tiny-k3", help=f"{' or '.join(TINY)} (default: tiny-k3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1, help="number of files (default: 1)")
    options = parser.parse_args(arguments)
    try:
        print(make_tiny(options.path, options.model, options.seed, options.shards))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
