"""Short convolution: golden files, history by slot, any cut."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.conv1d import causal_conv1d
from tests.kernels import golden
from tests.kernels.kda_oracle import rows_of

conv = jax.jit(causal_conv1d)


def run(x, weight, states, rows, read, write, emit_position=None, emit_slot=None, layer=0):
    count = rows.length.shape[0]
    empty = np.zeros((count, 0))
    i32 = lambda a: jnp.asarray(a, jnp.int32)  # noqa: E731
    return conv(
        jnp.asarray(x), jnp.asarray(weight), jnp.asarray(states), layer, rows, i32(read), i32(write),
        i32(empty if emit_position is None else emit_position), i32(empty if emit_slot is None else emit_slot),
    )  # fmt: skip


def test_varlen_rows_shorter_than_the_history_match_the_golden_file():
    file = golden.load("causal_conv1d")
    cu, has = file["cu_seqlens"], file["has_initial_state"]
    count = len(has)
    states = np.full((2, 20, 3, 24), np.nan, np.float32)
    states[1, 1 : 1 + count] = file["initial_state"].transpose(0, 2, 1)
    x = np.concatenate([file["x"], np.full((9, 24), np.nan, np.float32)])
    rows = rows_of(cu[:-1], np.diff(cu), np.where(has, 100, 0))
    read = np.where(has, np.arange(count) + 1, 0)
    y, states = run(x, file["weight"].T, states, rows, read, np.arange(count) + 11, layer=1)
    assert golden.rel_rmse(y[: cu[-1]], file["y"]) <= 1e-6
    np.testing.assert_array_equal(y[cu[-1] :], 0)
    for row in range(count):
        if cu[row + 1] > cu[row]:
            np.testing.assert_array_equal(states[1, 11 + row].T, file["final_state"][row])
    assert np.isnan(states[:, 0]).all() and np.isnan(states[0]).all()


def test_decode_matches_the_golden_file():
    file = golden.load("causal_conv1d")
    states = np.zeros((1, 9, 3, 24), np.float32)
    states[0, 1:5] = file["decode_state_in"].transpose(0, 2, 1)
    slots = np.arange(4) + 1
    rows = rows_of(np.arange(4), np.ones(4), np.full(4, 7))
    y, states = run(file["decode_x"], file["weight"].T, states, rows, slots, slots)
    assert golden.rel_rmse(y, file["decode_y"]) <= 1e-6
    np.testing.assert_array_equal(states[0, 1:5].transpose(0, 2, 1), file["decode_state_out"])


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 12), cut=st.integers(0, 12), points=st.lists(st.integers(1, 12), min_size=2, max_size=2),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_any_cut_and_any_emission_equal_the_uncut_run(length, cut, points, seed):
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(16, 6)).astype(np.float32), rng.normal(size=(4, 6)).astype(np.float32)
    x[length:] = np.nan
    states = np.full((1, 8, 3, 6), np.nan, np.float32)
    whole, states = run(x, weight, states, rows_of([0], [length], [0]), [0], [1], [points], [[2, 3]])
    padded = np.concatenate([np.zeros((3, 6), np.float32), x])
    np.testing.assert_array_equal(states[0, 1], padded[length : length + 3])
    for slot, at in zip((2, 3), points, strict=True):
        if at <= length:
            np.testing.assert_array_equal(states[0, slot], padded[at : at + 3])
        else:
            assert np.isnan(states[0, slot]).all()
    cut = min(cut, length)
    _, states = run(x, weight, states, rows_of([0], [cut], [0]), [0], [4])
    rest = np.roll(x, -cut, 0)
    rest[length - cut :] = np.nan
    y, states = run(rest, weight, states, rows_of([0], [length - cut], [cut]), [4 if cut else 0], [5])
    np.testing.assert_allclose(y[: length - cut], whole[cut:length], atol=1e-6)
    if cut < length:
        np.testing.assert_array_equal(states[0, 5], padded[length : length + 3])
