"""KDA prefill and decode agree with the golden recurrence files in every gate regime."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda_decode
from pallas_kernels.kda.gates import log_decay, write_strength
from tests.kernels import golden
from tests.kernels.kda_oracle import rows_of, run_prefill

FILES = {
    "kda_recurrence_softplus": 1e-6,
    "kda_recurrence_lower_bound": 1e-6,
    "kda_recurrence_lower_bound_saturated": 1e-6,
    "kda_recurrence_softplus_strong": 1e-5,
    "kda_recurrence_dim128": 1e-6,
}


def one_sequence(file):
    x = {n: file[n][0] for n in ("q", "k", "v", "raw_g", "raw_beta")}
    return x | {"A_log": file["A_log"], "dt_bias": file["dt_bias"]}


def pool(state, slots=8):
    states = np.full((2, slots, *state.shape), np.nan, np.float32)
    states[1, 1] = state
    return states


@pytest.mark.parametrize("name", FILES)
def test_prefill_output_and_states_match_the_recurrence(form, name):
    file = golden.load(name)
    x, count = one_sequence(file), file["q"].shape[1]
    rows = rows_of([0], [count], [0])
    every = file["states_every_64"][0]
    points = [[64 * (i + 1) for i in range(len(every))]]
    slots = [[3 + i for i in range(len(every))]]
    o, states = run_prefill(
        x, pool(file["initial_state"][0]), rows, [1], [2], (points, slots),
        form=form, lower_bound=golden.bound(file["lower_bound"]), layer=1,
    )  # fmt: skip
    limit = FILES[name]
    assert golden.rel_rmse(o, file["o"][0]) <= limit
    assert golden.rel_rmse(states[1, 2], file["final_state"][0]) <= limit
    assert golden.rel_rmse(states[1, 3 : 3 + len(every)], every) <= limit
    np.testing.assert_array_equal(states[1, 1], file["initial_state"][0])


@pytest.mark.parametrize("name", ["kda_recurrence_softplus_strong", "kda_recurrence_lower_bound"])
def test_states_inside_a_chunk_match_the_recurrence(form, name):
    file = golden.load(name)
    every = file["states_every_16"][0]
    points = [[16 * (i + 1) for i in range(len(every))]]
    slots = [[3 + i for i in range(len(every))]]
    _, states = run_prefill(
        one_sequence(file), pool(file["initial_state"][0], 16), rows_of([0], [200], [0]), [1], [0],
        (points, slots), form=form, lower_bound=golden.bound(file["lower_bound"]), layer=1,
    )  # fmt: skip
    for got, want in zip(states[1, 3:], every, strict=False):
        assert golden.rel_rmse(got, want) <= FILES[name]


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith("dim128")])
def test_null_read_slot_starts_from_zero_whatever_it_holds(form, name):
    file = golden.load(name)
    o, states = run_prefill(
        one_sequence(file), pool(file["initial_state"][0]), rows_of([0], [200], [0]), [0], [2],
        form=form, lower_bound=golden.bound(file["lower_bound"]), layer=1,
    )  # fmt: skip
    assert golden.rel_rmse(o, file["o_zero_init"][0]) <= FILES[name]
    assert golden.rel_rmse(states[1, 2], file["final_state_zero_init"][0]) <= FILES[name]
    assert np.isnan(states[:, 0]).all()


def test_varlen_rows_with_checkpoints(form):
    file = golden.load("kda_varlen_lower_bound")
    cu = file["cu_seqlens"]
    length = np.diff(cu)
    count = len(length)
    # Slots: 1.. hold initial states, 11.. receive final states, 21.. the checkpoints.
    states = np.full((1, 40, *file["initial_state"].shape[1:]), np.nan, np.float32)
    states[0, 1 : 1 + count] = file["initial_state"]
    read = np.where(file["has_initial_state"], np.arange(count) + 1, 0)
    points = np.zeros((count, 5), np.int32)
    slots = np.zeros((count, 5), np.int32)
    used = [0] * count
    for i, (row, offset) in enumerate(zip(file["checkpoint_seq"], file["checkpoint_offset"], strict=True)):
        points[row, used[row]], slots[row, used[row]] = offset, 21 + i
        used[row] += 1
    x = one_sequence(file)
    o, states = run_prefill(
        x, states, rows_of(cu[:-1], length, 0 * length), read, np.arange(count) + 11,
        (points, slots), form=form, lower_bound=-5.0,
    )  # fmt: skip
    assert golden.rel_rmse(o, file["o"][0]) <= 1e-6
    for row in range(count):
        if length[row]:
            assert golden.rel_rmse(states[0, 11 + row], file["final_state"][row]) <= 1e-6
        else:
            assert np.isnan(states[0, 11 + row]).all(), "an absent row writes nothing"
    saved = states[0, 21 : 21 + len(file["checkpoint_states"])]
    assert golden.rel_rmse(saved, file["checkpoint_states"]) <= 1e-6


@pytest.mark.parametrize("name", ["kda_recurrence_softplus", "kda_recurrence_lower_bound_saturated"])
def test_decode_token_by_token_matches_the_recurrence(form, name):
    file = golden.load(name)
    x, bound = one_sequence(file), golden.bound(file["lower_bound"])

    def step(states, token):
        o, states = kda_decode(
            *(a[None] for a in token), jnp.asarray(x["A_log"]), jnp.asarray(x["dt_bias"]), states, 1,
            jnp.array([True]), jnp.array([1]), jnp.array([1]), jnp.array([5]), implementation=form, lower_bound=bound,
        )  # fmt: skip
        return states, o[0]

    tokens = tuple(jnp.asarray(x[n]) for n in ("q", "k", "v", "raw_g", "raw_beta"))
    states, o = jax.lax.scan(step, jnp.asarray(pool(file["initial_state"][0])), tokens)
    assert golden.rel_rmse(o, file["o"][0]) <= 1e-6
    assert golden.rel_rmse(states[1, 1], file["final_state"][0]) <= 1e-6
    np.testing.assert_array_equal(states[1, 5], states[1, 1])


def test_gates_at_extremes():
    file = golden.load("kda_gates")
    for name, bound in (("softplus", None), ("lb_m5", -5.0), ("lb_m1", -1.0)):
        got = log_decay(jnp.asarray(file["raw_g"]), jnp.asarray(file["A_log"]), jnp.asarray(file["dt_bias"]), bound)
        assert golden.rel_rmse(got, file[f"log_decay_{name}"]) <= 1e-6
        assert (got <= 0).all()
    if "raw_beta" in file:
        assert golden.rel_rmse(write_strength(jnp.asarray(file["raw_beta"])), file["beta"]) <= 1e-6
