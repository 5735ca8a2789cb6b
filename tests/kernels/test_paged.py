"""Block copies read every source before any write and leave the null block alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged import copy_blocks, tpu
from tests.kernels.races import races_found


def interpreted(*given):
    return tpu.copy_blocks(*given, interpret=pltpu.InterpretParams(detect_races=True))


@pytest.fixture(params=[copy_blocks, interpreted], ids=["reference", "tpu"])
def copy(request):
    yield request.param
    assert request.param is copy_blocks or not races_found()


def test_chains_and_swaps_copy_the_old_content_and_null_targets_do_nothing(copy):
    pool = np.random.default_rng(0).normal(size=(2, 6, 8, 128)).astype(np.float32)
    source, target = [5, 1, 2, 3, 5, 4], [0, 2, 1, 4, 0, 0]
    got = copy(jnp.asarray(pool), jnp.asarray(source), jnp.asarray(target))
    want = pool.copy()
    want[:, [2, 1, 4]] = pool[:, [1, 2, 3]]
    np.testing.assert_array_equal(got, want)


def test_more_copies_than_are_under_way_at_a_time_and_none(copy):
    pool = np.random.default_rng(1).normal(size=(1, 64, 8, 128)).astype(np.float32)
    source, target = np.arange(1, 38), np.arange(38, 75) % 64
    target[target < 38] = 0
    got = copy(jnp.asarray(pool), jnp.asarray(source), jnp.asarray(target))
    want = pool.copy()
    want[:, target[target > 0]] = pool[:, source[target > 0]]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(copy(jnp.asarray(pool), jnp.asarray(source), jnp.zeros_like(target)), pool)


def test_no_pairs_copy_nothing():
    pool, none = jnp.ones((1, 4, 8, 128)), jnp.zeros((0,), jnp.int32)
    np.testing.assert_array_equal(tpu.copy_blocks(pool, none, none), pool)


def test_any_number_of_copies_is_one_program():  # 99
    pool = jnp.arange(64.0).reshape(1, 64, 1)
    copy = jax.jit(lambda *args: copy_blocks(*args))
    for count in range(1, 38):
        pairs = np.zeros((2, 40), np.int32)
        pairs[:, :count] = np.arange(count), np.arange(count) + 10
        got = np.asarray(copy(pool, *pairs))[0, :, 0]
        assert (got[10 : 10 + count] == np.arange(count)).all() and (
            got[10 + count :] == np.arange(10 + count, 64)
        ).all()
    assert copy._cache_size() == 1
