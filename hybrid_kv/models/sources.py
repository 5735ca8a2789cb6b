"""Where the values of a parameter lie in a checkpoint, and how to read any part of it.

A source names its tensors with their expected shapes and reads the slice that one device needs, so
loading never holds a whole stack on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from pallas_kernels.experts.mxfp4 import GROUP, unpack_host
from pallas_kernels.experts.packed import pack

# read(name, slices): the given part of a checkpoint tensor.
Read = Callable[[str, tuple[slice, ...]], np.ndarray]
Shape = tuple[int, ...]

# Endings of a packed weight: codes, two a byte, and scales. Both are bytes, all other tensors are floating point.
PACKED, SCALE = ".weight_packed", ".weight_scale"


@runtime_checkable
class Source(Protocol):
    """Values of one parameter."""

    def tensors(self) -> dict[str, Shape]:
        """Checkpoint tensors and their shapes."""
        ...

    def read(self, read: Read, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` (a full-rank tuple of slices with bounds) of the parameter."""
        ...


@dataclass(frozen=True)
class Whole:
    """A parameter that is one checkpoint tensor."""

    name: str
    shape: Shape

    def tensors(self) -> dict[str, Shape]:
        return {self.name: self.shape}

    def read(self, read: Read, index: tuple[slice, ...]) -> np.ndarray:
        return read(self.name, index)


@dataclass(frozen=True)
class Stack:
    """Sources of equal shape stacked on a new first axis, that of the layers."""

    parts: tuple[Source, ...]

    def tensors(self) -> dict[str, Shape]:
        return {name: shape for part in self.parts for name, shape in part.tensors().items()}

    def read(self, read: Read, index: tuple[slice, ...]) -> np.ndarray:
        return np.stack([part.read(read, index[1:]) for part in self.parts[index[0]]])


@dataclass(frozen=True)
class HeadPacked:
    """q, k and v tensors [H * width, ...] packed as (head, {q, k, v}, width) on the first axis.

    The convolution's [H * width, 1, W] loses its middle axis. Parts begin and end at whole heads.
    """

    names: tuple[str, str, str]
    shape: Shape
    width: int

    def tensors(self) -> dict[str, Shape]:
        return dict.fromkeys(self.names, self.shape)

    def read(self, read: Read, index: tuple[slice, ...]) -> np.ndarray:
        packed, last = index
        begin, end = packed.start // 3, packed.stop // 3
        middle = (slice(0, 1),) * (len(self.shape) - 2)
        rows = [read(name, (slice(begin, end), *middle, last)) for name in self.names]
        heads = [r.reshape(-1, 1, self.width, r.shape[-1]) for r in rows]
        return np.concatenate(heads, axis=1).reshape(packed.stop - packed.start, -1)


@dataclass(frozen=True)
class HeadVector:
    """One value per head, stored as [H], [1, 1, H, 1] or padded at the end: the first H count."""

    name: str
    heads: int

    def tensors(self) -> dict[str, Shape]:
        return {self.name: (self.heads,)}

    def accepts(self, shape: Shape) -> bool:
        """One long axis of at least H entries."""
        return int(np.prod(shape)) == max(shape, default=0) >= self.heads

    def read(self, read: Read, index: tuple[slice, ...]) -> np.ndarray:
        return read(self.name, ()).reshape(-1)[: self.heads][index]


@dataclass(frozen=True)
class Experts:
    """One matrix [out, in] of every expert of several layers, stacked as [layers, experts, out, in].

    A full-size model has half a million of these tensors, so their names are made when they are asked for.

    Attributes:
      name: of a tensor without its ending, with `{layer}` and `{expert}` for the two numbers.
      packed: stored in MXFP4; read as bf16, which is exact.
    """

    name: str
    layers: tuple[int, ...]
    count: int
    shape: tuple[int, int]
    packed: bool = False

    def tensors(self) -> dict[str, Shape]:
        rows, columns = self.shape
        stored = (
            {PACKED: (rows, columns // 2), SCALE: (rows, columns // GROUP)} if self.packed else {".weight": self.shape}
        )
        return {
            self.name.format(layer=layer, expert=expert) + ending: shape
            for layer in self.layers
            for expert in range(self.count)
            for ending, shape in stored.items()
        }

    def read(self, read: Read, index: tuple[slice, ...]) -> np.ndarray:
        layers, experts = self.layers[index[0]], range(self.count)[index[1]]
        return np.stack([np.stack([self._one(read, i, e, index[2:]) for e in experts]) for i in layers])

    def _one(self, read: Read, layer: int, expert: int, index: tuple[slice, ...]) -> np.ndarray:
        name = self.name.format(layer=layer, expert=expert)
        if not self.packed:
            return read(name + ".weight", index)
        # Codes of a row are cut by whole scales only, so all columns are read.
        rows, every = index[0], slice(None)
        codes, scale = (read(name + ending, (rows, every)) for ending in (PACKED, SCALE))
        return unpack_host(codes, scale).astype(jnp.bfloat16)[:, index[1]]


@dataclass(frozen=True)
class PackedExperts:
    """A part of one MXFP4 matrix of every expert in the form of the TPU kernel, [layers, experts, height, out].

    Attributes:
      experts: the matrix, stored packed.
      part: field of `pallas_kernels.experts.packed.PackedSlice`.
      interleave, native: of `pallas_kernels.experts.packed.pack`.
    """

    experts: Experts
    part: str
    interleave: bool
    native: bool

    def tensors(self) -> dict[str, Shape]:
        return self.experts.tensors()

    def read(self, read: Read, index: tuple[slice, ...]) -> np.ndarray:
        layers, experts = self.experts.layers[index[0]], range(self.experts.count)[index[1]]
        return np.stack([np.stack([self._one(read, i, e)[index[2:]] for e in experts]) for i in layers])

    def _one(self, read: Read, layer: int, expert: int) -> np.ndarray:
        codes, scale = (read(self.experts.name.format(layer=layer, expert=expert) + end, ()) for end in (PACKED, SCALE))
        return getattr(pack(codes, scale, interleave=self.interleave, native=self.native), self.part)
