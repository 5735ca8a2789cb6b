"""Groups of packed tokens and the pieces of rows in them: what the TPU kernel is told about a step.

Cutting the packed axis at fixed places keeps every block of activations aligned in memory whatever the offsets of
rows; a row is met as one piece for each group it has tokens in.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.rows import RaggedRows, owner
from pallas_kernels.saves import saves

PAST = 3  # inputs before a token that it needs
RING = 3  # groups of kind DECODE under way at once

# Kinds of groups.
INNER = 0  # tokens of one row, all behind its first three, and no state is saved
CLOSING = 1  # the same, but states are saved
DECODE = 2  # every piece is a row of one token
MIXED = 3  # anything else
EMPTY = 4  # no token of any row


class Groups(NamedTuple):
    """Per group (G) and per present row in packed order (R, absent ones last).

    Attributes:
      kind: [G] one of the kinds above.
      first, pieces: [G] the rows that have tokens in the group are first .. first + pieces - 1.
      begins: [G] 1 for the first group of kind DECODE.
      part: [G] groups of kind DECODE before this one, modulo RING.
      fetched: [G] rows of the group that have a history in the pool.
      following: [G] index of the next group of kind DECODE, -1 if there is none.
      turn: [R] in groups of kind MIXED, rows of which one of the first PAST tokens is in the group are visited one
        after another; the number of such visits before the first one of this row.
      read: [R] slot of the history, 0 for zeros.
      visited: [2 * R] the row of each visit, -1 behind the last.
      offset, length: [R] as in `RaggedRows`; length 0 for absent rows.
      end: [R * (E + 1)] packed index behind the last token of each saved state.
      slot: [R * (E + 1)] where it goes, 0 for nowhere.
    """

    kind: Int32[Array, "G"]
    first: Int32[Array, "G"]
    pieces: Int32[Array, "G"]
    begins: Int32[Array, "G"]
    part: Int32[Array, "G"]
    fetched: Int32[Array, "G"]
    following: Int32[Array, "G"]
    offset: Int32[Array, "R"]
    length: Int32[Array, "R"]
    turn: Int32[Array, "R"]
    read: Int32[Array, "R"]
    visited: Int32[Array, "V"]
    end: Int32[Array, "n"]
    slot: Int32[Array, "n"]


def groups(
    count: int,
    size: int,
    rows: RaggedRows,
    read: Int32[Array, "R"],
    write: Int32[Array, "R"],
    emit_position: Int32[Array, "R E"],
    emit_slot: Int32[Array, "R E"],
) -> Groups:
    """Describe a step of `count` groups of `size` tokens."""
    present = rows.length > 0
    order = jnp.argsort(~present, stable=True)
    far = count * size  # absent rows lie behind everything
    offset = jnp.where(present, rows.offset, far)[order]
    length = jnp.where(present, rows.length, 0)[order]
    last = offset + length

    wanted = saves(rows, write, emit_position, emit_slot)
    shape = (rows.offset.shape[0], -1)
    end = (rows.offset - rows.start)[wanted.row] + wanted.position
    end, slot = (a.reshape(shape)[order] for a in (end, wanted.slot))

    base = jnp.arange(count, dtype=jnp.int32)[:, None] * size
    inside = (offset < base + size) & (last > base)  # [G, R]
    first = jnp.sum(last <= base, axis=1, dtype=jnp.int32)
    pieces = jnp.sum(inside, axis=1, dtype=jnp.int32)
    longer = jnp.any(inside & (length != 1), axis=1)
    saving = (slot != 0)[None] & (end[None] > base[..., None]) & (end[None] <= base[..., None] + size)
    covered = jnp.any((offset + PAST <= base) & (last >= base + size), axis=1)
    saving = jnp.any(saving, axis=(1, 2))
    kind = jnp.where(longer, MIXED, jnp.where(pieces == 0, EMPTY, DECODE))
    kind = jnp.where(covered, jnp.where(saving, CLOSING, INNER), kind).astype(jnp.int32)

    decode = kind == DECODE
    ordinal = jnp.cumsum(decode, dtype=jnp.int32) - decode
    index = jnp.where(decode, jnp.arange(count, dtype=jnp.int32), count)
    later = jnp.concatenate([jax.lax.cummin(index, reverse=True)[1:], jnp.full((1,), count, jnp.int32)])
    following = jnp.where(later < count, later, -1)

    read = jnp.where(present, read, 0)[order]
    fetched = jnp.sum(inside & (read != 0), axis=1, dtype=jnp.int32)

    # A row is visited in the group of its first token, and in the next if one of its first tokens is there too.
    home = jnp.minimum(offset // size, count - 1)
    spread = (length > size - offset % size) & (offset % size > size - PAST)
    visits = jnp.where(length > 0, (kind[home] == MIXED).astype(jnp.int32) + spread, 0)
    passed = jnp.cumsum(visits, dtype=jnp.int32)
    visited = owner(passed, 2 * offset.shape[0])
    visited = jnp.where(visited < offset.shape[0], visited, -1)
    return Groups(
        kind, first, pieces, (decode & (ordinal == 0)).astype(jnp.int32), ordinal % RING, fetched, following, offset,
        length, passed - visits, read, visited, end.ravel(), slot.ravel(),
    )  # fmt: skip


_PER_GROUP, _PER_ROW = Groups._fields[:7], Groups._fields[7:11]


def packed(plan: Groups) -> tuple[Int32[Array, "_"], ...]:
    """The plan in few arrays, because each costs a copy before the kernel begins."""
    fields = plan._asdict()

    def join(names: tuple[str, ...]) -> Int32[Array, "_"]:
        return jnp.stack([fields[name] for name in names], axis=1).ravel()

    return join(_PER_GROUP), join(_PER_ROW), plan.visited, plan.end, plan.slot


class _Field:
    """One field of a packed array in scalar memory."""

    def __init__(self, array: Any, fields: int, place: int) -> None:
        self.array, self.fields, self.place = array, fields, place

    def __getitem__(self, index: Any) -> Any:
        return self.array[index * self.fields + self.place]


def unpacked(per_group: Any, per_row: Any) -> tuple[_Field, ...]:
    """The fields of `Groups` up to `read`, from the first two arrays of `packed`."""
    of_groups = [_Field(per_group, len(_PER_GROUP), i) for i in range(len(_PER_GROUP))]
    return (*of_groups, *(_Field(per_row, len(_PER_ROW), i) for i in range(len(_PER_ROW))))
