"""Where the values of a parameter lie in a checkpoint, and how to read any part of it.

A source names its tensors with their expected shapes and reads the slice that one device needs, so
loading never holds a whole stack on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

# read(name, slices): the given part of a checkpoint tensor.
Read = Callable[[str, tuple[slice, ...]], np.ndarray]
Shape = tuple[int, ...]


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
    """Sources of equal shape stacked on a new first axis: layers, or experts of a layer."""

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
