"""The GPU kernel of the convolution in the interpreter, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.conv1d import gpu, reference
from tests.kernels.gpu_interpreter import assert_no_races, gpu_interpreter
from tests.kernels.kda_oracle import rows_of


def numbers(*each):
    return tuple(jnp.asarray(one, jnp.int32) for one in each)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ragged_rows_begin_with_their_histories(dtype, capsys):
    # Rows of 70 tokens (two programs), none, 1, 2 and 3; between them, and behind the last, is slack.
    rows = rows_of([1, 0, 72, 74, 77], [70, 0, 1, 2, 3], [9, 0, 0, 4, 64])
    slack = [0, 71, 73, 76, 80, 81]
    rng = np.random.default_rng(1)
    x, weight = rng.normal(size=(82, 128)), rng.normal(size=(4, 128))
    x[slack] = np.nan
    states = rng.normal(size=(2, 12, 3, 128))
    states[0] = states[:, 0] = np.nan
    read, write = numbers([1, 99, 0, 2, 3], [1, 99, 4, 5, 0])
    positions, slots = numbers([[10, 79], [1, 1], [1, 0], [5, 6], [65, 67]], [[6, 7], [9, 9], [0, 0], [8, 9], [10, 0]])
    given = (jnp.asarray(x, dtype), jnp.asarray(weight, jnp.float32), jnp.asarray(states, dtype), 1, rows)
    given = (*given, read, write, positions, slots)
    got = jax.jit(functools.partial(gpu.causal_conv1d, interpret=gpu_interpreter()))(*given)
    wanted = jax.jit(reference.causal_conv1d)(*given)
    (y, kept), (right, kept_right) = ([np.asarray(each, np.float32) for each in pair] for pair in (got, wanted))
    near = 1e-6 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(y, right, rtol=near, atol=near)
    np.testing.assert_array_equal(kept, kept_right)
    np.testing.assert_array_equal(y[slack], 0)
    assert_no_races(capsys)


def test_channels_that_are_no_multiple_are_refused():
    rows = rows_of([0], [1], [0])
    with pytest.raises(ValueError, match=r"24 channels.*multiples of 128"):
        gpu.causal_conv1d(jnp.zeros((1, 24)), jnp.zeros((4, 24)), jnp.zeros((1, 2, 3, 24)), 0, rows,
                          *numbers([1], [1], np.zeros((1, 0)), np.zeros((1, 0))))  # fmt: skip
