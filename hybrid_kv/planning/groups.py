"""Layers to groups: layers of equal kind and geometry share one block table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupKind, GroupSpec, WrappedSpec
from hybrid_kv.planning.layers import LayerSpec


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers that share one block table: one block id holds the same tokens, or the same prefix, of all of them."""

    name: str
    layers: tuple[LayerSpec, ...]

    @property
    def kind(self) -> GroupKind:
        return GroupKind(self.layers[0].kind)

    @property
    def striped(self) -> bool:
        return self.layers[0].striped

    @property
    def draft(self) -> bool:
        return any(layer.draft for layer in self.layers)

    def declare(self, rows_per_rank: int) -> GroupSpec | WrappedSpec:
        """The group as the geometry takes it; wrapped if its layers are unlike.

        A wrapped group whose members differ in more than their row width is refused by `resolve`.
        """
        alike: dict[Hashable, list[LayerSpec]] = {}
        for layer in self.layers:
            alike.setdefault((layer.geometry, layer.bytes), []).append(layer)
        members = tuple(
            GroupSpec(
                name=self.name,
                kind=layers[0].kind,
                rows_per_rank=rows_per_rank,
                layers=tuple(layer.index for layer in layers),
                row_bytes=layers[0].bytes,
                replicated=layers[0].replicated,
                draft=any(layer.draft for layer in layers),
                window=layers[0].window,
            )
            for layers in alike.values()
        )
        return members[0] if len(members) == 1 else WrappedSpec(self.name, members)


def group_layers(
    layers: Sequence[LayerSpec], alike: Callable[[LayerSpec], Hashable] = lambda layer: layer.geometry
) -> tuple[LayerGroup, ...]:
    """Groups in the order of their first layers.

    Layers for which `alike` says the same form a group; by default kind, window and replication count, and unlike
    row widths do not. Layers that name a `group` form that one. Raises UserError if there is no layer, or a layer
    number comes twice.
    """
    if not layers:
        raise UserError("layers", (), "no layer keeps anything, so there is no pool to plan: give at least one layer")
    repeated = sorted(index for index, count in Counter(layer.index for layer in layers).items() if count > 1)
    if repeated:
        raise UserError("layers", repeated, "give every layer an index of its own, draft layers behind the target's")
    families: dict[Hashable, list[LayerSpec]] = {}
    for layer in layers:
        families.setdefault(layer.group or (alike(layer),), []).append(layer)
    names = unique_names(members[0].group or members[0].name for members in families.values())
    return tuple(LayerGroup(name, tuple(members)) for name, members in zip(names, families.values(), strict=True))


def unique_names(names: Iterable[str]) -> list[str]:
    """The names with -2, -3, ... behind those that came before."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return result


def block_rows(group: LayerGroup, *, hash_unit: int, rows_per_rank: int | None, interleave: int, dcp: int) -> int:
    """Rows of a block that one rank holds (recurrent: tokens a table column spans).

    Append-only groups take `rows_per_rank` where it is given. Otherwise a block is one hash unit; a striped block
    is one unit for every rank if dcp and interleave do not divide it.
    """
    if group.kind.append_only and rows_per_rank is not None:
        return rows_per_rank
    if group.striped and hash_unit % (dcp * interleave) == 0:
        return hash_unit // dcp
    return hash_unit
