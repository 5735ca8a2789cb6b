"""Where the values of a parameter lie in a checkpoint, and how to read any part of it.

A source names its tensors with their expected shapes and reads any box of the parameter from them, so that a
stack is loaded in pieces and never lies whole on the host.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from pallas_kernels.experts.mxfp4 import GROUP, unpack_host
from pallas_kernels.experts.packed import PackedSlice, pack

Shape = tuple[int, ...]
Index = tuple[slice, ...]

# Endings of a packed weight: codes, two a byte, and scales. Both are bytes, all other tensors are floating point.
PACKED, SCALE = ".weight_packed", ".weight_scale"


@runtime_checkable
class Read(Protocol):
    """Reader of checkpoint tensors that remembers what it read while one piece is made."""

    def __call__(self, name: str, index: Index) -> np.ndarray:
        """The part `index` of tensor `name`; all of it for no slices."""
        ...

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gave when it was first asked for under `key`."""
        ...


@runtime_checkable
class Source(Protocol):
    """Values of one parameter.

    Attributes:
      cuts: how many leading axes of the parameter may be cut anywhere.
    """

    cuts: ClassVar[int]

    def tensors(self) -> dict[str, Shape]:
        """Checkpoint tensors and their shapes."""
        ...

    def needs(self, index: Index) -> Iterator[str]:
        """Tensors that the part `index` is read from."""
        ...

    def read(self, read: Read, index: Index) -> np.ndarray:
        """The part `index` (a full-rank tuple of slices with bounds) of the parameter."""
        ...


@dataclass(frozen=True)
class Whole:
    """A parameter that is one checkpoint tensor."""

    cuts: ClassVar[int] = 1
    name: str
    shape: Shape

    def tensors(self) -> dict[str, Shape]:
        return {self.name: self.shape}

    def needs(self, index: Index) -> Iterator[str]:
        yield self.name

    def read(self, read: Read, index: Index) -> np.ndarray:
        return read(self.name, index)


@dataclass(frozen=True)
class Stack:
    """Sources of equal shape stacked on a new first axis, that of the layers."""

    cuts: ClassVar[int] = 1
    parts: tuple[Source, ...]

    def tensors(self) -> dict[str, Shape]:
        return {name: shape for part in self.parts for name, shape in part.tensors().items()}

    def needs(self, index: Index) -> Iterator[str]:
        for part in self.parts[index[0]]:
            yield from part.needs(index[1:])

    def read(self, read: Read, index: Index) -> np.ndarray:
        return np.stack([part.read(read, index[1:]) for part in self.parts[index[0]]])


@dataclass(frozen=True)
class HeadPacked:
    """q, k and v tensors [H * width, ...] packed as (head, {q, k, v}, width) on the first axis.

    The convolution's [H * width, 1, W] loses its middle axis. Parts begin and end at whole heads.
    """

    cuts: ClassVar[int] = 0
    names: tuple[str, str, str]
    shape: Shape
    width: int

    def tensors(self) -> dict[str, Shape]:
        return dict.fromkeys(self.names, self.shape)

    def needs(self, index: Index) -> Iterator[str]:
        yield from self.names

    def read(self, read: Read, index: Index) -> np.ndarray:
        packed, last = index
        begin, end = packed.start // 3, packed.stop // 3
        middle = (slice(0, 1),) * (len(self.shape) - 2)
        rows = [read(name, (slice(begin, end), *middle, last)) for name in self.names]
        heads = [r.reshape(-1, 1, self.width, r.shape[-1]) for r in rows]
        return np.concatenate(heads, axis=1).reshape(packed.stop - packed.start, -1)


@dataclass(frozen=True)
class HeadVector:
    """One value per head, stored as [H], [1, 1, H, 1] or padded at the end: the first H count."""

    cuts: ClassVar[int] = 0
    name: str
    heads: int

    def tensors(self) -> dict[str, Shape]:
        return {self.name: (self.heads,)}

    def needs(self, index: Index) -> Iterator[str]:
        yield self.name

    def accepts(self, shape: Shape) -> bool:
        """One long axis of at least H entries."""
        return int(np.prod(shape)) == max(shape, default=0) >= self.heads

    def read(self, read: Read, index: Index) -> np.ndarray:
        return read(self.name, ()).reshape(-1)[: self.heads][index]


@dataclass(frozen=True)
class Experts:
    """One matrix [out, in] of every expert of several layers, stacked as [layers, experts, out, in].

    A full-size model has half a million of these tensors, so their names are made when they are asked for.

    Attributes:
      name: of a tensor without its ending, with `{layer}` and `{expert}` for the two numbers.
      packed: stored in MXFP4; read as bf16, which is exact.
    """

    cuts: ClassVar[int] = 2
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

    def matrices(self, index: Index) -> Iterator[str]:
        """Names without endings of the experts in a part, layer by layer."""
        for layer in self.layers[index[0]]:
            for expert in range(self.count)[index[1]]:
                yield self.name.format(layer=layer, expert=expert)

    def needs(self, index: Index) -> Iterator[str]:
        for name in self.matrices(index):
            yield from (name + ending for ending in ((PACKED, SCALE) if self.packed else (".weight",)))

    def read(self, read: Read, index: Index) -> np.ndarray:
        return _stacked([self._one(read, name, index[2:]) for name in self.matrices(index)], index)

    def _one(self, read: Read, name: str, index: Index) -> np.ndarray:
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

    cuts: ClassVar[int] = 2
    experts: Experts
    part: str
    interleave: bool
    native: bool

    def tensors(self) -> dict[str, Shape]:
        return self.experts.tensors()

    def needs(self, index: Index) -> Iterator[str]:
        return self.experts.needs(index)

    def read(self, read: Read, index: Index) -> np.ndarray:
        return _stacked([self._one(read, name)[index[2:]] for name in self.experts.matrices(index)], index)

    def _one(self, read: Read, name: str) -> np.ndarray:
        def packed() -> PackedSlice:
            codes, scale = (read(name + ending, ()) for ending in (PACKED, SCALE))
            return pack(codes, scale, interleave=self.interleave, native=self.native)

        # The three parts come from one packing.
        return getattr(read.once((PackedExperts, name), packed), self.part)


def _stacked(matrices: list[np.ndarray], index: Index) -> np.ndarray:
    """Matrices of a part, layer by layer, as [layers, experts, ...]; `index` has bounds and is not empty."""
    return np.stack(matrices).reshape(index[0].stop - index[0].start, -1, *matrices[0].shape)


def origin(source: Source) -> Source:
    """What a parameter is read from: sources of equal origin are parts of the same tensors."""
    return source.experts if isinstance(source, PackedExperts) else source
