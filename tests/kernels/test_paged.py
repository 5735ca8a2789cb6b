"""Blocks are copied, cleared, gathered and scattered exactly; the null block stays, ids beyond the pool are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import paged
from pallas_kernels.paged import copy_blocks, gather_blocks, host, scatter_blocks, tpu, zero_blocks
from tests.kernels.races import races_found

CHECKED = pltpu.InterpretParams(detect_races=True)


@pytest.fixture(params=["reference", "tpu"])
def ops(request):
    """The module of an implementation, that of the TPU interpreted with checks."""
    if request.param == "reference":
        yield lambda name: getattr(paged, name)
        return
    yield lambda name: functools.partial(getattr(tpu, name), interpret=CHECKED)
    assert not races_found()


def random_pool(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(*shape, 8, 128)).astype(np.float32)


def test_chains_and_swaps_copy_the_old_content_and_null_targets_do_nothing(ops):
    pool = random_pool(2, 6)
    source, target = [5, 1, 2, 3, 5, 4], [0, 2, 1, 4, 0, 0]
    got = ops("copy_blocks")(jnp.asarray(pool), jnp.asarray(source), jnp.asarray(target))
    want = pool.copy()
    want[:, [2, 1, 4]] = pool[:, [1, 2, 3]]
    np.testing.assert_array_equal(got, want)


def test_more_copies_than_are_under_way_at_a_time_and_none(ops):
    pool = random_pool(1, 64, seed=1)
    source, target = np.arange(1, 38), np.arange(38, 75) % 64
    target[target < 38] = 0
    got = ops("copy_blocks")(jnp.asarray(pool), jnp.asarray(source), jnp.asarray(target))
    want = pool.copy()
    want[:, target[target > 0]] = pool[:, source[target > 0]]
    np.testing.assert_array_equal(got, want)
    none = jnp.zeros_like(target)
    np.testing.assert_array_equal(ops("copy_blocks")(jnp.asarray(pool), jnp.asarray(source), none), pool)


def test_blocks_are_cleared_and_the_null_block_is_not(ops):
    pool = random_pool(2, 20)
    got = ops("zero_blocks")(jnp.asarray(pool), jnp.asarray([7, 0, 19, 0, 1]))
    want = pool.copy()
    want[:, [7, 19, 1]] = 0
    np.testing.assert_array_equal(got, want)


def test_gathered_blocks_are_the_content_and_zeros_for_the_null_block(ops):
    pool = random_pool(2, 9)
    pool[:, 0] = np.nan
    got = ops("gather_blocks")(jnp.asarray(pool), jnp.asarray([3, 0, 3, 8]))
    want = pool[:, [3, 0, 3, 8]]
    want[:, 1] = 0
    np.testing.assert_array_equal(got, want)


def test_what_was_gathered_can_be_scattered_elsewhere(ops):
    pool, content = random_pool(2, 9), random_pool(2, 3, seed=1)
    got = ops("scatter_blocks")(jnp.asarray(pool), jnp.asarray([8, 0, 2]), jnp.asarray(content))
    want = pool.copy()
    want[:, [8, 2]] = content[:, [0, 2]]
    np.testing.assert_array_equal(got, want)


def test_no_blocks_do_nothing(ops):
    pool, none = jnp.ones((1, 4, 8, 128)), jnp.zeros((0,), jnp.int32)
    np.testing.assert_array_equal(ops("zero_blocks")(pool, none), pool)
    np.testing.assert_array_equal(ops("copy_blocks")(pool, none, none), pool)
    np.testing.assert_array_equal(ops("scatter_blocks")(pool, none, pool[:, :0]), pool)
    assert ops("gather_blocks")(pool, none).shape == (1, 0, 8, 128)
    # Something has to run for the fixture to ask about races.
    ops("zero_blocks")(pool, jnp.asarray([1]))


@pytest.mark.parametrize("op", ["copy", "zero", "gather", "scatter"])
def test_any_number_of_blocks_needs_few_programs(op):  # 99
    pool, content = random_pool(1, 80), random_pool(1, 37, seed=1)
    run = getattr(host, f"_{op}")
    run.clear_cache()
    for count in range(1, 38):
        blocks = np.arange(40, 40 + count)
        given = {
            "copy": (np.stack([np.arange(1, 1 + count), blocks], 1),),
            "zero": (blocks,),
            "gather": (blocks,),
            "scatter": (blocks, content[:, :count]),
        }[op]
        got = getattr(host, op)(jnp.asarray(pool), *given)
        want = pool.copy()
        want[:, blocks] = {"copy": pool[:, 1 : 1 + count], "scatter": content[:, :count]}.get(op, 0)
        np.testing.assert_array_equal(got, pool[:, blocks] if op == "gather" else want)
    assert run._cache_size() <= 7


REFUSED = [
    (lambda pool: copy_blocks(pool, jnp.asarray([1, 9]), jnp.asarray([2, 3])), "source: got block 9 at 1"),
    (lambda pool: copy_blocks(pool, jnp.asarray([1, 2]), jnp.asarray([3, 3])), "target: got block 3 twice"),
    (lambda pool: zero_blocks(pool, jnp.asarray([-1])), "target: got block -1 at 0"),
    (lambda pool: gather_blocks(pool, jnp.asarray([4])), "source: got block 4 at 0; the pool has blocks 0 to 3"),
    (lambda pool: scatter_blocks(pool, jnp.asarray([1]), pool[:, :2]), r"content: got float32\[1, 2, 8, 128\]"),
    (lambda pool: host.copy(pool, [(1, 4)]), "target: got block 4 at 0"),
    (lambda pool: host.copy(pool, [(0, 1)]), "source: got block 0, the null block"),
    (lambda pool: host.copy(pool, np.array([[(1 << 32) + 1, 2]])), "source: got block 4294967297 at 0"),
    (lambda pool: host.copy(pool, np.ones((2, 3), int)), r"pairs: got shape \[2, 3\]"),
    (lambda pool: host.zero(pool, np.array([1.7])), "target: got float64 values"),
    (lambda pool: host.zero(pool, [2, 2]), "target: got block 2 twice"),
    (lambda pool: host.gather(pool, [2, 70]), "source: got block 70 at 1"),
    (lambda pool: host.scatter(pool, [2], pool[:, :1].astype(jnp.bfloat16)), "content: got bfloat16"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_ids_beyond_the_pool_are_refused_and_never_clipped(call, message):
    pool = jnp.ones((1, 4, 8, 128))
    with pytest.raises(ValueError, match=message):
        call(pool)
    np.testing.assert_array_equal(pool, 1)  # nothing was donated


def test_any_number_of_copies_inside_a_program_is_one_program():
    pool = jnp.arange(64.0).reshape(1, 64, 1)
    copy = jax.jit(lambda *args: copy_blocks(*args))
    for count in (1, 7, 37):
        pairs = np.zeros((2, 40), np.int32)
        pairs[:, :count] = np.arange(count), np.arange(count) + 10
        got = np.asarray(copy(pool, *pairs))[0, :, 0]
        assert (got[10 : 10 + count] == np.arange(count)).all()
        assert (got[10 + count :] == np.arange(10 + count, 64)).all()
    assert copy._cache_size() == 1
