"""The list of states that a step saves."""

import jax.numpy as jnp

from pallas_kernels.saves import saves
from tests.kernels.kda_oracle import rows_of


def listed(rows, write, position, slot):
    found = saves(rows, *(jnp.array(a) for a in (write, position, slot)))
    return {(int(r), int(p), int(s)) for r, p, s in zip(*found, strict=True) if s}


def test_only_what_lies_inside_a_present_row_is_saved():
    rows = rows_of([0, 9, 9], [9, 0, 3], [10, 0, 0])
    position, slot = [[10, 11], [1, 0], [3, 4]], [[5, 6], [7, 8], [9, 1]]
    assert listed(rows, [2, 3, 0], position, slot) == {(0, 11, 6), (0, 19, 2), (2, 3, 9)}


def test_of_several_saves_to_one_slot_the_last_stays():
    rows = rows_of([0, 9], [9, 9], [0, 0])
    position, slot = [[7, 3, 7], [9, 2, 5]], [[5, 5, 5], [6, 6, 4]]
    assert listed(rows, [2, 6], position, slot) == {(0, 7, 5), (0, 9, 2), (1, 9, 6), (1, 5, 4)}
    kept = saves(rows, *(jnp.array(a) for a in ([2, 6], position, slot)))
    assert sorted(kept.slot.tolist()) == [0, 0, 0, 0, 2, 4, 5, 6], "each slot is written once"
