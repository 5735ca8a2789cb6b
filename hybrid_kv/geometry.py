"""Group kinds and the one place where block sizes are derived.

A model's cache layers fall into groups. `resolve` turns the declared groups and the decode
context parallel (DCP) size into a `SystemGeometry`; every other module asks the group for its
own numbers, and nothing else multiplies by a mesh size.

Formulas: striping in `docs/01-geometry.md`, after the DCP layout of Kimi-style MLA servers.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence

from hybrid_kv.errors import UserError


class GroupKind(enum.StrEnum):
    """What a group's cache holds; decides striping, lookup and retention."""

    MLA = "mla"
    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    RECURRENT = "recurrent"

    @classmethod
    def parse(cls, value: str) -> GroupKind:
        """The kind of a name; refuses unknown kinds with the list of known ones."""
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(kind.value for kind in cls)
            raise UserError("group.kind", value, f"use one of: {known}") from None

    @property
    def append_only(self) -> bool:
        """Rows are written once and stay valid for the whole request (MLA, full attention)."""
        return self in (GroupKind.MLA, GroupKind.FULL)

    @property
    def windowed(self) -> bool:
        """Only the rows of a window, or of a local chunk, are read (sliding window, chunked local)."""
        return self in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)

    @property
    def stripes(self) -> bool:
        """Token positions are striped over DCP ranks unless the group is marked replicated."""
        return self.append_only


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """One declared cache group.

    rows_per_rank: tokens of one block that one rank holds. For a recurrent group: tokens that
      one table column spans (a block is one state, whatever it spans).
    row_bytes: bytes of one token of one layer on all ranks together (recurrent: of one state).
    window: tokens a sliding window or a local chunk spans; 0 for the other kinds.
    """

    name: str
    kind: GroupKind | str
    rows_per_rank: int
    layers: tuple[int, ...] = ()
    row_bytes: int = 0
    replicated: bool = False
    draft: bool = False
    window: int = 0

    def __post_init__(self) -> None:
        kind = GroupKind.parse(self.kind)
        object.__setattr__(self, "kind", kind)
        if self.rows_per_rank < 1:
            raise UserError(f"{self.name}.rows_per_rank", self.rows_per_rank, "use at least 1")
        if kind.windowed != (self.window > 0):
            fix = "give the window in tokens" if kind.windowed else f"a {self.kind} group has none: use 0"
            raise UserError(f"{self.name}.window", self.window, fix)


@dataclasses.dataclass(frozen=True)
class WrappedSpec:
    """Layers of unlike row widths but one geometry, sharing one block table."""

    name: str
    members: tuple[GroupSpec, ...]

    def unwrap(self) -> GroupSpec:
        """The first member's answer, carrying all layers; refuses members that differ."""
        if not self.members:
            raise UserError(f"{self.name}.members", (), "wrap at least one group")
        first = self.members[0]
        for field in ("kind", "rows_per_rank", "replicated", "window"):
            values = {getattr(member, field) for member in self.members}
            if len(values) > 1:
                raise UserError(
                    f"{self.name}.{field}",
                    tuple(getattr(member, field) for member in self.members),
                    f"members of a wrapped group share one {field}; put unlike layers in groups of their own",
                )
        return dataclasses.replace(
            first,
            name=self.name,
            layers=tuple(sorted(layer for member in self.members for layer in member.layers)),
            row_bytes=max(member.row_bytes for member in self.members),
            draft=any(member.draft for member in self.members),
        )


