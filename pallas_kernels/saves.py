"""States a step leaves behind: the emissions of each row and its end, as one list.

A save is "the state of row r after `position` tokens goes to `slot`". The end of a row is the save
at start + length to the row's write slot, so final states need no path of their own.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.rows import RaggedRows


class Saves(NamedTuple):
    """n = R * (E + 1) saves; those not wanted have slot 0.

    Attributes:
      row: [n] row.
      position: [n] absolute token count after which the state is taken.
      slot: [n] where it goes; 0 for nowhere.
    """

    row: Int32[Array, "n"]
    position: Int32[Array, "n"]
    slot: Int32[Array, "n"]


def saves(
    rows: RaggedRows,
    write: Int32[Array, "R"],
    emit_position: Int32[Array, "R E"],
    emit_slot: Int32[Array, "R E"],
) -> Saves:
    """All saves of a step. Absent rows and positions outside (start, start + length] get slot 0.

    Of several saves of a row to one slot the one after most tokens keeps it. Copies into a pool may overtake one
    another, so no form could order them.
    """
    end = rows.start + rows.length
    position = jnp.concatenate([emit_position, end[:, None]], axis=1)
    slot = jnp.concatenate([emit_slot, write[:, None]], axis=1)
    inside = (position > rows.start[:, None]) & (position <= end[:, None])
    slot = jnp.where(inside, slot, 0)
    index = jnp.arange(slot.shape[1], dtype=jnp.int32)
    later = position[:, None, :] > position[:, :, None]
    later |= (position[:, None, :] == position[:, :, None]) & (index[None, None, :] > index[None, :, None])
    outlasted = jnp.any((slot[:, None, :] == slot[:, :, None]) & later, axis=2)
    row = jnp.broadcast_to(jnp.arange(end.shape[0], dtype=jnp.int32)[:, None], slot.shape)
    return Saves(row.ravel(), position.ravel(), jnp.where(outlasted, 0, slot).ravel())
