"""A folder of pieces as they lie on the devices, so that a load that was cut short goes on where it was.

One safetensors file per piece, under its name only when all of it is on the disk, and `manifest.json`, which says what
the pieces were made of and for.
"""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from hybrid_kv.errors import UserError
from hybrid_kv.models.pieces import Box, Piece, Target
from hybrid_kv.models.tensor_files import DTYPES, TensorFiles, read_json

MANIFEST = "manifest.json"
_FORMAT = 1


class LoadCache:
    """Finished pieces of one load.

    Args:
      folder: made if absent.
      made_of: all that the pieces depend on, as JSON; a folder that was made of anything else is refused.

    Raises:
      UserError: the folder cannot be written, its manifest is broken, or a field of it differs (the field is named).
    """

    def __init__(self, folder: Path, made_of: Mapping[str, Any]) -> None:
        self._folder = folder
        wanted = json.loads(json.dumps({"format": _FORMAT, **made_of}))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / MANIFEST).exists():
                part = folder / f"{MANIFEST}.part"
                if {*folder.iterdir()} - {part}:
                    raise UserError("cache", str(folder), f"it has files but no {MANIFEST}; give an empty folder")
                part.write_text(json.dumps(wanted, indent=1) + "\n")
                self._publish(part, MANIFEST)
        except OSError as error:
            raise UserError("cache", str(folder), f"give a folder that can be written ({error})") from error
        found = _flat(read_json(folder / MANIFEST, "the manifest must be readable; remove the folder", "cache"))
        for field, value in _flat(wanted).items():
            if found.get(field) != value:
                raise UserError(
                    f"cache {field}", found.get(field),
                    f"{folder} was made for another load, this one has {value!r}; give another folder or remove it",
                )  # fmt: skip

    def read(self, piece: Piece, table: Mapping[str, Target]) -> dict[str, dict[Box, np.ndarray]] | None:
        """Values by parameter and box, or None if the piece is not finished.

        Raises:
          UserError: its file is damaged.
        """
        file = self._file(piece)
        if not file.exists():
            return None
        with ExitStack() as stack:
            try:
                files = TensorFiles([file], stack)
            except UserError as error:
                raise UserError("cache", str(file), f"the piece is damaged: {error.fix}; remove it") from error
            values: dict[str, dict[Box, np.ndarray]] = {}
            for name in piece.names:
                values[name] = {}
                for box in piece.boxes(table[name]):
                    stored = files.tensors.get(key := _key(name, box))
                    if (
                        stored is None
                        or stored.shape != tuple(end - begin for begin, end in box)
                        or DTYPES.get(stored.dtype) != table[name].dtype
                    ):
                        raise UserError("cache", str(file), f"the file has no {key} of its shape and type; remove it")
                    values[name][box] = files.whole(key)
            return values

    def write(self, piece: Piece, values: Mapping[str, Mapping[Box, np.ndarray]]) -> None:
        """Keep a piece; when this returns, it outlives the process and the machine. Raises UserError if it cannot."""
        tensors = {_key(name, box): value for name, boxes in values.items() for box, value in boxes.items()}
        file = self._file(piece)
        part = file.with_suffix(".part")
        try:
            save_file(tensors, part)
            self._publish(part, file.name)
        except (OSError, SafetensorError) as error:  # the latter for a full disk
            raise UserError("cache", str(file), f"the piece cannot be written ({error})") from error

    def _file(self, piece: Piece) -> Path:
        return self._folder / f"{piece.label}.safetensors"

    def _publish(self, part: Path, name: str) -> None:
        """Give a written file its name, the contents being on the disk before it and the name after."""
        _sync(part)
        os.replace(part, self._folder / name)
        _sync(self._folder)


def _key(name: str, box: Box) -> str:
    return f"{name}@{','.join(str(begin) for begin, _ in box)}"


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields, those of an object one by one as `object.field`."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
