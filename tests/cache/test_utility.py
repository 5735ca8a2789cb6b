"""Another order of eviction than the least recently released."""

import dataclasses

import jax.numpy as jnp

from hybrid_kv.cache.pool import by_release
from hybrid_kv.cache.reference.pool import Index, Pool
from hybrid_kv.cache.state import BITS, STAMP, STATE
from tests.cache.test_random_traffic import CONFIGS, traffic


def newest_rows_first(config, state, pool):
    """Rows go before states, and what was released last before the rest."""
    first = config.pool_offset[pool]
    rows = state.blocks[first : first + config.capacity[pool]]
    return jnp.where(rows[:, BITS] & STATE > 0, 0, -rows[:, STAMP])


def test_the_order_of_release_as_a_utility_makes_the_same_decisions():
    config = CONFIGS["plain"]
    ordered = dataclasses.replace(config, utility=by_release)
    for seed in range(0, 4, 2):
        counts, same = traffic(config, seed), traffic(ordered, seed)
        # Which steps are steady depends on when lists are due to be compacted, and that does not matter here.
        del counts["steady"], same["steady"]
        assert counts["evicted"] and same == counts


def test_any_utility_is_sound_and_leaves_nothing_behind():
    config = dataclasses.replace(CONFIGS["plain"], utility=newest_rows_first)
    counts = traffic(config, 0)
    assert counts["hits"] and counts["evicted"]


def test_the_model_takes_the_block_of_least_utility_and_of_equals_the_oldest():
    index = Index()
    pool = Pool(4, index, utility=lambda block: block.number % 2)
    blocks = [pool.take() for _ in range(4)]
    for nth, block in enumerate(blocks):
        index.add((0, nth), block)
    for block in blocks:
        pool.drop(block)
    even, odd = ([block for block in blocks if block.number % 2 == part] for part in (0, 1))
    assert pool.next(3) == [*even, odd[0]]
    assert [pool.take() for _ in range(4)] == [*even, *odd]
