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


@pytest.mark.parametrize("lengths", [[1], [20], [5, 300, 7], [200, 100, 3, 1], [0, 4, 0], [64, 64]])
def test_runs_are_merged_in_stable_order(lengths):
    rng = np.random.default_rng(sum(lengths))
    runs = [rng.integers(-9, 9, length).astype(np.int32) for length in lengths]
    in_order = [length > 50 for length in lengths]
    runs = [np.sort(run) if known else run for run, known in zip(runs, in_order, strict=True)]
    everything = np.concatenate(runs)
    order = np.argsort(everything, kind="stable")
    places = np.asarray(ranks.merged([jnp.asarray(run) for run in runs], in_order))
    np.testing.assert_array_equal(places[order], np.arange(len(everything)))
    np.testing.assert_array_equal(ranks.sorted_few(jnp.asarray(everything)), np.sort(everything))
