"""Mesh axes and the sharding map: which mesh axes split every device array, as inspectable data.

Axes: `data` (replicas), `model` and `dcp`; model x dcp is the tensor group. MLA rows are striped by
token over `dcp` and replicated over `model`; recurrent and convolution states are split by heads
over the tensor group, unless they are to be split over `model` alone or replicated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupKind, SystemGeometry, format_table

AXES = ("data", "model", "dcp")
TENSOR = ("model", "dcp")


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes."""

    data: int = 1
    model: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise UserError(f"mesh.{axis}", getattr(self, axis), "use at least 1")

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Read `model=2,dcp=4`; an empty text or `1x1` is one device."""
        sizes: dict[str, int] = {}
        for part in [] if text.strip() in ("", "1x1") else text.split(","):
            name, equals, value = part.strip().partition("=")
            if name not in AXES or not equals or not (value.isascii() and value.isdigit()) or name in sizes:
                raise UserError("mesh", text, "write axes once each as in 'model=2,dcp=4' (axes: data, model, dcp)")
            if len(value) > 9:
                raise UserError("mesh", text[:40], f"{name} has {len(value)} digits; use the size of a real mesh")
            sizes[name] = int(value)
        return cls(**sizes)

    @property
    def devices(self) -> int:
        return self.data * self.model * self.dcp

    @property
    def tensor(self) -> int:
        """Devices of one tensor group."""
        return self.over(TENSOR)

    def over(self, axes: Iterable[str]) -> int:
        """Parts into which axes together split an array; 1 for none."""
        return math.prod(getattr(self, axis) for axis in axes)

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh over the first devices; dcp groups are neighbours."""
        available = list(devices if devices is not None else jax.devices())
        if len(available) < self.devices:
            fix = f"it needs {self.devices} devices, {len(available)} are there; choose smaller axes"
            raise UserError("mesh", str(self), fix)
        shape = (self.data, self.model, self.dcp)
        kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
        chosen = available[: self.devices]
        try:
            return jax.make_mesh(shape, AXES, axis_types=kinds, devices=chosen)
        except NotImplementedError:  # how JAX says that an axis would be a part of an axis of the torus
            split = mesh_utils.create_device_mesh(shape, chosen, allow_split_physical_axes=True)
            return Mesh(split, AXES, axis_types=kinds)

    @classmethod
    def of(cls, mesh: Mesh) -> MeshSpec:
        """Sizes of a mesh that has our axes."""
        if tuple(mesh.axis_names) != AXES:
            raise UserError("mesh.axis_names", tuple(mesh.axis_names), f"name the axes {AXES}")
        return cls(**{axis: mesh.shape[axis] for axis in AXES})

    def __str__(self) -> str:
        used = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return ",".join(used) or "1x1"


@dataclasses.dataclass(frozen=True)
class ArraySharding:
    """One device array: global shape, names of its axes, how the mesh splits them.

    rule: who owns a token's row, in words, for arrays striped by token.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    spec: P
    itemsize: int
    rule: str = ""

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return NamedSharding(mesh, self.spec)

    def local_shape(self, mesh: MeshSpec) -> tuple[int, ...]:
        """Shape of one device's part; refuses sizes the mesh does not divide."""
        split = list(self.spec) + [None] * (len(self.shape) - len(self.spec))
        local = []
        for axis, size, names in zip(self.axes, self.shape, split, strict=True):
            parts = mesh.over(_names(names))
            if size % parts:
                fix = f"mesh {mesh} splits this axis of {self.name!r} into {parts} parts; choose a mesh that divides it"
                raise UserError(axis, size, fix)
            local.append(size // parts)
        return tuple(local)

    def local_bytes(self, mesh: MeshSpec) -> int:
        return math.prod(self.local_shape(mesh)) * self.itemsize


@dataclasses.dataclass(frozen=True)
class ShardingMap:
    """The map of every device array on one mesh."""

    mesh: MeshSpec
    arrays: tuple[ArraySharding, ...]

    def __post_init__(self) -> None:
        for array in self.arrays:
            array.local_shape(self.mesh)

    def named(self, mesh: Mesh) -> dict[str, NamedSharding]:
        """NamedSharding of every array."""
        return {array.name: array.sharding(mesh) for array in self.arrays}

    def __getitem__(self, name: str) -> ArraySharding:
        return next(array for array in self.arrays if array.name == name)

    @property
    def local_bytes(self) -> int:
        return sum(array.local_bytes(self.mesh) for array in self.arrays)

    def table(self) -> str:
        """The map as a text table, one array a line."""
        head = ("array", "axes", "global", "per device", "split over", "MiB/device", "rows")
        rows = []
        for array in self.arrays:
            split = [f"{axis}:{'*'.join(_names(n))}" for axis, n in zip(array.axes, array.spec, strict=False) if n]
            rows.append(
                (
                    array.name,
                    " ".join(array.axes),
                    "x".join(map(str, array.shape)),
                    "x".join(map(str, array.local_shape(self.mesh))),
                    " ".join(split) or "replicated",
                    f"{array.local_bytes(self.mesh) / 2**20:.2f}",
                    array.rule or "-",
                )
            )
        return f"mesh {self.mesh} ({self.mesh.devices} devices)\n" + format_table(head, rows)


def ownership_rule(geometry: SystemGeometry, group: int, state_axes: tuple[str, ...] = TENSOR) -> str:
    """Which rank owns a position's row of a group, in words. state_axes: split the heads of a state."""
    g = geometry.groups[group]
    if g.kind is GroupKind.RECURRENT:
        return "whole state, by heads" if state_axes else "whole state on every rank"
    if g.shards == 1:
        return "all rows on every rank"
    return f"rank = p % {g.block} // {g.interleave} % {g.shards}"


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
