"""Keys filed many at once, with places that several want: nothing is lost, and nothing is filed twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.cache import filing, index
from hybrid_kv.cache.check import _index as broken_index
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import OVERFLOWED, initial_state
from hybrid_kv.geometry import GroupSpec, resolve

SPECS = [GroupSpec("mla", "mla", 32), GroupSpec("kda", "recurrent", 16)]
CONFIG = CacheConfig(resolve(SPECS, hash_unit=16), (64, 64), (0, 1), max_requests=2, max_context=64, token_budget=64)
COUNT = 24


def items_of(rng: np.random.Generator, buckets: int) -> filing.Items:
    """Keys of few buckets, of both groups, most of them several times; each names the same unit of every block."""
    names = rng.integers(0, buckets, (10, 4)).astype(np.uint32)
    names[:, 2], names[:, 3] = rng.integers(1, 3, 10), np.arange(10)  # the word that is searched for says little
    which = 2 * rng.integers(0, 5, COUNT) + np.arange(COUNT) % 2
    group = np.repeat(rng.integers(0, 2, COUNT // 2), 2)
    rows, slot = group == 0, np.arange(COUNT)
    block = np.where(rows, 1 + slot // 2, 64 + 1 + slot)
    words = [group, group, block, np.where(rows, slot % 2, 0), np.where(rows, rng.integers(1, 3, COUNT), 0)]
    group, pool, block, unit, covered = (jnp.asarray(word, jnp.int32) for word in words)
    keys = jnp.asarray(names[which])
    ok = jnp.asarray(rng.random(COUNT) < 0.9)
    return filing.Items(group, pool, keys, jnp.zeros_like(keys), block, unit, covered, ok)


@pytest.mark.parametrize("buckets", [1, 4])
def test_what_is_found_after_filing_many_at_once_is_what_one_after_the_other_leaves(buckets):
    at_once = jax.jit(functools.partial(filing.file, CONFIG, pending=False))
    found = jax.jit(index.find)
    for seed in range(20):
        items, state = items_of(np.random.default_rng(seed), buckets), initial_state(CONFIG)
        together, filed = at_once(state, items)
        one_by_one = state
        for nth in range(COUNT):
            one_by_one, _ = at_once(one_by_one, items._replace(ok=items.ok & (jnp.arange(COUNT) == nth)))
        ours, theirs = (found(state, items.key).blocks for state in (together, one_by_one))
        np.testing.assert_array_equal(ours > 0, theirs > 0)
        assert together.counters[OVERFLOWED] == one_by_one.counters[OVERFLOWED]
        assert not broken_index(CONFIG, jax.device_get(together))
        for key, owners in zip(items.key.tolist(), ours.tolist(), strict=True):
            mine = np.flatnonzero((np.asarray(items.key) == key).all(1) & np.asarray(filed))
            offered = {(int(items.group[nth]), int(items.block[nth])) for nth in mine}
            assert all((group, block) in offered for group, block in enumerate(owners) if block)
