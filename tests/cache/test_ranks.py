"""Prefix counts equal the cumulative sums they stand for."""

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.cache import ranks


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 1024, 40_000])
def test_prefix_counts_equal_cumulative_sums(count):
    rng = np.random.default_rng(count)
    mask, values = jnp.asarray(rng.random(count) < 0.3), jnp.asarray(rng.integers(0, 9, count), jnp.int32)
    np.testing.assert_array_equal(ranks.ranks(mask), np.cumsum(mask) - mask)
    np.testing.assert_array_equal(ranks.sums(values), np.cumsum(values) - values)
    total = min(int(values.sum()), 500)
    lanes = np.repeat(np.arange(count), values)[:total]
    np.testing.assert_array_equal(ranks.ragged(ranks.sums(values), jnp.arange(total)), lanes)
