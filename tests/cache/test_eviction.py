"""Orders of eviction are data of the state: what each promises, and that all are sound."""

import collections
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.cache import earnings, pool
from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.cache.eviction import COVERAGE, JOINT, LRU, TIED, Eviction, utility
from hybrid_kv.cache.pool import _in_order
from hybrid_kv.cache.state import (
    BITS,
    EVICTED,
    FREE_BLOCKS,
    PLACES,
    REUSED,
    SKIPPED_STATES,
    STACK_TOP,
    STAMP,
    STATE,
    initial_state,
    layout,
)
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.schedule.order import first_to_start, note_overtaken
from tests.cache.content_model import Serving
from tests.cache.test_random_traffic import traffic


def config(**more) -> CacheConfig:
    """Rows in blocks of 8 tokens and one recurrent group, in one pool; hits end at multiples of 4."""
    geometry = resolve([GroupSpec("mla", "mla", 8), GroupSpec("kda", "recurrent", 8)], hash_unit=4)
    sizes = {"pool_blocks": (48,), "max_requests": 4, "max_context": 96, "token_budget": 40}
    sizes["placement"] = Placement(ladder=(16,))
    return CacheConfig(geometry, group_pool=(0, 0), **(sizes | more))


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << 16, tokens).tolist()


def given_up(serving: Serving) -> list[int]:
    """Blocks that are free and have keys, in the order in which they would be taken."""
    free = int(serving.state.pools[0, FREE_BLOCKS]) - int(serving.state.pools[0, STACK_TOP])
    ids = jnp.zeros((free,), jnp.int32)
    return np.asarray(_in_order(serving.config, serving.state, 0, ids, jnp.int32(0), jnp.int32(free))[0]).tolist()


def what_goes(serving: Serving) -> list[str]:
    """The same as words: the rows, or the state, of the longest prefix that a block holds."""
    rows: dict[int, int] = collections.Counter()
    for block, offset in serving.rows[0]:
        rows[block] = max(rows[block], offset + 1)
    bits = np.asarray(serving.state.blocks)[:, BITS]
    return ["state" if bits[block] & STATE else f"rows {rows[block]}" for block in given_up(serving)]


@pytest.mark.parametrize(
    "eviction", [LRU, COVERAGE, JOINT, dataclasses.replace(utility(4_000.0), reused=9.0, guard=True)]
)
def test_random_traffic_is_sound_whatever_goes_first_and_whoever_starts(eviction):
    counts = traffic(config(eviction=eviction, overtake=2 if eviction.earned else 0, watermark=0.4), 0)
    assert counts["hits"] and counts["evicted"] and counts["withdrawn"]


def test_what_is_taken_next_is_the_least_useful_of_all_free_blocks():
    kept = Eviction(alpha=4.0, reused=7.0)
    cache = config(eviction=kept)
    state, rng = initial_state(cache), np.random.default_rng(0)
    state, ids = pool.take(cache, state, 0, jnp.int32(40), 40)
    bits = rng.choice([0, REUSED, STATE, STATE | 1 << 4, STATE | 2 << 4, STATE | REUSED], 40)
    blocks = state.blocks.at[ids, BITS].set(jnp.asarray(bits, jnp.int32)).at[ids, PLACES].set(1)
    state = pool.release(cache, state._replace(blocks=blocks), 0, jnp.asarray(rng.permutation(np.asarray(ids))))
    worth = np.select(
        [bits & REUSED > 0, bits == STATE, bits == STATE | 1 << 4],
        [kept.stays[4], kept.stays[1], kept.stays[2]],
        kept.stays[3],
    )
    useful = dict(zip(np.asarray(ids).tolist(), worth + np.asarray(state.blocks)[np.asarray(ids), STAMP], strict=True))
    taken = np.asarray(_in_order(cache, state, 0, jnp.zeros((40,), jnp.int32), jnp.int32(0), jnp.int32(40))[0])
    assert sorted(taken) == sorted(useful)
    assert [useful[block] for block in taken] == sorted(useful.values())


def test_a_superseded_state_that_is_no_fork_goes_first_of_all_where_coverage_counts():
    serving = Serving(config(eviction=COVERAGE))
    slot = serving.add(prompt(0, 21), 4)
    said = serving.live[slot][0]
    serving.run()
    serving.add(prompt(1, 8), 1)
    serving.run()
    serving.add([*said, *prompt(2, 20)], 4)
    serving.run()
    bits = np.asarray(serving.state.blocks)[given_up(serving)[0], BITS]
    assert bits & (STATE | REUSED) == STATE | REUSED


