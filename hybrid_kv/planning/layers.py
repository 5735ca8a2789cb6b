"""One cache layer of a model: its kind and its bytes, before a mesh or a block size is chosen."""

from __future__ import annotations

import dataclasses

from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupKind
from hybrid_kv.sharding import TENSOR, MeshSpec


def check_whole(field: str, value: object, least: int = 1) -> None:
    """Refuses anything but a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise UserError(field, value, f"use a whole number, at least {least}")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps: a row for every token, or one state for a whole prefix.

    name: what its group is called. index: its number in the model, draft layers behind the target's.
    bytes: of one token's row, or of one state, on all devices together.
    heads: equal parts that the tensor group may split the bytes into; 1 for a latent row, which is never cut.
    state_axes: mesh axes that split the heads of a state; none for a state that is whole on every device.
    window: tokens a sliding window or a local chunk spans, 0 for other kinds.
    replicated: rows are not striped over dcp; a state is whole on every device, whatever `state_axes`.
    draft: the layer belongs to a drafter. It never changes grouping.
    group: layers with the same name here share one group, whatever else they are; "" groups by geometry.

    Raises UserError for an unknown kind, sizes that are no positive whole numbers, bytes that heads do not
    divide, and a window where there is none or the other way round.
    """

    name: str
    index: int
    kind: GroupKind | str
    bytes: int
    heads: int = 1
    window: int = 0
    replicated: bool = False
    draft: bool = False
    group: str = ""
    state_axes: tuple[str, ...] = TENSOR

    def __post_init__(self) -> None:
        kind = GroupKind.parse(self.kind)
        object.__setattr__(self, "kind", kind)
        check_whole(f"{self}.index", self.index, least=0)
        check_whole(f"{self}.bytes", self.bytes)
        check_whole(f"{self}.heads", self.heads)
        check_whole(f"{self}.window", self.window, least=0)
        if self.bytes % self.heads:
            raise UserError(f"{self}.bytes", self.bytes, f"its {self.heads} heads must have equal parts of them")
        if not {*self.state_axes} <= {*TENSOR}:
            raise UserError(f"{self}.state_axes", self.state_axes, f"use axes of {TENSOR}, or none")
        if kind.windowed != (self.window > 0):
            fix = "give the window in tokens" if kind.windowed else f"a {kind} layer has none: use 0"
            raise UserError(f"{self}.window", self.window, fix)

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name})"

    @property
    def recurrent(self) -> bool:
        return self.kind is GroupKind.RECURRENT

    @property
    def striped(self) -> bool:
        """Its rows are dealt out over the dcp ranks."""
        return GroupKind(self.kind).stripes and not self.replicated

    @property
    def geometry(self) -> tuple[str, int, bool]:
        """What layers of one group have in common: kind, window, replication. Row widths may differ."""
        return GroupKind(self.kind).value, self.window, self.replicated

    def local_bytes(self, mesh: MeshSpec) -> int:
        """Bytes of a row, or of a state, on the device that holds it.

        Rows striped over dcp are split by heads over `model`, other rows over `model x dcp`, states over `state_axes`.
        With more devices than heads a device holds one whole row head; devices along `state_axes` never hold the same
        part of a state.
        Raises UserError where heads and devices do not divide.
        """
        if self.recurrent and self.replicated:
            return self.bytes
        parts = mesh.over(self.state_axes) if self.recurrent else mesh.model if self.striped else mesh.tensor
        if self.heads % parts == 0:
            return self.bytes // parts
        if self.recurrent:
            fix = f"it splits the {self.heads} heads of {self} into {parts} parts: use a divisor, or mark it replicated"
            raise UserError("mesh", str(mesh), fix)
        if parts % self.heads:
            fix = f"it splits the {self.heads} heads of {self} into {parts} parts: use a divisor or a multiple"
            raise UserError("mesh", str(mesh), fix)
        return self.bytes // self.heads


def latent_row_bytes(latent: int, position: int, itemsize: int) -> int:
    """Bytes of an MLA row: latent and position columns, shared by all heads."""
    return (latent + position) * itemsize


def key_value_row_bytes(heads: int, key: int, value: int, itemsize: int) -> int:
    """Bytes of a row of ordinary attention: keys and values of all key/value heads."""
    return heads * (key + value) * itemsize


def delta_state_bytes(
    heads: int, key: int, value: int, taps: int, *, state_itemsize: int, conv_itemsize: int, key_heads: int = 0
) -> int:
    """Bytes of a KDA or GDN state: one [key, value] matrix a head, and the last taps - 1 inputs of the convolution.

    The convolution runs over queries, keys (`key_heads` heads each; 0: as many as `heads`) and values.
    """
    matrix = heads * key * value * state_itemsize
    return matrix + (2 * (key_heads or heads) * key + heads * value) * (taps - 1) * conv_itemsize
