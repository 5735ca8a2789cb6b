"""Loads a synthetic sharded checkpoint onto stand-in devices and measures the memory of the host.

python -m hybrid_kv.models.load_soak [--gigabytes 2] [--files 8] [--devices 8] [--json]

Writes a Kimi Linear of the wanted size in bf16, layer by layer into files of equal size, and loads it in a fresh
process. The devices are the host's own memory, so what the loader needs is the peak of the process less what the
process had before and less the weights; it has to be at most two files. Linux only. Exit code 1 if it is more.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from hybrid_kv.errors import UserError
from hybrid_kv.models.axes import DATA, DCP, MODEL
from hybrid_kv.models.checkpoint_io import load, load_config
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.parameters import inventory
from hybrid_kv.models.sources import Shape
from hybrid_kv.models.tensor_files import INDEX

_LAYERS, _WIDTH = 8, 1024
_NUMBERS = re.compile(r"\d+")


def soak_config(nbytes: int) -> dict:
    """config.json of a Kimi Linear of about so many bytes in bf16, experts making up the size as they do at full size.

    Below half a gigabyte widths are a quarter, so that there are still several layers of several experts.
    """
    width = _WIDTH if nbytes > 1 << 29 else _WIDTH // 4
    config = {
        "model_type": "kimi_linear", "vocab_size": 8 * width, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": _LAYERS, "num_attention_heads": 8, "kv_lora_rank": width // 2,
        "qk_nope_head_dim": width // 8, "qk_rope_head_dim": width // 16, "v_head_dim": width // 8, "num_experts": 8,
        "num_experts_per_token": 8, "moe_intermediate_size": width // 2, "first_k_dense_replace": 1,
        "linear_attn_config": {
            "num_heads": 8, "head_dim": width // 8, "short_conv_kernel_size": 4,
            "full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7],
        },
    }  # fmt: skip
    rest = nbytes - sum(_nbytes(shape) for name, shape in _shapes(config).items() if ".experts." not in name)
    expert = 3 * 2 * width * (width // 2) * (_LAYERS - 1)
    return config | {"num_experts": max(1, round(rest / expert / 8)) * 8}


def write(folder: Path, config: dict, files: int) -> None:
    """The checkpoint, in the order of layers and one file after the other. Values repeat after some millions."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # Bits without the highest one of the exponent: finite numbers below 2.
    noise = np.random.default_rng(0).integers(0, 1 << 16, 1 << 23, np.uint16) & np.uint16(0xBFFF)
    names: dict[str, str] = {}
    for number, group in enumerate(_groups(_shapes(config), files), 1):
        file = f"model-{number:05}-of-{files:05}.safetensors"
        save_file({name: _values(noise, len(names) + i, shape) for i, (name, shape) in enumerate(group.items())},
                  folder / file)  # fmt: skip
        names |= dict.fromkeys(group, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _values(noise: np.ndarray, seed: int, shape: Shape) -> np.ndarray:
    """A tensor of noise, another one for another seed as long as it is small."""
    size = math.prod(shape)
    if size > len(noise):
        return np.resize(noise, shape).view(bfloat16)
    begin = seed * 4099 % (len(noise) - size + 1)
    return noise[begin : begin + size].reshape(shape).view(bfloat16)


def measure(folder: Path) -> dict[str, int | float]:
    """Loads onto all devices of this process; bytes and seconds."""
    config = load_config(folder)
    mesh = Mesh(np.array(jax.devices()).reshape(1, -1, 1), (DATA, MODEL, DCP))
    jax.block_until_ready(jax.jit(jnp.zeros, static_argnums=0)(8))  # the compiler's own memory is none of the loader's
    before = _status("VmRSS")
    begin = time.perf_counter()
    params = load(folder, config, mesh)
    seconds = time.perf_counter() - begin
    weights = sum(shard.data.nbytes for x in params.values() for shard in x.addressable_shards)
    peak = _status("VmHWM")
    return {
        "peak_bytes": peak, "before_bytes": before, "weights_bytes": weights, "above_bytes": peak - before - weights,
        "shard_bytes": max(file.stat().st_size for file in folder.glob("*.safetensors")), "seconds": seconds,
    }  # fmt: skip


def soak(nbytes: int, files: int, devices: int) -> dict[str, int | float]:
    """Writes, loads in another process, and gives what `measure` does and `shards`, memory above the weights in files.

    Raises:
      UserError: too little to fill the files, or the load failed.
    """
    if nbytes < 32 << 20:
        raise UserError("gigabytes", nbytes / 1e9, "use at least 0.034")
    for field, value in (("files", files), ("devices", devices)):
        if value not in (1, 2, 4, 8):
            raise UserError(field, value, "use 1, 2, 4 or 8")
    with tempfile.TemporaryDirectory(prefix="load-soak-") as name:
        write(Path(name), soak_config(nbytes), files)
        flags = f"--xla_force_host_platform_device_count={devices}"
        run = subprocess.run(
            [sys.executable, "-m", "hybrid_kv.models.load_soak", "--measure", name],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if run.returncode:
        raise UserError("load", run.returncode, f"the loading process failed: {run.stderr.strip()[-2000:]}")
    result = json.loads(run.stdout)
    return result | {"shards": result["above_bytes"] / result["shard_bytes"], "files": files, "devices": devices}


def _shapes(config: dict) -> dict[str, Shape]:
    table = inventory(KimiLinearConfig.from_dict(config))
    return {name: shape for entry in table.values() for name, shape in entry.source.tensors().items()}


def _nbytes(shape: Shape) -> int:
    return 2 * math.prod(shape)


def _groups(shapes: dict[str, Shape], files: int) -> Iterator[dict[str, Shape]]:
    """Tensors of each file, in the order of the numbers in their names."""
    ordered = sorted(shapes, key=lambda name: ([int(x) for x in _NUMBERS.findall(name)], name))
    total, done, group = sum(map(_nbytes, shapes.values())), 0, {}
    number = 1
    for name in ordered:
        group[name] = shapes[name]
        done += _nbytes(shapes[name])
        if done * files >= total * number:
            yield group
            group, number = {}, number + 1


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if the memory is more than two files, 2 for what a user can put right."""
    parser = argparse.ArgumentParser(description="Host memory of a load above its weights.")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the checkpoint (default: 2)")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--devices", type=int, default=8, help="stand-ins on the CPU (default: 8)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # the process that loads
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    try:
        result = soak(int(options.gigabytes * 1e9), options.files, options.devices)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        mb = {name: round(value / 1e6) for name, value in result.items() if name.endswith("_bytes")}
        print(
            f"{mb['weights_bytes']} MB of weights in {result['seconds']:.1f} s; peak {mb['peak_bytes']} MB, "
            f"{mb['above_bytes']} MB above the weights and the {mb['before_bytes']} MB before: "
            f"{result['shards']:.2f} files of {mb['shard_bytes']} MB (at most 2)"
        )
    return int(result["shards"] > 2)


if __name__ == "__main__":
    sys.exit(main())
