"""Rules of the state machine, one test each: publish, share, evict, preempt, resume, refuse."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.cache import index, transitions
from hybrid_kv.cache.checkpoints import wanted_points
from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.cache.lookup import SALTED, SKIP_READ
from hybrid_kv.cache.state import FREE_BLOCKS, USABLE, initial_state
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.content_model import Serving


@functools.cache
def config(blocks=41, states=13, unit=16, caching=True, requests=4, **more) -> CacheConfig:
    specs = [GroupSpec("mla", "mla", 16), GroupSpec("kda", "recurrent", 16)]
    return CacheConfig(
        geometry=resolve(specs, hash_unit=unit),
        pool_blocks=(blocks, states),
        group_pool=(0, 1),
        max_requests=requests,
        max_context=256,
        token_budget=more.pop("token_budget", 128),
        prefix_caching=caching,
        **more,
    )


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 20, length)


def serve(serving: Serving, tokens, answer=1) -> int:
    serving.add(tokens, answer)
    serving.run()
    return serving.hits[-1]


def free(serving: Serving) -> list[int]:
    return np.asarray(serving.state.pools)[:, FREE_BLOCKS].tolist()


def test_an_aborted_step_publishes_nothing_and_a_committed_one_all():
    serving = Serving(config())
    tokens = prompt(0, 200)
    slot = serving.add(tokens)
    plan = serving.plan()
    serving.execute(plan)
    serving.abort(slot)
    serving.commit()
    assert serve(serving, tokens) == 0
    serving = Serving(config())
    slot = serving.add(tokens)
    serving.step()
    serving.abort(slot)
    serving.assert_sound()
    # The running state it had reached is kept as well.
    assert serve(serving, tokens) == 128


def test_a_withdrawn_step_is_planned_again():
    serving = Serving(config())
    serving.add(prompt(0, 100))
    before = serving.plan()
    serving.withdraw()
    serving.assert_sound()
    again = serving.plan()
    assert before.start[0] == again.start[0] and before.length[0] == again.length[0]
    serving.execute(again)
    serving.commit()
    serving.assert_sound()


def test_the_second_of_two_equal_prompts_waits_for_the_state_the_first_one_saves():
    serving = Serving(config())
    for _ in range(2):
        serving.add(prompt(0, 60))
    assert serving.step().rows == 1
    assert serving.step().hit[0] == 48
    assert serving.hits == [0, 48]


def test_whole_blocks_of_rows_are_shared_in_the_step_that_writes_them():
    specs = [GroupSpec("mla", "mla", 16)]
    serving = Serving(CacheConfig(resolve(specs), (41,), (0,), max_requests=4, max_context=256, token_budget=256))
    for _ in range(2):
        serving.add(prompt(0, 60))
    assert serving.step().rows == 2
    assert serving.hits == [0, 48]


def test_an_aborted_writer_leaves_nothing_to_find_but_its_sharer_goes_on():
    specs = [GroupSpec("mla", "mla", 16)]
    serving = Serving(CacheConfig(resolve(specs), (41,), (0,), max_requests=4, max_context=256, token_budget=256))
    writer = serving.add(prompt(0, 60), 5)
    serving.add(prompt(0, 60), 5)
    plan = serving.plan()
    serving.execute(plan)
    serving.abort(writer)
    serving.commit()
    serving.assert_sound()
    serving.run()
    assert serving.hits == [0, 48]


def test_a_whole_hit_leaves_one_token_and_the_chain_goes_on():
    serving = Serving(config())
    tokens = prompt(0, 64)
    assert serve(serving, tokens) == 0
    assert serve(serving, tokens) == 48
    assert serve(serving, [*tokens, *prompt(1, 64)]) == 64


def test_the_next_turn_resumes_at_the_end_of_the_answer():
    serving = Serving(config())
    slot = serving.add(prompt(0, 40), 60)
    tokens = serving.live[slot][0]
    serving.run()
    assert serve(serving, [*tokens, 1, 2, 3]) == 96


def test_without_turn_end_the_next_turn_resumes_at_the_prompt():
    serving = Serving(config(placement=Placement(turn_end=False)))
    slot = serving.add(prompt(0, 40), 60)
    tokens = serving.live[slot][0]
    serving.run()
    assert serve(serving, [*tokens, 1, 2, 3]) == 32


def test_a_hole_ends_the_hit():
    serving = Serving(config(unit=16))
    tokens = prompt(0, 65)
    serve(serving, tokens)
    chain = np.asarray(serving.state.keys)
    block = index.find(serving.state, jnp.asarray(chain[0, 1:2])).blocks[:, 0]
    serving.state = index.remove_blocks(serving.state, block)
    assert serve(serving, tokens) == 0
    assert serving.admissions[-1][2:] == (16, "NO_STATE")


def test_least_recently_used_content_goes_first_and_hits_count_as_use():
    serving = Serving(config(blocks=8, states=10, max_active=1))
    first, second, third = (prompt(seed, 33) for seed in range(3))
    for tokens in (first, second, third, first):
        serve(serving, tokens)
    serve(serving, prompt(9, 33))
    assert serve(serving, first) == 32
    assert serve(serving, second) == 0
    assert serving.admissions[-1][3] == "EVICTED"


def test_unkeyed_blocks_are_reused_first_then_the_tail_of_a_prefix_before_its_head():
    """Numbers of the reference: 11 blocks of 16, prompts of 55 and 53 tokens sharing 48."""
    serving = Serving(config(blocks=11, states=20, placement=Placement(tail=True, turn_end=False)))
    head = prompt(0, 48)
    serving.add([*head, *prompt(1, 7)], 3)
    first = serving.step()
    assert first.tables[0][0, :4].tolist() == [1, 2, 3, 4]
    serving.add([*head, *prompt(2, 5)], 3)
    second = serving.step()
    row = [int(s) for s in second.slot].index(1)
    assert second.hit[row] == 48 and second.tables[0][row, :4].tolist() == [1, 2, 3, 5]
    serving.run()
    order = []
    serving.add(prompt(3, 159), 1)
    while serving.live:
        plan = serving.step()
        order = plan.tables[0][0, :10].tolist()
    assert order[:7] == [5, 4, 6, 7, 8, 9, 10] or order[:7] == [4, 5, 6, 7, 8, 9, 10]
    assert order[7:] == [3, 2, 1]


def test_a_block_hit_is_never_evicted_by_the_same_admission():
    serving = Serving(config(blocks=5, states=8, max_active=1))
    serve(serving, prompt(0, 33))
    assert serve(serving, [*prompt(0, 33)[:32], *prompt(1, 20)]) == 32


def test_preempted_requests_resume_with_prompt_and_answer_and_counts_return():
    serving = Serving(config(blocks=16, states=13))
    start = free(serving)
    for seed in range(4):
        serving.add(prompt(seed, 50), 60)
    serving.run()
    assert serving.preemptions > 0
    assert free(serving) == start


def test_states_are_optional_and_never_stop_a_request():
    serving = Serving(config(blocks=60, states=6))
    start = free(serving)
    for seed in range(3):
        serving.add(prompt(seed, 100), 40)
    serving.run()
    assert serving.preemptions == 0 and free(serving) == start
    assert np.asarray(serving.state.counters)[4] > 0


def test_a_budget_below_the_block_still_makes_progress():
    serving = Serving(config(token_budget=5))
    serving.add(prompt(0, 100))
    assert serving.run() == 20
    assert serve(serving, prompt(0, 100)) == 96


def test_chunks_are_never_cut_for_a_state():
    serving = Serving(config(token_budget=100, placement=Placement(ladder=(32, 64))))
    serving.add(prompt(0, 230))
    lengths = []
    while serving.live:
        lengths.append(int(serving.step().length[0]))
    assert lengths == [100, 100, 30]


@pytest.mark.parametrize("unit", [4, 16])
def test_a_partial_hit_copies_before_it_writes(unit):
    serving = Serving(config(unit=unit))
    serve(serving, prompt(0, 42))
    shared = 40 // unit * unit
    serving.add([*prompt(0, 42)[:41], *prompt(1, 10)])
    plan = serving.step()
    assert plan.hit[0] == shared
    assert (plan.copies[0][0] > 0).all() == (shared % 16 > 0)
    serving.run()


def test_interior_boundaries_of_a_large_block_are_hit():
    specs = [GroupSpec("mla", "mla", 16)]
    geometry = resolve(specs, dcp=8, hash_unit=16)
    serving = Serving(
        CacheConfig(
            geometry=geometry, pool_blocks=(9,), group_pool=(0,), max_requests=1, max_context=512, token_budget=512
        )
    )
    serve(serving, prompt(0, 300))
    assert serve(serving, [*prompt(0, 300)[:150], *prompt(1, 50)]) == 144


def test_reasons_of_a_miss():
    serving = Serving(config())
    serve(serving, prompt(0, 40))
    serve(serving, prompt(0, 10))
    serving.add(prompt(0, 40), flags=SKIP_READ)
    serving.run()
    serving.add(prompt(5, 40), flags=SALTED)
    serving.run()
    serve(serving, prompt(0, 40))
    assert [a[3] for a in serving.admissions] == ["COLD", "GRANULARITY", "SKIPPED", "SALT", "NONE"]
    off = Serving(config(caching=False))
    for _ in range(2):
        assert serve(off, prompt(0, 40)) == 0
    assert off.admissions[-1][3] == "CACHING_OFF"


def test_arriving_without_a_free_slot_changes_nothing():
    serving = Serving(config(requests=1))
    serving.add(prompt(0, 40))
    keys = jnp.zeros((serving.config.units, 4), jnp.uint32)
    state, slot = transitions.arrive(serving.config, serving.state, jnp.int32(3), jnp.int32(0), keys)
    assert int(slot) == -1
    assert all(np.array_equal(a, b) for a, b in zip(state, serving.state, strict=True))


def test_reset_is_refused_while_a_request_runs_and_forgets_all_after():
    serving = Serving(config())
    serving.add(prompt(0, 40), 5)
    serving.step()
    state, done = transitions.reset(serving.config, serving.state)
    assert not done and all(np.array_equal(a, b) for a, b in zip(state, serving.state, strict=True))
    serving.run()
    serving.state, done = transitions.reset(serving.config, serving.state)
    assert done
    serving.assert_sound()
    assert serve(serving, prompt(0, 40)) == 0


def test_running_requests_wait_again_and_a_reset_forgets_what_they_held():  # L6
    serving = Serving(config())
    slots = [serving.add(prompt(seed, 90 + seed), 9) for seed in range(2)]
    for _ in range(3):
        serving.step()
    plan = serving.plan()
    serving.execute(plan)
    known = [list(serving.live[slot][0]) for slot in slots]
    serving.state = transitions.preempt_running(serving.config, serving.state)
    serving.state, done = transitions.reset(serving.config, serving.state)
    assert done and free(serving) == [40, 12]
    # The step in flight gives its tokens and files nothing.
    serving.commit()
    assert [len(serving.live[slot][0]) for slot in slots] == [len(tokens) + 1 for tokens in known]
    admitted = len(serving.admissions)
    serving.run()
    assert serving.admissions[admitted:] == [(slots[0], 0, 0, "COLD"), (slots[1], 0, 0, "COLD")]


def test_drafts_give_way_where_their_rows_find_no_blocks():
    geometry = resolve([GroupSpec("mla", "mla", 4)])
    small = CacheConfig(
        geometry, (5,), (0,), max_requests=1, max_context=64, token_budget=64, max_drafts=3, slots_ahead=0
    )
    serving = Serving(small)
    serving.add(prompt(0, 10), 6)  # four blocks at its longest, as many as there are
    serving.run(steps=20)
    assert not serving.live and serving.preemptions == 0


def test_pools_and_placements_of_like_sizes_share_a_program():
    one, other = config(blocks=11, states=20), config(placement=Placement(tail=False, turn_end=False))
    assert one.program == other.program != config(requests=5).program
    assert np.asarray(initial_state(one).pools)[:, USABLE].tolist() == [10, 19]


def test_limits_hold_while_others_run():
    alone = Serving(config(max_active=1))
    for seed in range(2):
        alone.add(prompt(seed, 20), 2)
    assert [alone.step().rows for _ in range(3)] == [1, 1, 1] and alone.hits == [0, 0]
    spaced = Serving(config(prefill_interval=3))
    spaced.add(prompt(0, 20), 9)
    spaced.step()
    spaced.add(prompt(1, 20))
    assert [spaced.step().rows for _ in range(3)] == [1, 1, 2]
    careful = Serving(config(watermark=0.6))
    careful.add(prompt(0, 20), 3)
    careful.step()
    careful.add(prompt(1, 250), 1)  # 16 of 38 free blocks, and 24 have to stay free
    assert [int(careful.step().slot[0]) for _ in range(3)] == [0, 0, 1]
    bounded = Serving(config(chunk_limit=32))
    bounded.add(prompt(0, 100), 1)
    assert bounded.step().length[0] == 100
    for seed in (1, 2):
        bounded.add(prompt(seed, 100), 1)
    assert bounded.step().length[:2].tolist() == [32, 32]


def test_the_state_has_few_arrays_and_starts_clean():
    state = initial_state(config())
    assert len(state) == 13
    Serving(config()).assert_sound()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pool_blocks": (1, 5)}, "pool_blocks[0]"),
        ({"group_pool": (0,)}, "group_pool"),
        ({"group_pool": (0, 0)}, "group_pool"),
        ({"token_budget": 3}, "token_budget: got 3; every one of 4"),
        ({"max_requests": 0}, "max_requests"),
        ({"placement": Placement(ladder=(24,))}, "placement.ladder: got 24"),
        ({"placement": Placement(retention=24)}, "placement.retention: got 24"),
        ({"max_active": 0}, "max_active: got 0"),
        ({"prefill_interval": 0}, "prefill_interval: got 0"),
        ({"watermark": 1.0}, "watermark: got 1.0"),
        ({"lookahead": 1}, "lookahead: got 1"),
        ({"max_drafts": -1}, "max_drafts: got -1"),
    ],
)
def test_configurations_that_cannot_work_are_refused(change, words):
    base = {
        "geometry": resolve([GroupSpec("mla", "mla", 16), GroupSpec("kda", "recurrent", 16)]),
        "pool_blocks": (5, 5),
        "group_pool": (0, 1),
        "max_requests": 4,
        "max_context": 64,
        "token_budget": 64,
    }
    with pytest.raises(UserError) as refusal:
        CacheConfig(**(base | change))
    assert words in str(refusal.value)


def test_an_optional_turn_end_state_never_makes_a_request_wait():
    steps = {}
    for turn_end in (False, True):
        serving = Serving(config(states=3, placement=Placement(turn_end=turn_end)))
        serving.add(prompt(0, 10), 40)
        for _ in range(20):
            serving.step()
        slot = serving.add(prompt(1, 10), 3)
        steps[turn_end] = 0
        while slot in serving.live:
            serving.step()
            steps[turn_end] += 1
        serving.run()
    assert steps[True] == steps[False] == 3


def test_evicting_an_old_copy_does_not_hide_a_newer_one():
    specs = [GroupSpec("mla", "mla", 32), GroupSpec("kda", "recurrent", 16)]
    geometry = resolve(specs, hash_unit=16)
    serving = Serving(CacheConfig(geometry, (20, 20), (0, 1), max_requests=2, max_context=256, token_budget=256))
    stem = prompt(0, 16)
    serve(serving, [*stem, *prompt(1, 17)])
    key = jnp.asarray(np.asarray(serving.state.keys)[0, 0])
    old = int(index.find(serving.state, key).blocks[0])
    serving.add([*stem, *prompt(2, 17)], flags=SKIP_READ)
    serving.run()
    newest = int(index.find(serving.state, key).blocks[0])
    assert 0 < old != newest > 0
    serve(serving, [*stem, *prompt(3, 17)])
    newest = int(index.find(serving.state, key).blocks[0])
    serving.add([*stem, *prompt(4, 17)])
    plan = serving.step()
    assert plan.hit[0] == 16 and int(plan.copies[0][0, 0]) == newest
    serving.run()


def test_a_resumed_request_keeps_the_boundaries_of_all_it_knows():
    none = jnp.zeros((config().placement.junctions,), jnp.int32)
    wanted = wanted_points(config(), initial_state(config()), jnp.int32(20), jnp.int32(32), jnp.int32(0), none)
    assert sorted(int(n) for n in wanted if n) == [16, 32]


def test_the_outcome_of_a_lookup_survives_a_withdrawn_step():
    serving = Serving(config())
    serve(serving, prompt(0, 40))
    serving.add(prompt(0, 40))
    serving.plan()
    serving.withdraw()
    serving.run()
    assert serving.hits == [0, 32]


def test_no_step_is_planned_while_as_many_as_may_be_are_in_flight():
    serving = Serving(config())
    serving.add(prompt(0, 10), 5)
    serving.step()
    plan = serving.plan()
    assert plan.rows == 1 and serving.plan().rows == 0
    serving.execute(plan)
    serving.commit()
    serving.assert_sound()
    serving.run()
