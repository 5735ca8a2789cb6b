"""Tensors of a folder of safetensors files, read by position and never mapped into memory.

Mapped pages would count as memory of the process for as long as a file is open; what is read here lies in arrays that
are dropped with the piece they were read for.
"""

import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from hybrid_kv.errors import UserError
from hybrid_kv.models.sources import Index, Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# As the files name them; narrower floats would need scales.
FLOATING = {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
DTYPES = {name: np.dtype(dtype) for name, dtype in {**FLOATING, "U8": np.uint8, "I32": np.int32}.items()}


class Stored(NamedTuple):
    """Where a tensor lies: file by number, first byte, and its type as the file names it."""

    file: int
    begin: int
    shape: Shape
    dtype: str


class TensorFiles:
    """Open files of a checkpoint, by tensor name.

    Args:
      files: paths; they are open until `stack` is closed.
      prefixes: what names that begin so begin with here, or None to pass such tensors over.

    Raises:
      UserError: a file is unreadable or truncated, or a name stands twice.
    """

    def __init__(
        self, files: Sequence[Path], stack: ExitStack, prefixes: Mapping[str, str | None] = MappingProxyType({})
    ) -> None:
        self.files = tuple(files)
        self._handles: list[int] = []
        self.tensors: dict[str, Stored] = {}
        for number, file in enumerate(self.files):
            try:
                with safe_open(file, "np"):  # checks the header and that the file is as long as it says
                    pass
                handle = os.open(file, os.O_RDONLY)
                stack.callback(os.close, handle)
                length = int.from_bytes(os.pread(handle, 8, 0), "little")
                header = json.loads(_pread(handle, length, 8).tobytes())
            except (SafetensorError, OSError, ValueError, EOFError) as error:
                raise UserError("checkpoint", str(file), f"the file is unreadable or truncated ({error})") from error
            self._handles.append(handle)
            header.pop("__metadata__", None)
            for stored, entry in header.items():
                prefix = next((p for p in prefixes if stored.startswith(p)), "")
                if (published := prefixes.get(prefix, "")) is not None:
                    begin = 8 + length + entry["data_offsets"][0]
                    name = published + stored.removeprefix(prefix)
                    if (other := self.tensors.get(name)) is not None:
                        fix = f"{stored} stands twice, also in {self.files[other.file].name}; remove one of them"
                        raise UserError("checkpoint", str(file), fix)
                    self.tensors[name] = Stored(number, begin, tuple(entry["shape"]), entry["dtype"])

    def largest(self) -> int:
        """Bytes of the largest file."""
        return max(os.fstat(handle).st_size for handle in self._handles)

    def fingerprint(self) -> list[list]:
        """Name, bytes and time of change (ns) of every file."""
        stats = [(file.name, os.fstat(handle)) for file, handle in zip(self.files, self._handles, strict=True)]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]

    def position(self, name: str) -> tuple[int, int]:
        """File and first byte, in the order of which reading is sequential."""
        return self.tensors[name].file, self.tensors[name].begin

    def rows(self, name: str, begin: int, end: int) -> np.ndarray:
        """Entries `begin` to `end` of the first axis.

        Raises:
          UserError: the file cannot be read, or has become shorter.
        """
        stored = self.tensors[name]
        dtype = DTYPES[stored.dtype]
        row = int(np.prod(stored.shape[1:])) * dtype.itemsize
        try:
            data = _pread(self._handles[stored.file], (end - begin) * row, stored.begin + begin * row)
        except (OSError, EOFError) as error:
            raise UserError("checkpoint", name, f"the tensor cannot be read ({error})") from error
        return data.view(dtype).reshape(end - begin, *stored.shape[1:])

    def whole(self, name: str) -> np.ndarray:
        """All of a tensor. Raises as `rows` does."""
        shape = self.tensors[name].shape
        return self.rows(name, 0, shape[0])


class PieceReader:
    """`sources.Read` for one piece: rows that several devices take columns of are read once."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self._made: dict[Hashable, Any] = {}

    def __call__(self, name: str, index: Index) -> np.ndarray:
        every = (slice(None),)
        begin, end, _ = (index or every)[0].indices(self._files.tensors[name].shape[0])
        rows = self.once((name, begin, end), lambda: self._files.rows(name, begin, end))
        return rows[every + index[1:]]

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def checkpoint_files(path: Path) -> list[Path]:
    """Files of the checkpoint in a folder: those of the index, else the single one.

    Raises:
      UserError: the index is broken, or a file is missing.
    """
    if (path / INDEX).exists():
        index = read_json(path / INDEX, "the index must be readable")
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError("checkpoint", str(path / INDEX), "weight_map must be an object of tensor and file names")
        files = [path / name for name in sorted(set(weight_map.values()))]
    else:
        files = [path / SINGLE]
    for file in files:
        if not os.path.isfile(file):  # unlike the method, false for a name the system does not take
            raise UserError("checkpoint", str(file), f"no such file; expected {SINGLE} or all files of {INDEX}")
    return files


def read_json(file: Path, fix: str, field: str = "checkpoint") -> dict:
    """The JSON object in a file. Raises UserError with `field` and `fix` if there is none."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(field, str(file), f"{fix} ({error})") from error
    if not isinstance(content, dict):
        raise UserError(field, str(file), fix)
    return content


def _pread(handle: int, length: int, offset: int) -> np.ndarray:
    """So many bytes from there; the system gives at most 2 GiB at once."""
    data = np.empty(length, np.uint8)
    view, done = data.data, 0
    while done < length:
        count = os.preadv(handle, [view[done:]], offset + done)
        if not count:
            raise EOFError(f"{length - done} bytes are missing at the end of the file")
        done += count
    return data
