"""Verify, commit and their lazy union: records of a speculative step give the state after any number of its tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kda import Commit, Records, kda_commit, kda_commit_verify, kda_decode, kda_verify
from tests.kernels import golden
from tests.kernels.kda_oracle import random_inputs, recurrence, rows_of

STATIC = ("lower_bound", "implementation")
verify = jax.jit(kda_verify, static_argnames=(*STATIC, "most"))
commit = jax.jit(kda_commit, static_argnames=STATIC)
commit_verify = jax.jit(kda_commit_verify, static_argnames=STATIC)
decode = jax.jit(kda_decode, static_argnames=STATIC)
TOKENS = ("q", "k", "v", "raw_g", "raw_beta")
HEADS, WIDTH, MOST = 2, 32, 5


def commit_of(accepted, read, write, emit_after=None, emit_slot=None) -> Commit:
    zeros = np.zeros(len(accepted))
    fields = (
        accepted,
        read,
        write,
        zeros if emit_after is None else emit_after,
        zeros if emit_slot is None else emit_slot,
    )
    return Commit(*(jnp.asarray(a, jnp.int32) for a in fields))


def arrays(x):
    return [jnp.asarray(x[n]) for n in (*TOKENS, "A_log", "dt_bias")]


def part(x, begin, end):
    return {n: a[begin:end] if n in TOKENS else a for n, a in x.items()}


def pool(slots=40, layers=2, seed=0, dtype=jnp.float32):
    states = np.random.default_rng(seed).normal(size=(layers, slots, HEADS, WIDTH, WIDTH))
    states[:, 0] = np.nan
    return jnp.asarray(states, dtype)


@functools.cache
def golden_rows():
    """The golden rows with ragged lengths 5, 2, 4 packed with gaps of NaN, and their initial states in a pool."""
    file = golden.load("kda_spec_verify_commit")
    lengths, offsets = np.array([5, 2, 4]), np.array([1, 6, 10])
    x = {"A_log": file["A_log"], "dt_bias": file["dt_bias"]}
    for n in TOKENS:
        x[n] = np.full((24, *file[n].shape[2:]), np.nan, np.float32)
        for r in range(3):
            x[n][offsets[r] : offsets[r] + lengths[r]] = file[n][r, : lengths[r]]
    states = np.full((2, 40, *file["state_before"].shape[1:]), np.nan, np.float32)
    states[1, 3:6] = file["state_before"]
    return file, x, offsets, lengths, jnp.asarray(states)


def test_verify_matches_the_golden_corrections(form):
    file, x, offsets, lengths, states = golden_rows()
    rows = rows_of([*offsets[:2], 0, offsets[2]], [*lengths[:2], 0, lengths[2]], [0] * 4)
    o, records = verify(*arrays(x), states, 1, rows, jnp.array([3, 4, 0, 5]), most=MOST, lower_bound=-5.0,
                        implementation=form)  # fmt: skip
    covered = np.zeros(24, bool)
    for r, slot in enumerate((0, 1, 3)):
        here = slice(offsets[r], offsets[r] + lengths[r])
        covered[here] = True
        assert golden.rel_rmse(o[here], file["o"][r, : lengths[r]]) <= 1e-6
        assert golden.rel_rmse(records.u[slot, : lengths[r]], file["correction"][r, : lengths[r]]) <= 1e-6
        np.testing.assert_array_equal(records.k[slot, : lengths[r]], file["k"][r, : lengths[r]])
        np.testing.assert_array_equal(records.raw_gate[slot, : lengths[r]], file["raw_g"][r, : lengths[r]])
    np.testing.assert_array_equal(o[~covered], 0)


@pytest.mark.parametrize("accepted", range(MOST + 1))
def test_commit_gives_the_golden_state_after_any_number_of_tokens(form, accepted):
    file, _, _, _, states = golden_rows()
    k, gate = file["k"].copy(), file["raw_g"].copy()
    u = file["correction"].copy()
    for a in (u, k, gate):
        a[:, accepted:] = np.nan  # what was not accepted may be anything
    records = Records(*(jnp.asarray(np.concatenate([a, np.full_like(a[:1], np.nan)])) for a in (u, k, gate)))
    emit_after = [accepted - 1, accepted, accepted + 1, 7]
    which = commit_of([accepted] * 3 + [7], [3, 4, 5, 9], [3, 7, 0, 0], emit_after, [8, 9, 10, 0])
    out = commit(records, *arrays(file)[-2:], states, 1, which, lower_bound=-5.0, implementation=form)
    after = file["state_after_accepting"]
    assert golden.rel_rmse(out[1, 3], after[0, accepted]) <= 1e-6
    assert golden.rel_rmse(out[1, 7], after[1, accepted]) <= 1e-6
    if accepted > 1:
        assert golden.rel_rmse(out[1, 8], after[0, accepted - 1]) <= 1e-6
    if accepted > 0:
        assert golden.rel_rmse(out[1, 9], after[1, accepted]) <= 1e-6
    else:
        np.testing.assert_array_equal(out[1, 3:6], states[1, 3:6])
    untouched = [0, 1, 2, 4, 5, 6, *range(10, 40)] + ([8] if accepted < 2 else []) + ([9] if accepted < 1 else [])
    np.testing.assert_array_equal(out[1, jnp.array(untouched)], states[1, jnp.array(untouched)])
    np.testing.assert_array_equal(out[0], states[0])


def test_speculation_gives_the_bits_of_plain_decoding_in_the_reference():
    """Verify 5, accept 3, then decode two more: outputs and states equal five decode steps bit for bit."""
    x, states = random_inputs(1, 24), pool()
    a = arrays(x)

    def one(t, states):
        return decode(*(n[t : t + 1] for n in a[:5]), *a[5:], states, 1, jnp.array([True]), jnp.array([1]),
                      jnp.array([1]), jnp.array([0]), lower_bound=None, implementation="reference")  # fmt: skip

    plain, steps = states, []
    for t in range(5):
        o, plain = one(t, plain)
        steps.append(o[0])
    rows = rows_of([0, 0, 0, 0], [5, 0, 0, 0], [0] * 4)
    o, records = verify(*a, states, 1, rows, jnp.array([1, 0, 0, 0]), most=MOST, lower_bound=None,
                        implementation="reference")  # fmt: skip
    np.testing.assert_array_equal(o[:5], jnp.stack(steps))
    again = commit(
        records,
        *a[5:],
        states,
        1,
        commit_of([3, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]),
        lower_bound=None,
        implementation="reference",
    )
    for t in (3, 4):
        o, again = one(t, again)
        np.testing.assert_array_equal(o[0], steps[t])
    np.testing.assert_array_equal(again, plain)


def test_nothing_of_null_slots_slack_or_absent_rows_reaches_anything(form):
    x = random_inputs(2, 24)
    for n in TOKENS:
        x[n][3:] = np.nan
    states = pool().at[:, 5:].set(jnp.nan)
    rows = rows_of([0, 7, 2, 99], [2, 0, 1, 0], [0] * 4)
    o, records = verify(*arrays(x), states, 0, rows, jnp.array([0, 6, 1, 7]), most=MOST, lower_bound=None,
                        implementation=form)  # fmt: skip
    np.testing.assert_array_equal(o[3:], 0)
    zero, one = (
        recurrence(part(x, 0, 2), np.zeros((HEADS, WIDTH, WIDTH)), None),
        recurrence(part(x, 2, 3), states[0, 1], None),
    )
    np.testing.assert_allclose(o[:3], np.concatenate([zero[0], one[0]]), atol=1e-5, rtol=1e-5)
    # Row 1 and 3 are absent; row 0 starts from zeros; slots from 5 on hold NaN and one of them is recycled.
    which = commit_of([2, 4, 1, -3], [0, 6, 1, 7], [5, 0, 1, 0], [2, 1, 1, 1], [0, 0, 3, 0])
    out = commit(records, *arrays(x)[-2:], states, 0, which, lower_bound=None, implementation=form)
    np.testing.assert_allclose(out[0, 5], zero[1][2], atol=1e-5, rtol=1e-5)
    for slot in (1, 3):
        np.testing.assert_allclose(out[0, slot], one[1][1], atol=1e-5, rtol=1e-5)
    untouched = jnp.array([0, 2, 4, *range(6, 40)])
    np.testing.assert_array_equal(out[0, untouched], states[0, untouched])


@settings(max_examples=15, deadline=None)
@given(data=st.data(), bounded=st.booleans(), seed=st.integers(0, 1000))
def test_lazy_steps_follow_the_oracle(form, data, bounded, seed):
    """Random ragged verify steps in a row, each committing a random part of the one before."""
    bound = -5.0 if bounded else None
    count = 4
    parameters = {n: random_inputs(seed, 0)[n] for n in ("A_log", "dt_bias")}
    truth = [np.asarray(s, np.float64) for s in pool(seed=seed)[1, 1 : 1 + count]]
    states = pool(seed=seed)
    records = Records(*(jnp.full((count, MOST, HEADS, WIDTH), jnp.nan) for _ in range(3)))
    slots, before, accepted = np.arange(1, 1 + count), [None] * count, np.zeros(count, int)
    for step in range(3):
        lengths = np.array(data.draw(st.lists(st.integers(0, MOST), min_size=count, max_size=count)))
        gaps = np.array(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
        offsets = np.cumsum(gaps + lengths) - lengths
        x = random_inputs(seed + step, 24) | parameters
        for n in TOKENS:
            inside = np.zeros(24, bool)
            for offset, length in zip(offsets, lengths, strict=True):
                inside[offset : offset + length] = True
            x[n][~inside] = np.nan
        moves = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        write = np.where(moves, slots % 4 + np.arange(count) * 4 + 5, slots)
        emit_after = np.array([data.draw(st.integers(0, MOST)) for _ in range(count)])
        which = commit_of(accepted, slots, write, emit_after, 30 + np.arange(count))
        o, records, states = commit_verify(
            *arrays(x), states, 1, rows_of(offsets, lengths, 0 * offsets), records, which, lower_bound=bound,
            implementation=form,
        )  # fmt: skip
        slots = write
        for r in range(count):
            if accepted[r]:
                truth[r] = before[r][accepted[r]]
            np.testing.assert_allclose(states[1, slots[r]], truth[r], atol=1e-5, rtol=1e-5)
            if 0 < emit_after[r] <= accepted[r]:
                np.testing.assert_allclose(states[1, 30 + r], before[r][emit_after[r]], atol=1e-5, rtol=1e-5)
            want, before[r] = recurrence(part(x, offsets[r], offsets[r] + lengths[r]), truth[r], bound)
            np.testing.assert_allclose(o[offsets[r] : offsets[r] + lengths[r]], want, atol=1e-5, rtol=1e-5)
        accepted = np.array([data.draw(st.integers(0, n)) for n in lengths])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_lazy_form_is_commit_then_verify(form, dtype):
    x, states = random_inputs(4, 24), pool(dtype=dtype)
    rows = rows_of([0, 5, 9, 0], [5, 4, 3, 0], [0] * 4)
    kw = {"lower_bound": -5.0, "implementation": form}
    _, records = verify(*arrays(x), states, 1, rows, jnp.array([1, 2, 3, 0]), most=MOST, **kw)
    which = commit_of([5, 2, 0, 0], [1, 2, 3, 0], [1, 12, 3, 0], [4, 2, 1, 0], [20, 21, 22, 0])
    y = random_inputs(5, 24) | {n: x[n] for n in ("A_log", "dt_bias")}
    o, again, lazy = commit_verify(*arrays(y), states, 1, rows, records, which, **kw)
    eager = commit(records, *arrays(x)[-2:], states, 1, which, **kw)
    want, expected = verify(*arrays(y), eager, 1, rows, which.write, most=MOST, **kw)
    np.testing.assert_array_equal(lazy.astype(jnp.float32), eager.astype(jnp.float32))
    np.testing.assert_allclose(o, want, atol=1e-6, rtol=1e-6)
    for r, length in enumerate((5, 4, 3)):
        np.testing.assert_allclose(again.u[r, :length], expected.u[r, :length], atol=1e-6, rtol=1e-6)