@dataclasses.dataclass(frozen=True)
class GroupGeometry:
    """Derived numbers of one group; tokens unless said otherwise."""

    spec: GroupSpec
    shards: int
    interleave: int

    @property
    def name(self) -> str:
        return self.spec.name

    @functools.cached_property
    def kind(self) -> GroupKind:
        return GroupKind(self.spec.kind)

    @functools.cached_property
    def block(self) -> int:
        """Tokens of one block over all ranks it is striped over."""
        return self.spec.rows_per_rank * self.shards

    def columns(self, tokens: int) -> int:
        """Table columns that `tokens` tokens span."""
        return -(-tokens // self.block)

    def column(self, position: int) -> int:
        """Table column that holds a position."""
        return position // self.block

    def rank(self, position: int) -> int:
        """Rank that holds a position's row."""
        return position % self.block // self.interleave % self.shards

    def slot(self, position: int) -> int:
        """Row of a position inside its rank's part of the block."""
        offset, stripe = position % self.block, self.interleave * self.shards
        return offset // stripe * self.interleave + offset % self.interleave

    def count(self, length: int, rank: int) -> int:
        """Rows of the first `length` positions that live on `rank`."""
        stripe = self.interleave * self.shards
        whole = length // stripe
        rest = length - whole * stripe - rank * self.interleave
        return whole * self.interleave + min(max(rest, 0), self.interleave)


@dataclasses.dataclass(frozen=True)
class SystemGeometry:
    """All groups of a model and the units they share.

    hash_unit: tokens of one link of the hash chain. schedule_block: least common multiple of all
    blocks. hit_unit: hits are multiples of it (the hash unit wherever every group can serve one).
    """

    groups: tuple[GroupGeometry, ...]
    dcp: int
    hash_unit: int

    @functools.cached_property
    def schedule_block(self) -> int:
        return math.lcm(*(group.block for group in self.groups))

    @functools.cached_property
    def hit_unit(self) -> int:
        """The hash unit, unless a windowed group's blocks are coarser: then the schedule block.

        Append-only groups serve any hash unit of a block (its rows never change) and recurrent
        groups any state that was emitted; a windowed group only whole blocks.
        """
        coarse = any(group.kind.windowed and group.block != self.hash_unit for group in self.groups)
        return self.schedule_block if coarse else self.hash_unit

    @functools.cached_property
    def attention(self) -> tuple[int, ...]:
        """Indices of the append-only groups."""
        return tuple(i for i, group in enumerate(self.groups) if group.kind.append_only)

    @functools.cached_property
    def paged(self) -> tuple[int, ...]:
        """Indices of the groups with block tables: append-only and windowed ones."""
        return tuple(i for i, group in enumerate(self.groups) if group.kind is not GroupKind.RECURRENT)

    @functools.cached_property
    def recurrent(self) -> tuple[int, ...]:
        """Indices of the recurrent groups."""
        return tuple(i for i, group in enumerate(self.groups) if group.kind is GroupKind.RECURRENT)

    def columns_of_hit(self, hit: int) -> tuple[int, ...]:
        """Table columns that serve a hit of `hit` tokens, per group."""
        return tuple(group.columns(hit) for group in self.groups)

    def unsharded(self) -> SystemGeometry:
        """The same blocks with all their rows on one rank: all that lookup and scheduling depend on."""
        groups = tuple(
            GroupGeometry(dataclasses.replace(group.spec, rows_per_rank=group.block), shards=1, interleave=1)
            for group in self.groups
        )
        return SystemGeometry(groups=groups, dcp=1, hash_unit=self.hash_unit)

    def table(self) -> str:
        """The geometry as a text table."""
        head = ("group", "kind", "layers", "rows/rank", "shards", "interleave", "block", "units/block", "draft")
        rows = [
            (
                group.name,
                group.kind.value,
                str(len(group.spec.layers)),
                str(group.spec.rows_per_rank),
                str(group.shards),
                str(group.interleave),
                str(group.block),
                f"{group.block / self.hash_unit:g}",
                "yes" if group.spec.draft else "no",
            )
            for group in self.groups
        ]
        units = f"hash unit {self.hash_unit}, schedule block {self.schedule_block}, hit unit {self.hit_unit} tokens"
        return format_table(head, rows) + "\n" + units


def resolve(
    specs: Sequence[GroupSpec | WrappedSpec],
    *,
    dcp: int = 1,
    interleave: int = 1,
    hash_unit: int | None = None,
    states_at_any_unit: bool = True,
) -> SystemGeometry:
    """Derive the geometry of all groups.

    dcp: ranks that token positions are striped over. interleave: consecutive tokens a rank holds.
    hash_unit: tokens; None takes the greatest common divisor of all blocks.
    states_at_any_unit: the back end emits states at any hash unit, so a recurrent block need not
      be a multiple of it; otherwise it must be.
    Raises UserError when sizes do not divide or a group cannot exist under this DCP size.
    """
    if not specs:
        raise UserError("groups", (), "declare at least one cache group")
    if dcp < 1:
        raise UserError("dcp", dcp, "use at least 1 rank")
    plain = [spec.unwrap() if isinstance(spec, WrappedSpec) else spec for spec in specs]
    names = [spec.name for spec in plain]
    if len(set(names)) != len(names):
        raise UserError("groups", names, "give every group a name of its own")
    groups = tuple(_group(spec, dcp, interleave) for spec in plain)
    if hash_unit is None:
        hash_unit = math.gcd(*(group.block for group in groups))
    if hash_unit < 1:
        raise UserError("hash_unit", hash_unit, "use at least 1 token")
    for group in groups:
        free = group.kind is GroupKind.RECURRENT and states_at_any_unit
        if group.block % hash_unit and not free:
            fix = f"it must divide the block of group {group.name!r} ({group.block} tokens)"
            raise UserError("hash_unit", hash_unit, fix)
    return SystemGeometry(groups=groups, dcp=dcp, hash_unit=hash_unit)


def _group(spec: GroupSpec, dcp: int, interleave: int) -> GroupGeometry:
    striped = GroupKind(spec.kind).stripes and not spec.replicated
    shards = dcp if striped else 1
    step = interleave if shards > 1 else 1
    if step < 1 or spec.rows_per_rank % step:
        fix = f"it must divide the {spec.rows_per_rank} rows a rank holds of a block of group {spec.name!r}"
        raise UserError("interleave", interleave, fix)
    return GroupGeometry(spec=spec, shards=shards, interleave=step)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned text table with a rule under the head."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in (lines[0], "  ".join("-" * w for w in widths), *lines[1:]))
