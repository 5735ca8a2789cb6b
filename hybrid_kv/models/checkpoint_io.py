"""Reading a checkpoint of the Kimi family straight into shards on a mesh, and writing random ones for tests.

Safetensors, one file or several with an index. Everything about the tensors is checked before any is read, save that
the vision parts around a text model are passed over. Values go to the devices in pieces (`pieces`, `placement`), so
that the host holds little beside what it places.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from hybrid_kv.errors import UserError
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.load_cache import LoadCache
from hybrid_kv.models.parameters import Parameter, check_mesh, inventory
from hybrid_kv.models.pieces import Box, Piece, Target, cut, slices, targets
from hybrid_kv.models.placement import Placement
from hybrid_kv.models.progress import Report, reporting
from hybrid_kv.models.sources import PACKED, SCALE, HeadVector, Shape, Source, Stack
from hybrid_kv.models.tensor_files import FLOATING, INDEX, SINGLE, PieceReader, TensorFiles, checkpoint_files, read_json
from hybrid_kv.models.wrapper import SKIPPED_PREFIXES
from hybrid_kv.typing import Array
from pallas_kernels.experts.mxfp4 import pack

_MIB = 1 << 20


def load_config(path: str | Path) -> KimiLinearConfig:
    """Configuration from `path`/config.json. Raises UserError if it is missing, broken or unsupported."""
    raw = read_json(Path(path) / "config.json", "give the directory of a checkpoint with a config.json")
    return KimiLinearConfig.from_dict(raw)


def load(
    path: str | Path,
    config: KimiLinearConfig,
    mesh: Mesh,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: Report | None = None,
    piece_bytes: int | None = None,
) -> dict[str, Array]:
    """Parameters by path (`parameters.inventory`), each placed with its own sharding on `mesh`.

    Args:
      path: directory of the checkpoint.
      mesh: axes data, model, dcp.
      dtype: activation and weight dtype; gates, convolution and router stay fp32.
      cache: folder, one for each process, that keeps every piece in its device form as soon as it is made. The same
        load with the same folder takes finished pieces from there and reads the checkpoint for the others only.
      progress: called as progress(done, total) in bytes of the parameters, after every piece; None shows a bar if
        stderr is a terminal.
      piece_bytes: size that pieces are cut to, over all devices; a few of them are on the host at once. The matrix of
        an expert, and one layer of another parameter, are not cut. By default a sixteenth of the largest file, between
        4 and 256 MiB.

    Raises:
      UserError: files missing, unreadable or truncated; tensors missing, extra, of a wrong shape or type, all of them
        listed; a mesh that does not divide the model; a cache that was made for another load.
    """
    check_mesh(config, mesh.shape)
    if piece_bytes is not None and piece_bytes < 1:
        raise UserError("piece_bytes", piece_bytes, "use at least 1")
    inventoried = inventory(config)
    with ExitStack() as stack:
        files = TensorFiles(checkpoint_files(Path(path)), stack, _prefixes(config))
        _check_tensors(inventoried, files, path)
        limit = piece_bytes or min(max(files.largest() // 16, 4 * _MIB), 256 * _MIB)
        table = targets(inventoried, mesh, dtype)
        kept = LoadCache(Path(cache), _made_of(files, config, mesh, dtype, limit)) if cache is not None else None
        placement = Placement(table)
        report = stack.enter_context(reporting(progress, "weights"))
        done, total = 0, sum(target.nbytes for target in table.values())
        report(done, total)
        # As the files lie, and the same on every process, since all of them run each program of the placement.
        for piece in sorted(cut(table, limit), key=lambda p: files.position(p.first(table[p.names[0]]))):
            placement.put(piece, _values(piece, table, files, kept))
            done += piece.nbytes
            report(done, total)
        placement.wait()
        return {name: placement.arrays[name] for name in table}


def _values(
    piece: Piece, table: Mapping[str, Target], files: TensorFiles, kept: LoadCache | None
) -> dict[str, dict[Box, np.ndarray]]:
    """Values of a piece from the cache, else from the checkpoint and into the cache."""
    if kept is None:
        return _read(piece, table, files)
    if (values := kept.read(piece, table)) is None:
        values = _read(piece, table, files)
        kept.write(piece, values)
    return values


def _read(piece: Piece, table: Mapping[str, Target], files: TensorFiles) -> dict[str, dict[Box, np.ndarray]]:
    """Values of a piece by parameter and box, in their device form."""
    reader = PieceReader(files)

    def values(target: Target, box: Box) -> np.ndarray:
        return np.ascontiguousarray(target.source.read(reader, slices(box)).astype(target.dtype, copy=False))

    return {name: {box: values(table[name], box) for box in piece.boxes(table[name])} for name in piece.names}


def _made_of(files: TensorFiles, config: KimiLinearConfig, mesh: Mesh, dtype: DTypeLike, limit: int) -> dict:
    """All that the values and boxes of pieces depend on."""
    return {
        "files": files.fingerprint(),
        "config": dataclasses.asdict(config),
        "mesh": dict(mesh.shape),
        "dtype": np.dtype(dtype).name,
        "piece_bytes": limit,
        "process": f"{jax.process_index()} of {jax.process_count()}",
    }


def _prefixes(config: KimiLinearConfig) -> dict[str, str | None]:
    """Beginnings of names that are published otherwise, or passed over.

    transformers saves dense layers under `block_sparse_moe.` too.
    """
    skipped: dict[str, str | None] = dict.fromkeys(SKIPPED_PREFIXES if config.tensor_prefix else ())
    layers = [f"{config.tensor_prefix}model.layers.{i}." for i in config.dense_layers]
    return skipped | {f"{layer}block_sparse_moe.": f"{layer}mlp." for layer in layers}


def _check_tensors(table: Mapping[str, Parameter], files: TensorFiles, path: str | Path) -> None:
    """All and only the tensors of the inventory, each of its shape, packed ones bytes and others floating point."""
    wanted = {name: shape for entry in table.values() for name, shape in entry.source.tensors().items()}
    missing, extra = sorted(wanted.keys() - files.tensors.keys()), sorted(files.tensors.keys() - wanted.keys())
    padded = {v.name: v for entry in table.values() for v in _vectors(entry.source)}
    wrong = []
    for name, shape in wanted.items():
        if (stored := files.tensors.get(name)) is None:
            continue
        if stored.shape != shape and not (name in padded and padded[name].accepts(stored.shape)):
            wrong.append(UserError(name, list(stored.shape), f"the configuration asks for shape {list(shape)}"))
        if name.endswith((PACKED, SCALE)):
            if stored.dtype != "U8":
                wrong.append(UserError(name, stored.dtype, "codes and scales of packed weights must be bytes, U8"))
        elif stored.dtype not in FLOATING:
            fix = f"weights must be floating point, one of {', '.join(FLOATING)}"
            wrong.append(UserError(name, stored.dtype, fix))
    if len(wrong) == 1 and not missing and not extra:
        raise wrong[0]
    if missing or extra or wrong:
        raise UserError(
            "checkpoint", str(path),
            f"the configuration asks for other tensors; missing: {missing or 'none'}; extra: {extra or 'none'}; "
            f"of a wrong shape or type: {[str(error) for error in wrong] or 'none'}",
        )  # fmt: skip


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
        save_file(tensors, path / SINGLE)
        return parsed
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        save_file({name: x for name, x in tensors.items() if weight_map[name] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n")
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
