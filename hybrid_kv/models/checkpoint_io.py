"""Reading a checkpoint of the Kimi family straight into shards on a mesh, and writing random ones for tests.

Safetensors, one file or several with an index. Names are checked strictly, save that the vision parts around a
text model are passed over; every device reads only its own part of each tensor.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hybrid_kv.errors import UserError
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.parameters import Parameter, check_mesh, inventory
from hybrid_kv.models.sources import PACKED, SCALE, HeadVector, Shape, Source, Stack
from hybrid_kv.models.wrapper import SKIPPED_PREFIXES
from hybrid_kv.typing import Array
from pallas_kernels.experts.mxfp4 import pack

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATING = ("BF16", "F16", "F32", "F64")  # as the files name them; narrower floats would need scales


def load_config(path: str | Path) -> KimiLinearConfig:
    """Configuration from `path`/config.json. Raises UserError if it is missing, broken or unsupported."""
    raw = _read_json(Path(path) / "config.json", "give the directory of a checkpoint with a config.json")
    return KimiLinearConfig.from_dict(raw)


def load(path: str | Path, config: KimiLinearConfig, mesh: Mesh, dtype: DTypeLike = jnp.bfloat16) -> dict[str, Array]:
    """Parameters by path (`parameters.inventory`), each placed with its own sharding on `mesh`.

    Args:
      path: directory of the checkpoint.
      mesh: axes data, model, dcp.
      dtype: activation and weight dtype; gates, convolution and router stay fp32.

    Raises:
      UserError: files missing, unreadable or truncated; tensors missing, extra, of a wrong shape or not of
        floating point; a mesh that does not divide the model.
    """
    check_mesh(config, mesh.shape)
    table = inventory(config)
    with ExitStack() as stack:
        files = _Files(Path(path), stack, config)
        _check_names(table, files)
        params = {
            name: jax.make_array_from_callback(
                entry.shape, NamedSharding(mesh, entry.spec),
                _part(entry, files, entry.dtype or dtype),
            )
            for name, entry in table.items()
        }  # fmt: skip
        # The files close when this block ends, so every read has to have happened by then.
        return jax.block_until_ready(params)


def _part(entry: Parameter, files: "_Files", dtype: DTypeLike) -> Callable[[Any], np.ndarray]:
    """Reader of one device's part of a parameter."""

    def part(index: tuple[slice, ...]) -> np.ndarray:
        bounded = tuple(slice(*s.indices(n)) for s, n in zip(index, entry.shape, strict=True))
        return entry.source.read(files.read, bounded).astype(dtype)

    return part


