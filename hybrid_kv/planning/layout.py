"""Groups to pools: what one block of every group weighs on a device, and which groups draw from one pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupKind, SystemGeometry, resolve
from hybrid_kv.planning.groups import LayerGroup, block_rows, group_layers
from hybrid_kv.planning.layers import LayerSpec, check_whole
from hybrid_kv.sharding import MeshSpec


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """What decides the sizes of blocks.

    hash_unit: tokens prefixes are matched in; None is the greatest common divisor of all blocks, which must then be
    given as `rows_per_rank` or follow from a unified pool. rows_per_rank: rows of an append-only block that one rank
    holds (None: a block is a hash unit, see `groups.block_rows`). interleave: neighbouring tokens on one rank.
    row_multiple: a unified pool gives a rank a multiple of so many rows (what a kernel reads at once).
    """

    mesh: MeshSpec = dataclasses.field(default_factory=MeshSpec)
    hash_unit: int | None = 64
    rows_per_rank: int | None = None
    interleave: int = 1
    row_multiple: int = 1

    def __post_init__(self) -> None:
        for field in ("hash_unit", "rows_per_rank"):
            if getattr(self, field) is not None:
                check_whole(field, getattr(self, field))
        check_whole("interleave", self.interleave)
        check_whole("row_multiple", self.row_multiple)
        if self.mesh.data > 1:
            fix = "replicas have caches of their own: plan one of them with data=1"
            raise UserError("mesh.data", self.mesh.data, fix)


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """Groups that draw block ids from one free list, and the bytes of a block on a device, all layers together."""

    name: str
    groups: tuple[int, ...]
    block_bytes: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Groups and pools of a model, before there is memory.

    content: bytes of a block of every group that rows or states fill, on a device, all layers together; what the
    block of its pool has more is padding.
    """

    name: str
    mesh: MeshSpec
    geometry: SystemGeometry
    groups: tuple[LayerGroup, ...]
    content: tuple[int, ...]
    pools: tuple[PoolLayout, ...]

    def pool_of(self, group: int) -> int:
        """Index of the pool that a group draws from."""
        return next(index for index, pool in enumerate(self.pools) if group in pool.groups)

    def padding(self, group: int) -> int:
        """Bytes of every block of a group that nothing fills."""
        return self.pools[self.pool_of(group)].block_bytes - self.content[group]

    def tail(self, group: int) -> int:
        """Bytes that a request's last block may leave unfilled on a device: all rows but one, or all of them where
        they are striped and the one is on another rank. 0 for states."""
        resolved = self.geometry.groups[group]
        if resolved.kind is GroupKind.RECURRENT:
            return 0
        rows = resolved.spec.rows_per_rank
        return self.content[group] * (rows - (resolved.shards == 1)) // rows


def per_shape(layers: Sequence[LayerSpec], options: BlockOptions) -> Layout:
    """One pool for every row shape: groups whose blocks hold equal pages share one, and nothing is padded.

    Raises UserError if sizes do not divide, if no hash unit follows, or if heads do not fit the mesh.
    """
    groups = group_layers(layers)
    unit = options.hash_unit or options.rows_per_rank
    if unit is None:
        raise UserError("hash_unit", None, "without it blocks need a size: give hash_unit or rows_per_rank")
    sizes = {"interleave": options.interleave, "dcp": options.mesh.dcp}
    rows = [block_rows(group, hash_unit=unit, rows_per_rank=options.rows_per_rank, **sizes) for group in groups]
    geometry = resolve_groups(groups, rows, options)
    pages = [group_pages(group, count, options.mesh) for group, count in zip(groups, rows, strict=True)]
    shapes: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        shapes.setdefault((group.kind is GroupKind.RECURRENT, rows[index], pages[index]), []).append(index)
    content = tuple(map(sum, pages))
    return Layout(
        name="per shape",
        mesh=options.mesh,
        geometry=geometry,
        groups=groups,
        content=content,
        pools=tuple(
            PoolLayout("+".join(groups[i].name for i in members), tuple(members), content[members[0]])
            for members in shapes.values()
        ),
    )


def group_pages(group: LayerGroup, rows: int, mesh: MeshSpec) -> tuple[int, ...]:
    """Bytes of a block of every layer on one device: `rows` rows, or one state."""
    return tuple(layer.local_bytes(mesh) * (1 if layer.recurrent else rows) for layer in group.layers)


def resolve_groups(groups: Sequence[LayerGroup], rows: Sequence[int], options: BlockOptions) -> SystemGeometry:
    """The geometry of groups with so many rows of a block on a rank each."""
    return resolve(
        [group.declare(count) for group, count in zip(groups, rows, strict=True)],
        dcp=options.mesh.dcp,
        interleave=options.interleave,
        hash_unit=options.hash_unit,
    )
