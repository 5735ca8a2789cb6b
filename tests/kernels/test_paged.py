"""Block copies read every source before any write and leave the null block alone."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged import copy_blocks


def test_chains_and_swaps_copy_the_old_content_and_null_targets_do_nothing():
    pool = np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32)
    source, target = [1, 2, 3, 5, 4], [2, 1, 4, 0, 0]
    got = copy_blocks(jnp.asarray(pool), jnp.asarray(source), jnp.asarray(target))
    want = pool.copy()
    want[:, [2, 1, 4]] = pool[:, [1, 2, 3]]
    np.testing.assert_array_equal(got, want)


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