class _Files:
    """Open safetensors files of a checkpoint, by canonical tensor name."""

    def __init__(self, path: Path, stack: ExitStack, config: KimiLinearConfig) -> None:
        self.path = path
        self._where: dict[str, tuple[Any, str]] = {}
        for file in _files(path):
            try:
                handle = stack.enter_context(safe_open(file, "np"))
                names = handle.keys()
            except (SafetensorError, OSError) as error:
                raise UserError("checkpoint", str(file), f"the file is unreadable or truncated ({error})") from error
            skipped = SKIPPED_PREFIXES if config.tensor_prefix else ()
            self._where |= {_canonical(name, config): (handle, name) for name in names if not name.startswith(skipped)}

    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> Shape:
        handle, stored = self._where[name]
        return tuple(handle.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        handle, stored = self._where[name]
        return handle.get_slice(stored).get_dtype()

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        handle, stored = self._where[name]
        try:
            return np.asarray(handle.get_slice(stored)[index] if index else handle.get_tensor(stored))
        except (SafetensorError, OSError) as error:
            raise UserError("checkpoint", stored, f"the tensor cannot be read ({error})") from error


def _files(path: Path) -> list[Path]:
    """Files of the checkpoint: those of the index, else the single one."""
    if (path / _INDEX).exists():
        index = _read_json(path / _INDEX, "the index must be readable")
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError("checkpoint", str(path / _INDEX), "weight_map must be an object of tensor and file names")
        files = [path / name for name in sorted(set(weight_map.values()))]
    else:
        files = [path / _SINGLE]
    for file in files:
        if not os.path.isfile(file):  # unlike the method, false for a name the system does not take
            raise UserError("checkpoint", str(file), f"no such file; expected {_SINGLE} or all files of {_INDEX}")
    return files


def _read_json(file: Path, fix: str) -> dict:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("checkpoint", str(file), f"{fix} ({error})") from error
    if not isinstance(content, dict):
        raise UserError("checkpoint", str(file), fix)
    return content


def _canonical(name: str, config: KimiLinearConfig) -> str:
    """Published name of a tensor: transformers saves dense layers under `block_sparse_moe.` too."""
    for layer in config.dense_layers:
        prefix = f"{config.tensor_prefix}model.layers.{layer}."
        if name.startswith(prefix + "block_sparse_moe."):
            return f"{prefix}mlp." + name.removeprefix(prefix + "block_sparse_moe.")
    return name


def _check_names(table: Mapping, files: _Files) -> None:
    """All and only the tensors of the inventory, each of its shape, packed ones bytes and others floating point."""
    wanted = {name: shape for entry in table.values() for name, shape in entry.source.tensors().items()}
    missing, extra = sorted(wanted.keys() - files.names()), sorted(files.names() - wanted.keys())
    if missing or extra:
        raise UserError(
            "checkpoint", str(files.path),
            f"the configuration asks for other tensors; missing: {missing or 'none'}; extra: {extra or 'none'}",
        )  # fmt: skip
    padded = {v.name: v for entry in table.values() for v in _vectors(entry.source)}
    for name, shape in wanted.items():
        got = files.shape(name)
        if got != shape and not (name in padded and padded[name].accepts(got)):
            raise UserError(name, list(got), f"the configuration asks for shape {list(shape)}")
        dtype = files.dtype(name)
        if name.endswith((PACKED, SCALE)):
            if dtype != "U8":
                raise UserError(name, dtype, "codes and scales of packed weights must be bytes, U8")
        elif dtype not in _FLOATING:
            raise UserError(name, dtype, f"weights must be floating point, one of {', '.join(_FLOATING)}")


def _vectors(source: Source) -> list[HeadVector]:
    if isinstance(source, Stack):
        return [v for part in source.parts for v in _vectors(part)]
    return [source] if isinstance(source, HeadVector) else []


def random_checkpoint(path: str | Path, config: Mapping, seed: int, shards: int = 1) -> KimiLinearConfig:
    """Write a checkpoint of random weights in the published layout; for tests and trials.

    Weights are fp32, and codes and scales where the configuration says that experts are packed.

    Args:
      path: directory, made if absent.
      config: a config.json dictionary; written beside the weights.
      shards: number of files; more than one come with an index.
    """
    path = Path(path)
    parsed = KimiLinearConfig.from_dict(config)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    rng = np.random.default_rng(seed)
    shapes = {n: s for entry in inventory(parsed).values() for n, s in entry.source.tensors().items()}
    tensors: dict[str, np.ndarray] = {}
    for name, shape in sorted(shapes.items()):
        if name.endswith(PACKED):
            codes = _random_tensor(rng, name, (*shape[:-1], 2 * shape[-1]), parsed)
            tensors[name], tensors[name.removesuffix(PACKED) + SCALE] = pack(codes)
        elif not name.endswith(SCALE):
            tensors[name] = _random_tensor(rng, name, shape, parsed)
    if shards == 1:
        save_file(tensors, path / _SINGLE)
        return parsed
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        save_file({name: x for name, x in tensors.items() if weight_map[name] == file}, path / file)
    (path / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n")
    return parsed


def _random_tensor(rng: np.random.Generator, name: str, shape: Shape, config: KimiLinearConfig) -> np.ndarray:
    """Values of a size that keeps activations and gates lively."""
    x = rng.normal(size=shape).astype(np.float32)
    if name.endswith("A_log"):
        values = np.log(rng.uniform(0.5, 4.0, size=shape)).astype(np.float32)
        # Published as [1, 1, H, 1], and under a wrapper with a third as many zeros behind.
        return np.pad(values, (0, -(-shape[0] // 3))) if config.tensor_prefix else values.reshape(1, 1, -1, 1)
    if "norm" in name:
        return 1 + 0.1 * x
    if name.endswith(("dt_bias", "e_score_correction_bias")):
        return 0.1 * x
    return x * shape[-1] ** -0.5 if len(shape) > 1 else x
