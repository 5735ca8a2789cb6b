"""What of the parameters is on the host at once: pieces, cut so that each is of a bounded size.

A piece is the same box of the local part of every device, so that placing it is one program over the mesh. Parameters
that are made from the same tensors are cut alike and share pieces.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from hybrid_kv.models.parameters import Parameter
from hybrid_kv.models.sources import Index, Shape, Source, origin

# (begin, end) on every axis of a parameter: slices are not hashable in Python 3.11.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Target:
    """One parameter as it is placed.

    Attributes:
      shape: global shape.
      dtype: as placed.
      sharding: over the mesh.
      source: where its values are.
    """

    shape: Shape
    dtype: np.dtype
    sharding: NamedSharding
    source: Source

    @property
    def local(self) -> Shape:
        """Shape of the part of one device."""
        return self.sharding.shard_shape(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, counted once however often it is replicated."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def placed(self) -> int:
        """Bytes on all devices together."""
        return math.prod(self.local) * self.dtype.itemsize * self.sharding.num_devices


@dataclass(frozen=True)
class Piece:
    """A box of the local part of every device, for all parameters made from the same tensors.

    Attributes:
      names: of the parameters.
      start, size: of the box on the leading axes, in entries of one device; other axes are whole.
      whole: the box is all there is.
      nbytes: of the piece, without replicas.
    """

    names: tuple[str, ...]
    start: Shape
    size: Shape
    whole: bool
    nbytes: int

    @property
    def label(self) -> str:
        """Unique name, fit for a file."""
        return "-".join([self.names[0], *map(str, self.start)])

    def boxes(self, target: Target) -> dict[Box, list[jax.Device]]:
        """What the devices of this process hold of the piece, each box once."""
        found: dict[Box, list[jax.Device]] = {}
        for device, index in target.sharding.devices_indices_map(target.shape).items():
            if device in target.sharding.addressable_devices:
                found.setdefault(self._box(target, index), []).append(device)
        return found

    def first(self, target: Target) -> str:
        """The first tensor that the piece is read from."""
        index = next(iter(target.sharding.devices_indices_map(target.shape).values()))
        return next(target.source.needs(slices(self._box(target, index))))

    def _box(self, target: Target, index: Index) -> Box:
        bounds = [s.indices(n)[:2] for s, n in zip(index, target.shape, strict=True)]
        inside = [(at, at + n) for at, n in zip(self.start, self.size, strict=True)]
        cut = [(begin + low, begin + high) for (begin, _), (low, high) in zip(bounds, inside, strict=False)]
        return (*cut, *bounds[len(cut) :])


def slices(box: Box) -> Index:
    return tuple(slice(*bounds) for bounds in box)


def targets(table: Mapping[str, Parameter], mesh: Mesh, dtype: DTypeLike) -> dict[str, Target]:
    """The inventory as it is placed on a mesh, parameters without a dtype of their own as `dtype`."""
    return {
        name: Target(entry.shape, np.dtype(entry.dtype or dtype), NamedSharding(mesh, entry.spec), entry.source)
        for name, entry in table.items()
    }


def cut(table: Mapping[str, Target], limit: int) -> list[Piece]:
    """Pieces of at most `limit` bytes on all devices, or as small as they can be cut; all of a parameter alike."""
    together: dict[Source, list[str]] = {}
    for name, target in table.items():
        together.setdefault(origin(target.source), []).append(name)
    return [piece for names in together.values() for piece in _cut([(name, table[name]) for name in names], limit)]


def _cut(members: list[tuple[str, Target]], limit: int) -> list[Piece]:
    _, first = members[0]
    lengths = first.local[: first.source.cuts]
    wanted = -(-sum(target.placed for _, target in members) // limit)
    size = []
    for length in lengths:
        # Equal pieces have one program.
        parts = next(n for n in range(1, length + 1) if length % n == 0 and (n >= wanted or n == length))
        size.append(length // parts)
        wanted = -(-wanted // parts)
    starts = list(itertools.product(*(range(0, length, n) for length, n in zip(lengths, size, strict=True))))
    nbytes = sum(target.nbytes for _, target in members) // len(starts)
    names = tuple(name for name, _ in members)
    return [Piece(names, start, tuple(size), len(starts) == 1, nbytes) for start in starts]
