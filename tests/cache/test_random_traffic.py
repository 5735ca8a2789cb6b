"""Random shared-prefix traffic never reads content of another prefix and leaks nothing."""

import collections
import functools

import numpy as np
import pytest

from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.cache.drafts import Draft
from hybrid_kv.cache.emission import EmissionCapability
from hybrid_kv.cache.lookup import SKIP_READ
from hybrid_kv.cache.state import CLOCK, EVICTED, FREE_BLOCKS, PREEMPTED, policy_of
from hybrid_kv.cache.statistics import statistics
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.content_model import Serving


@functools.cache
def _config(
    dcp: int, groups: int, shared: bool, unit: int, ladder: tuple[int, ...], positions: tuple[int, ...] = (), **more
) -> CacheConfig:
    specs = [GroupSpec("mla", "mla", 8)]
    specs += [GroupSpec(f"kda{i}", "recurrent", 8) for i in range(groups)]
    pools = (36 // dcp + 70 * shared,) + (() if shared else (12,) * groups)
    group_pool = (0,) * (1 + groups) if shared else tuple(range(1 + groups))
    return CacheConfig(
        geometry=resolve(specs, dcp=dcp, hash_unit=unit),
        pool_blocks=pools,
        group_pool=group_pool,
        max_requests=4,
        max_context=96,
        token_budget=40,
        placement=Placement(ladder=ladder, positions=positions),
        **more,
    )


def _kinds(specs: list[GroupSpec], blocks: int, dcp: int = 1, **more) -> CacheConfig:
    """All groups in one pool of `blocks` blocks, hash unit 4."""
    sizes = {"max_requests": 4, "max_context": 96, "token_budget": 40}
    geometry = resolve(specs, dcp=dcp, hash_unit=4)
    return CacheConfig(geometry, (blocks,), (0,) * len(specs), **(sizes | more))


CONFIGS = {
    "plain": _config(1, 1, False, 8, ()),
    "partial hits, striped, loads, two steps in flight": _config(
        2, 1, False, 4, (16,), loads=True, steps_in_flight=2, events=256
    ),
    "one pool for all, one state a chunk": _config(
        2, 2, True, 8, (16,), (24, 40), chunk_limit=24, emission=EmissionCapability(1, 8, anchored=False)
    ),
    "admitted by the chunk": _config(1, 1, False, 8, (16,), (32, 8), whole_prompts=False, chunk_limit=16),
    "coarse windows, every block kept, loads, two steps in flight": _kinds(
        [
            GroupSpec("full", "full", 8),
            GroupSpec("swa", "sliding_window", 8, window=11),
            GroupSpec("local", "chunked_local", 4, window=16),
            GroupSpec("gdn", "recurrent", 8),
        ],
        70,
        steps_in_flight=2,
        loads=True,
        placement=Placement(retention=None),
    ),
    "windows alone": _kinds([GroupSpec("swa", "sliding_window", 4, window=8)], 22, placement=Placement(retention=8)),
    "drafts, dropped, two steps in flight": _kinds(
        [GroupSpec("mla", "mla", 8), GroupSpec("draft", "mla", 4, draft=True), GroupSpec("kda", "recurrent", 8)],
        40,
        dcp=2,
        steps_in_flight=2,
        draft=Draft.DROP,
        max_drafts=3,
        slots_ahead=3,
        whole_prompts=False,
        chunk_limit=10,
        placement=Placement(retention=16, positions=(24,)),
        events=512,
    ),
    "drafts, lookahead, priority, states at the ends of chunks": _kinds(
        [
            GroupSpec("mla", "mla", 8, draft=True),
            GroupSpec("kda", "recurrent", 4),
            GroupSpec("swa", "sliding_window", 4, window=9),
        ],
        56,
        draft=Draft.LOOKAHEAD,
        lookahead=2,
        max_drafts=5,
        slots_ahead=3,
        priority=True,
        emission=EmissionCapability(0, 1, anchored=True),
        events=256,
    ),
}


def traffic(config: CacheConfig, seed: int) -> collections.Counter[str]:
    """Random requests with shared prompts, withdrawals, aborts and resets, to the end; counts what happened.

    Raises AssertionError for a wrong read, a broken invariant, a stall or a leak.
    """
    rng = np.random.default_rng(seed)
    serving = Serving(config, seed, steady=True)
    if seed % 2:
        # The clock of releases goes round.
        serving.state = serving.state._replace(counters=serving.state.counters.at[CLOCK].set((1 << 31) - 300))
    stems = [rng.integers(0, 3, 60) for _ in range(2)]
    queue = []
    for _ in range(25):
        stem = stems[rng.integers(2)][: rng.integers(0, 60)]
        prompt = np.concatenate([stem, rng.integers(0, 3, rng.integers(1, 25))])
        queue += [(prompt, int(rng.integers(1, 10)))] * int(rng.integers(1, 3))
    free = np.asarray(serving.state.pools)[:, FREE_BLOCKS].copy()
    counts: collections.Counter[str] = collections.Counter(requests=len(queue))
    for _ in range(4000):
        taken = len(serving.live.keys() | serving.loads.keys())
        while queue and taken < config.max_requests and rng.random() < 0.7:
            prompt, answer = queue.pop()
            slot = serving.add(prompt, answer, priority=int(rng.integers(0, 3)))
            taken += 1
            if config.loads and rng.random() < 0.4:
                load = serving.restore(slot, int(rng.integers(1, len(prompt) + 1)) // 4 * 4)
                counts["loads"] += int(load.tokens > 0)
        for slot in [slot for slot in serving.loads if rng.random() < 0.3]:
            length = int(serving.loads[slot][0].tokens)
            good = [int(rng.choice([length, length, length, length // 2])) for _ in config.geometry.groups]
            serving.bring(slot, good)
        if not serving.live and not serving.loads:
            if not queue:
                break
            continue
        plan = serving.plan()
        counts["steps"] += 1
        preempting = config.steps_in_flight > 1 and rng.random() < 0.05
        if preempting:
            serving.preempt_running()
            assert serving.reset() == (not serving.loads)
        if plan.rows and rng.random() < (0.3 if preempting else 0.05):
            serving.withdraw()
            counts["withdrawn"] += 1
            continue
        serving.execute(plan)
        if serving.live and rng.random() < 0.05:
            serving.abort(int(rng.choice(list(serving.live))))
            counts["aborted"] += 1
        if len(serving.flying) >= config.steps_in_flight or (serving.flying and not plan.rows):
            serving.commit()
        serving.assert_sound()
    assert not serving.live and not queue, "requests are left"
    while serving.flying:
        serving.commit()
    assert np.array_equal(np.asarray(serving.state.pools)[:, FREE_BLOCKS], free), "blocks are left in use"
    totals = np.asarray(serving.state.counters)
    _same_statistics(serving)
    counts.update(
        steady=serving.steady_steps,
        hits=sum(serving.hits),
        evicted=int(totals[EVICTED]),
        preempted=int(totals[PREEMPTED]),
    )
    return counts


def _same_statistics(serving: Serving) -> None:
    """What the core has counted is what the plans that ran have said."""
    seen = statistics(serving.config, serving.state)
    assert seen.admissions + seen.resumes == len(serving.admissions)
    assert seen.hits + seen.resume_hits == sum(serving.hits)
    reasons = collections.Counter(reason for _, _, _, reason in serving.admissions)
    assert {reason.name: count for reason, count in seen.reasons.items()} == reasons


# The plain one is served beside other orders of eviction, see test_utility.
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "plain"])
def test_random_traffic_is_sound_and_leaves_nothing_behind(name):
    counts = sum((traffic(CONFIGS[name], seed) for seed in range(2)), collections.Counter())
    assert counts["hits"] and counts["evicted"] and counts["withdrawn"] and counts["aborted"] and counts["steady"]


def test_the_next_turn_resumes_where_a_drafter_can_prove_the_end_of_the_last_one():
    serving = Serving(CONFIGS["drafts, dropped, two steps in flight"])
    slot = serving.add(np.random.default_rng(0).integers(0, 3, 20), 15)
    tokens = serving.live[slot][0]
    serving.run()
    # 35 tokens are known and 34 computed; the state at 32 is proven by one unit more, so it is the one before.
    serving.add([*tokens, 0, 1, 2])
    serving.run()
    assert serving.hits == [0, 28]


@pytest.mark.parametrize("answer", [1, 12])
def test_a_copy_that_is_let_go_takes_no_content_away_that_another_request_keeps(answer):
    config = CONFIGS["windows alone"]
    serving = Serving(config)
    serving.state = serving.state._replace(policy=policy_of(config, Placement(retention=0)))
    prompt = np.random.default_rng(0).integers(0, 3, 61).tolist()
    serving.add(prompt[:21], answer)
    serving.step()
    serving.add(prompt, flags=SKIP_READ)  # it files all units anew, and needs none of the first ones in the end
    serving.run()
    serving.add(prompt[:21])
    serving.run()
    assert serving.hits == [0, 0, 20]


def test_a_block_of_a_window_that_a_load_has_brought_can_be_found_by_any_of_its_units():
    serving = Serving(CONFIGS["coarse windows, every block kept, loads, two steps in flight"])
    serving.add(range(17))
    serving.run()
    slot = serving.add(range(30))
    # The token at 24 reads rows from 14 on; another request reads all of the block that 14 lies in.
    assert serving.restore(slot, 24).first.tolist() == [16, 8, 16, 24]
    serving.bring(slot)
    serving.run()
    serving.add([*range(16), 99])
    serving.run()
    assert serving.hits == [0, 24, 16]
