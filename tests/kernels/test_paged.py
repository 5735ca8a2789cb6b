"""Block copies read every source before any write and leave the null block alone."""

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
