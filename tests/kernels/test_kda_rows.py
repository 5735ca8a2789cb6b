"""Ragged rows, slack, null slots and resumption of KDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import ImplementationError
from pallas_kernels.kda import kda_decode, kda_prefill
from tests.kernels.kda_oracle import random_inputs, recurrence, rows_of, run_prefill

decode = jax.jit(kda_decode, static_argnames=("lower_bound", "implementation"))
HEADS, WIDTH = 2, 32


def states_pool(slots=12, seed=0, key=WIDTH, value=WIDTH):
    states = np.random.default_rng(seed).normal(size=(1, slots, HEADS, key, value))
    states[:, 0] = np.nan
    return states.astype(np.float32)


def part(x, begin, end):
    return {n: a if n in ("A_log", "dt_bias") else a[begin:end] for n, a in x.items()}


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 250])
def test_final_state_at_any_length_with_garbage_slack(form, length):
    x = random_inputs(length, 256)
    for n in ("q", "k", "v", "raw_g", "raw_beta"):
        x[n][length:] = np.nan if length % 2 else 1e4
    o, states = run_prefill(x, states_pool(), rows_of([0], [length], [0]), [1], [2], form=form, lower_bound=None)
    want, after = recurrence(part(x, 0, length), states_pool()[0, 1], None)
    np.testing.assert_allclose(o[:length], want, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(states[0, 2], after[-1], atol=2e-5, rtol=2e-5)
    np.testing.assert_array_equal(o[length:], 0)


def test_slack_and_empty_rows_touch_nothing(form):
    x = random_inputs(3, 128)
    for n in ("q", "k", "v", "raw_g", "raw_beta"):
        x[n][100:] = np.nan
    before = states_pool()
    rows = rows_of([0, 50, 50, 0, 0], [50, 0, 50, 0, 0], [0, 7, 3, 0, 0])
    o, states = run_prefill(x, before, rows, [0, 1, 2, 0, 0], [4, 5, 6, 0, 0], form=form, lower_bound=-5.0)
    for begin, row_state, slot in ((0, np.zeros_like(before[0, 1]), 4), (50, before[0, 2], 6)):
        want, after = recurrence(part(x, begin, begin + 50), row_state, -5.0)
        np.testing.assert_allclose(o[begin : begin + 50], want, atol=2e-5)
        np.testing.assert_allclose(states[0, slot], after[-1], atol=2e-5)
    untouched = [0, 1, 2, 3, 5, 7, 8, 9, 10, 11]
    np.testing.assert_array_equal(states[0, jnp.array(untouched)], before[0, untouched])


def test_rows_of_length_zero_and_one(form):
    x = random_inputs(5, 2)
    before = states_pool()
    rows = rows_of([0, 0, 1, 1], [0, 1, 0, 1], [0, 3, 0, 5])
    o, states = run_prefill(x, before, rows, [1, 2, 3, 4], [1, 2, 3, 4], form=form, lower_bound=None)
    for t, slot in ((0, 2), (1, 4)):
        want, after = recurrence(part(x, t, t + 1), before[0, slot], None)
        np.testing.assert_allclose(o[t : t + 1], want, atol=1e-5)
        np.testing.assert_allclose(states[0, slot], after[-1], atol=1e-5)
    np.testing.assert_array_equal(states[0, 1], before[0, 1])


@pytest.mark.parametrize(("key", "value"), [(32, 32), (32, 64)])
def test_decode_continues_prefill_in_one_layout(form, key, value):
    x = random_inputs(9, 101, key=key, value=value)
    start = states_pool(key=key, value=value)
    whole, _ = run_prefill(x, start, rows_of([0], [101], [0]), [0], [1], form=form, lower_bound=None)
    _, states = run_prefill(part(x, 0, 100), start, rows_of([0], [100], [0]), [0], [1], form=form, lower_bound=None)
    o, _ = decode(
        *(jnp.asarray(x[n][100:]) for n in ("q", "k", "v", "raw_g", "raw_beta")),
        jnp.asarray(x["A_log"]), jnp.asarray(x["dt_bias"]), states, 0, jnp.array([True]),
        jnp.array([1]), jnp.array([1]), jnp.array([0]), implementation=form, lower_bound=None,
    )  # fmt: skip
    np.testing.assert_allclose(o[0], whole[100], atol=1e-5)


@pytest.mark.parametrize("raw", [-5.0, -3.0, -2.5, -0.01, -1e-12])
@pytest.mark.parametrize("count", [64, 128])
def test_any_constant_gate_is_finite_and_right(form, raw, count):
    x = random_inputs(11, count)
    x["A_log"][:], x["dt_bias"][:] = 0.0, 0.0
    x["raw_g"][:] = np.log(np.expm1(-raw))  # softplus(z) = -raw
    o, states = run_prefill(x, states_pool(), rows_of([0], [count], [0]), [1], [2], form=form, lower_bound=None)
    want, after = recurrence(x, states_pool()[0, 1], None)
    np.testing.assert_allclose(o, want, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(states[0, 2], after[-1], atol=1e-4, rtol=1e-4)


def test_coherent_keys_do_not_break_the_inverse(form):
    x = random_inputs(13, 128)
    x["k"][:] = x["k"][0]
    x["raw_beta"][:] = 12.0
    x["raw_g"][:] = -20.0
    x["v"][:] = np.random.default_rng(1).normal(size=x["v"].shape)
    o, _ = run_prefill(x, states_pool(), rows_of([0], [128], [0]), [1], [2], form=form, lower_bound=None)
    want, _ = recurrence(x, states_pool()[0, 1], None)
    np.testing.assert_allclose(o, want, atol=2e-5)


def test_inactive_decode_rows_write_nothing_and_give_zero(form):
    x = random_inputs(15, 3)
    before = states_pool()
    x["q"][1], x["v"][1] = np.nan, np.nan
    o, states = decode(
        *(jnp.asarray(x[n]) for n in ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")),
        jnp.asarray(before), 0, jnp.array([True, False, True]), jnp.array([1, 2, 0]),
        jnp.array([1, 2, 3]), jnp.array([0, 5, 4]), implementation=form, lower_bound=None,
    )  # fmt: skip
    np.testing.assert_array_equal(o[1], 0)
    assert np.isfinite(o).all()
    np.testing.assert_array_equal(states[0, jnp.array([0, 2, 5])], before[0, [0, 2, 5]])
    np.testing.assert_array_equal(states[0, 3], states[0, 4])


def test_an_implementation_that_does_not_exist_is_named_and_refused():
    x = random_inputs(1, 4)
    with np.testing.assert_raises_regex(ImplementationError, "kda_prefill.*'nowhere'.*reference"):
        kda_prefill(
            *(jnp.asarray(x[n]) for n in ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")),
            jnp.asarray(states_pool()), 0, rows_of([0], [4], [0]), jnp.array([1]), jnp.array([2]),
            jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 0), jnp.int32),
            lower_bound=None, implementation="nowhere",
        )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(
    length=st.integers(2, 200),
    points=st.lists(st.integers(1, 199), min_size=3, max_size=3, unique=True),
    bounded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_resuming_from_any_emission_equals_the_uncut_run(form, length, points, bounded, seed):
    bound = -5.0 if bounded else None
    x = random_inputs(seed, 256)
    points = [p for p in points if p < length] + [length + 1] * 3
    emit = (np.array([points[:3]]), np.array([[4, 5, 6]]))
    whole, states = run_prefill(
        x, states_pool(), rows_of([0], [length], [0]), [0], [1], emit, form=form, lower_bound=bound
    )
    want, after = recurrence(part(x, 0, length), np.zeros_like(states[0, 1]), bound)
    np.testing.assert_allclose(whole[:length], want, atol=1e-5, rtol=1e-5)
    for i, at in enumerate(points[:3]):
        if at > length:
            np.testing.assert_array_equal(states[0, 4 + i], states_pool()[0, 4 + i])
            continue
        np.testing.assert_allclose(states[0, 4 + i], after[at], atol=1e-5, rtol=1e-5)
        # The rest of the prompt from here, packed behind another row.
        rest = length - at
        moved = {n: a if n in ("A_log", "dt_bias") else np.roll(a, 3 - at, 0) for n, a in x.items()}
        rows = rows_of([0, 3], [3, rest], [0, at])
        o, again = run_prefill(moved, states, rows, [0, 4 + i], [8, 9], form=form, lower_bound=bound)
        np.testing.assert_allclose(o[3 : 3 + rest], want[at:], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(again[0, 9], after[-1], atol=1e-5, rtol=1e-5)
