"""The GPU kernels of KDA in the interpreter: few keys a head, since it takes its time for each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import Commit, gpu, reference
from tests.kernels.gpu_interpreter import assert_no_races, gpu_interpreter
from tests.kernels.kda_oracle import random_inputs, rows_of

KEYS, WIDTH, HEADS, SLOTS, MOST = 8, 128, 2, 9, 4
NAMES = ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")


def pool(dtype=jnp.float32, heads=HEADS, keys=KEYS):
    """Two layers; slots that nothing may read are NaN."""
    states = np.random.default_rng(5).normal(size=(2, SLOTS, heads, keys, WIDTH))
    states[:, 0] = states[0] = np.nan
    return jnp.asarray(states, dtype)


def inputs(tokens, slack=(), seed=0, dtype=jnp.float32):
    x = random_inputs(seed, tokens, HEADS, KEYS, WIDTH)
    for name in NAMES[:5]:
        x[name][list(slack)] = np.nan
    return [jnp.asarray(x[name], dtype if name in NAMES[:5] else jnp.float32) for name in NAMES]


def numbers(*each):
    return tuple(jnp.asarray(one, jnp.int32) for one in each)


def both(op, *given, **options):
    """Results of the kernel and of the reference, as arrays of float32 that agree about where there is NaN."""
    kernel = functools.partial(getattr(gpu, op), interpret=gpu_interpreter(), **options)
    pairs = zip(*(jax.tree.leaves(jax.jit(one)(*given)) for one in (kernel, _reference(op, options))), strict=True)
    return [[np.asarray(each, np.float32) for each in pair] for pair in pairs]


def _reference(op, options):
    return functools.partial(getattr(reference, op), **options)


def assert_alike(pairs, tolerance=2e-6):
    for got, wanted in pairs:
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


ROWS = rows_of([1, 0, 5, 7], [3, 0, 1, 2], [5, 77, 0, 12])
SLACK = (0, 4, 6)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_prefill_of_ragged_rows_saves_at_any_token(lower_bound, capsys):
    read, write = numbers([1, 8, 0, 2], [3, 8, 4, 2])
    positions, slots = numbers([[6, 8], [78, 78], [1, 0], [13, 13]], [[5, 6], [8, 8], [0, 0], [0, 7]])
    given = (*inputs(9, SLACK), pool(), 1, ROWS, read, write, positions, slots)
    assert_alike(both("prefill", *given, lower_bound=lower_bound, chunk=64))
    assert_no_races(capsys)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_decode_takes_active_rows_alone(dtype, capsys):
    active = jnp.array([True, False, True])
    read, write, emit = numbers([1, 8, 0], [1, 8, 3], [4, 8, 0])
    given = (*inputs(3, [1]), pool(dtype), jnp.int32(1), active, read, write, emit)
    assert_alike(both("decode", *given, lower_bound=None), 2e-6 if dtype == jnp.float32 else 1e-2)
    assert_no_races(capsys)


def test_decode_writes_the_dtype_of_v():
    given = (*inputs(2, dtype=jnp.bfloat16), pool(), 1, jnp.ones(2, bool), *numbers([1, 2], [1, 2], [0, 0]))
    out, states = jax.jit(functools.partial(gpu.decode, lower_bound=-5.0, interpret=gpu_interpreter()))(*given)
    assert out.dtype == jnp.bfloat16 and states.dtype == jnp.float32


def test_verify_leaves_records_and_states_alone(capsys):
    given = (*inputs(9, SLACK), pool(), 1, ROWS, *numbers([1, 8, 0, 2]))
    out, u, k, gate = both("verify", *given, most=MOST, lower_bound=-5.0)
    assert_alike([out])
    for row, length in enumerate(ROWS.length):
        for got, wanted in (u, k, gate):
            np.testing.assert_allclose(got[row, :length], wanted[row, :length], rtol=2e-6, atol=2e-6)
    assert_no_races(capsys)


def records(seed=3):
    """Of rows of 3, 0, 1 and 2 tokens that started from slots 1, none, 0 and 2; what is no token is NaN."""
    out = reference.verify(
        *inputs(9, SLACK, seed), pool(), 1, ROWS, *numbers([1, 8, 0, 2]), most=MOST, lower_bound=-5.0
    )
    token = jnp.arange(MOST)[:, None, None] < ROWS.length[:, None, None, None]
    return jax.tree.map(lambda each: jnp.where(token, each, jnp.nan), out[1])


@pytest.mark.parametrize("accepted", [(0, 99, 0, 0), (1, -7, 1, 2), (3, 0, 1, 1)])
def test_commit_takes_what_was_accepted(accepted, capsys):
    which = Commit(*numbers(accepted, [1, 99, 0, 2], [3, 0, 4, 2], [2, 1, 1, 9], [5, 0, 6, 7]))
    states = both("commit", records(), *inputs(1)[5:], pool(), 1, which, lower_bound=-5.0)
    assert_alike(states)
    assert_no_races(capsys)


def test_commit_and_verify_in_one_pass(capsys):
    # The third row is committed only, and where it would lie means nothing.
    rows = rows_of([0, 3, 10**8, 7], [3, 2, 0, 1], [0] * 4)
    which = Commit(*numbers([2, 0, 1, 2], [1, 4, 0, 2], [1, 4, 3, 2], [1, 0, 0, 2], [5, 0, 0, 6]))
    given = (*inputs(9, (5, 6, 8)), pool(), 1, rows, records(), which)
    out, u, _, _, states = both("commit_verify", *given, lower_bound=-5.0)
    assert_alike([out, states])
    for row, length in enumerate(rows.length):
        np.testing.assert_allclose(u[0][row, :length], u[1][row, :length], rtol=2e-6, atol=2e-6)
    assert_no_races(capsys)


def test_heads_of_other_sizes_are_refused_with_the_numbers():
    states, narrow = jnp.zeros((1, 2, HEADS, KEYS, 32)), inputs(1)
    narrow[2] = narrow[2][..., :32]
    with pytest.raises(ValueError, match=r"8 x 32.*take 128 x 128.*implementation='xla'"):
        gpu.decode(*narrow, states, 0, jnp.ones(1, bool), *numbers([1], [1], [0]), lower_bound=None)


def test_fewer_keys_are_for_the_interpreter_alone():
    with pytest.raises(ValueError, match="8 x 128"):
        gpu.decode(*inputs(1), pool(), 0, jnp.ones(1, bool), *numbers([1], [1], [0]), lower_bound=None)


def test_a_step_without_any_token_leaves_the_pool_alone():
    rows = rows_of([5], [0], [0])
    given = (*inputs(0), pool(), 1, rows, *numbers([1], [1], np.zeros((1, 0)), np.zeros((1, 0))))
    out, states = jax.jit(functools.partial(gpu.prefill, lower_bound=None, chunk=64, interpret=gpu_interpreter()))(
        *given
    )
    assert out.shape == (0, HEADS, WIDTH)
    np.testing.assert_array_equal(states, pool())