def test_a_prefix_goes_from_its_end_and_its_states_with_their_rows():
    serving = Serving(config(eviction=TIED))
    serving.add(prompt(0, 30), 4)
    serving.run()
    # States at 16 (the ladder), 28 (the prompt's end) and 32 (the turn's end), and four blocks of rows.
    assert what_goes(serving) == ["state", "state", "rows 8", "rows 8", "state", "rows 8", "rows 8"]
    plain = Serving(config(eviction=LRU))
    plain.add(prompt(0, 30), 4)
    plain.run()
    assert what_goes(plain)[:2] == ["state", "state"] and what_goes(plain)[2:6] != what_goes(serving)[2:6]


def test_rows_behind_the_last_state_go_before_everything_else():
    serving = Serving(config(eviction=TIED, placement=Placement(turn_end=False, ladder=(16,))))
    serving.add(prompt(0, 30), 1)
    serving.run()
    older = set(given_up(serving))
    serving.add(prompt(1, 20), 24)  # a state at 20; rows up to 43 are behind it
    serving.run()
    first = given_up(serving)[:2]
    assert not older & set(first) and not set(np.asarray(serving.state.blocks)[first, BITS] & STATE) - {0}


def test_a_superseded_state_goes_before_the_chain_that_went_on():
    serving = Serving(config(eviction=TIED))
    slot = serving.add(prompt(0, 21), 4)
    said = serving.live[slot][0]
    serving.run()
    old = set(given_up(serving))
    serving.add([*said, *prompt(1, 20)], 4)
    serving.run()
    bits = np.asarray(serving.state.blocks)[:, BITS]
    assert serving.hits[-1] == 24
    order = given_up(serving)
    states = [block for block in order if bits[block] & STATE]
    superseded = [block for block in states if block in old]
    chain = [block for block in order if block not in superseded and not (block in old and bits[block] & STATE)]
    live = [block for block in states if block not in old]
    assert superseded and max(map(order.index, superseded)) < min(map(order.index, live))
    assert max(map(order.index, superseded)) < max(map(order.index, chain))


@pytest.mark.parametrize("guard", [True, False])
def test_a_state_touched_once_displaces_no_reused_one_if_those_are_guarded(guard):
    kept = dataclasses.replace(TIED, guard=guard)
    placement = Placement(turn_end=False, ladder=(16,))
    serving = Serving(config(pool_blocks=(10,), eviction=kept, placement=placement))
    for _ in range(2):
        serving.add(prompt(0, 34), 1)  # five blocks of rows and states at 16 and 32, the latter read again
        serving.run()
    assert serving.hits == [0, 32]
    serving.add(prompt(1, 20), 1)  # three blocks of rows and a running state: what is left is that state
    serving.run()
    state = serving.state
    reused = np.asarray(state.blocks)[:, BITS] & (STATE | REUSED) == STATE | REUSED
    assert reused.any() == guard and (int(state.counters[SKIPPED_STATES]) > 0) == guard


def test_kinds_of_states_that_nobody_comes_back_to_are_saved_for_a_sample_only():
    cache = config(eviction=JOINT)
    state = initial_state(cache)
    yes = jnp.ones((), bool)
    for _ in range(20):
        state = earnings.note_saved(cache, state, earnings.TURN, yes)
        state = earnings.note_saved(cache, state, earnings.TAIL, yes)
        state = earnings.note_hit(cache, state, jnp.int32(earnings.TAIL), jnp.int32(5), yes)

    def saved(state, kind, seq=1):
        return bool(earnings.is_worth_saving(cache, state, kind, jnp.int32(seq)))

    assert saved(state, earnings.TURN), "nothing was evicted yet"
    state = state._replace(counters=state.counters.at[EVICTED].set(1))
    assert [saved(state, kind) for kind in (earnings.FORK, earnings.TAIL, earnings.TURN)] == [True, True, False]
    assert saved(state, earnings.TURN, seq=64) and saved(state, earnings.RUNGS), "a sample, and what is not judged yet"
    for _ in range(10):
        state = earnings.note_hit(cache, state, jnp.int32(earnings.TURN), jnp.int32(5), yes)
    assert saved(state, earnings.TURN), "it has become worth more"


def test_the_request_of_which_most_is_cached_starts_first_until_the_oldest_was_passed_often_enough():
    cache = config(overtake=2)
    fields, state = layout(cache), initial_state(cache)
    requests = state.requests.at[fields.STATUS, :3].set(1).at[fields.SEQ, :3].set(jnp.array([7, 5, 6]))
    state = state._replace(requests=requests)
    waiting, cached = jnp.array([True, True, True, False]), jnp.array([0.9, 0.1, 0.5, 1.0], jnp.float32)
    passed = []
    for _ in range(3):
        row = first_to_start(cache, state, waiting, cached)
        passed.append(int(row))
        state = note_overtaken(cache, state, row, jnp.ones((), bool))
    assert passed == [0, 0, 1]
    same = jnp.zeros((4,), jnp.float32)
    assert int(first_to_start(cache, initial_state(cache)._replace(requests=requests), waiting, same)) == 1
