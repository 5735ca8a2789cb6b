"""Cases of the reference model's tests on the compiled core, where it serves the kinds and the rules they need.

One configuration, since compiling it is what costs: blocks of 64, hash unit 16, eight blocks, sixteen states, and a log
of events.
"""

import dataclasses

import jax
import numpy as np
import pytest

from hybrid_kv.cache import events
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.state import FREE_BLOCKS, OWNERS, TOLD, initial_state
from hybrid_kv.cache.statistics import count_admission, statistics
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.bench import tokens
from tests.cache.content_model import Serving, unit_keys
from tests.cache.listener import filed

CONFIG = CacheConfig(
    geometry=resolve([GroupSpec("mla", "mla", 64), GroupSpec("kda", "recurrent", 64)], hash_unit=16),
    pool_blocks=(9, 17), group_pool=(0, 1), max_requests=4, max_context=256, token_budget=128,
    events=256,
)  # fmt: skip


@pytest.fixture
def core() -> Serving:
    return Serving(CONFIG)


def serve(core: Serving, prompt, answer: int = 1) -> int:
    core.add(prompt, answer)
    core.run()
    return core.hits[-1]


def free(core: Serving) -> list[int]:
    return np.asarray(core.state.pools)[:, FREE_BLOCKS].tolist()


def references(core: Serving) -> list[int]:
    """Of the eight attention blocks, the null block left out."""
    return np.asarray(core.state.blocks)[1:9, 0].tolist()


def row_of(plan, slot: int) -> int:
    return plan.slot.tolist().index(slot)


def test_hits_are_as_fine_as_the_hash_unit_whatever_the_block(core):  # 8
    for seed, (length, hit) in enumerate(((60, 48), (32, 16), (129, 128))):
        assert serve(core, tokens(seed, length)) == 0
        assert serve(core, tokens(seed, length)) == hit


def test_a_fork_without_a_state_says_how_far_rows_reach_and_gets_one(core):  # 13
    stem = tokens(0, 80)
    serve(core, stem + tokens(1, 40))
    assert serve(core, stem + tokens(2, 40)) == 0
    assert core.admissions[-1][2:] == (80, "NO_STATE")
    assert serve(core, stem + tokens(3, 40)) == 80


def test_a_refused_allocation_keeps_nothing(core):  # 34
    core.add(tokens(0, 120), 60)
    core.add(tokens(1, 180), 60)
    core.step()
    core.step()
    slots = set(core.live)
    before = references(core), np.asarray(core.state.tables)
    assert free(core)[0] == 3
    slot = core.add(tokens(2, 200))
    plan = core.step()
    assert {int(s) for s in plan.slot[: int(plan.rows)]} == slots
    assert (references(core), free(core)[0]) == (before[0], 3) and not before[1][slot].any()
    assert np.array_equal(np.asarray(core.state.tables), before[1])
    core.run()


def test_a_shared_part_of_a_block_is_copied_before_it_is_written(core):  # 37, 43
    owner = core.add(tokens(0, 97), 30)
    plan = core.step()
    first, source = plan.tables[0][row_of(plan, owner), :2].tolist()
    rows = {at: core.rows[0][source, at] for at in range(32)}
    sharer = core.add(tokens(0, 96) + tokens(1, 5), 4)
    plan = core.step()
    row = row_of(plan, sharer)
    target = int(plan.tables[0][row, 1])
    assert plan.hit[row] == 96 and plan.copies[0][row].tolist() == [source, target] and target != source
    assert [references(core)[block - 1] for block in (first, source, target)] == [2, 1, 1]
    while sharer in core.live:
        core.step()
    assert {at: core.rows[0][source, at] for at in range(32)} == rows
    assert [references(core)[block - 1] for block in (first, source, target)] == [1, 1, 0]
    core.run()


def test_of_equal_prompts_behind_a_shared_prefix_the_second_waits_for_what_the_first_writes(core):  # 27, Z1
    serve(core, tokens(0, 17))
    twin = tokens(0, 16) + tokens(1, 50)
    first, second = core.add(twin, 3), core.add(twin, 3)
    plan = core.step()
    assert plan.rows == 1 and plan.hit[row_of(plan, first)] == 16 and plan.copies[0][0].all()
    plan = core.step()
    row = row_of(plan, second)
    assert plan.hit[row] == 64 and not plan.copies[0][row].any()
    core.run()
    assert serve(core, twin) == 64


def test_a_resume_inside_a_block_runs_on_and_names_no_skipped_boundary(core):  # 38, H6, Z3
    serve(core, tokens(0, 49))
    slot = core.add(tokens(0, 170))
    plan = core.step()
    row = row_of(plan, slot)
    assert (plan.start[row], plan.length[row]) == (48, 122)
    assert 0 != plan.read[0][row] != plan.write[0][row] != 0
    core.run()
    # Rows reach to 128 and 64 is a block's end, and neither has a state that could be taken for another.
    assert serve(core, tokens(0, 129) + tokens(1, 9)) == 48
    assert core.admissions[-1][2:] == (128, "NO_STATE")


def test_a_whole_hit_leaves_one_token_and_loses_nothing(core):  # 23
    assert [serve(core, tokens(0, count)) for count in (64, 64, 190)] == [0, 48, 64]


def test_siblings_of_an_older_state_start_in_one_step(core):  # J6
    serve(core, tokens(0, 100))
    for seed in range(1, 4):
        core.add(tokens(0, 96) + tokens(seed, 9), 2)
    plan = core.step()
    assert plan.rows == 3 and plan.hit[:3].tolist() == [96] * 3
    core.run()


def test_a_junction_gets_a_state_of_its_own(core):  # Z5, E9, E12
    base, shared = tokens(0, 60), tokens(1, 60)
    serve(core, base)
    assert serve(core, base + shared + tokens(2, 40)) == 48
    assert serve(core, base + shared + tokens(3, 40)) == 48
    assert core.admissions[-1][2:] == (112, "NO_STATE")
    assert serve(core, base + shared + tokens(4, 40)) == 112


def test_who_saved_a_tail_goes_on_in_its_own_slot(core):  # G2, G3, G4
    prompt = tokens(0, 41)
    owner, twin = core.add(prompt, 12), core.add(prompt, 3)
    plan = core.step()
    assert plan.rows == 1 and plan.slot[0] == owner
    running = int(plan.write[0][0])
    saved = [int(slot) for at, slot in zip(plan.emit_position[0], plan.emit_slot[0][0], strict=True) if at == 32]
    assert saved and running not in saved
    plan = core.step()
    row = row_of(plan, twin)
    assert plan.hit[row] == 32 and plan.read[0][row] == saved[0]
    assert plan.write[0][row_of(plan, owner)] == running != plan.write[0][row]
    core.run()
    assert serve(core, [*prompt, 9, 9]) == 32


def test_the_next_turn_resumes_behind_the_answer(core):  # I23, Z13
    slot = core.add(tokens(0, 70), 60)
    text = core.live[slot][0]
    core.run()
    assert serve(core, text + tokens(1, 20)) == 128


def test_nothing_compiles_after_the_first_steps(core):  # 97
    serve(core, tokens(0, 70), 2)
    own = core.stepper
    jitted = [core.compiled["arrive"], own._plan, own._commit_rows, own._end_rows]
    before = [jit._cache_size() for jit in jitted]
    hits = [serve(core, prompt, answer) for prompt, answer in (
        (tokens(1, 70), 2),  # no hit
        (tokens(0, 67), 2),  # one that ends at a block's end
        (tokens(0, 60), 3),  # rows without a state
        (tokens(0, 60), 3),  # a hit that ends inside a block: a copy
        (tokens(2, 60), 40),  # an answer that crosses boundaries
        (tokens(2, 60) + [5] * 9, 40),  # both
        (tokens(3, 1), 1),
    )]  # fmt: skip
    assert hits == [0, 64, 0, 48, 0, 48, 0]
    assert [jit._cache_size() for jit in jitted] == before
    assert all(isinstance(leaf, jax.Array) for leaf in core.state)


# Events and statistics


def test_every_registration_is_told_with_its_parent_and_every_loss(core):  # C1, C3
    serve(core, tokens(0, 129))
    keys = [key.astype("<u4").tobytes() for key in unit_keys(CONFIG, tokens(0, 129))]
    told, seen, _ = events.drain(CONFIG, core.state, 0)
    rows = [event for event in told if event.group == 0]
    assert [(event.key, event.unit, event.parent) for event in rows] == [
        (key, unit % 4, before) for unit, (key, before) in enumerate(zip(keys, [None, *keys], strict=False))
    ]
    assert len({event.block for event in rows}) == 2
    assert [(event.key, event.parent) for event in told if event.group == 1] == [(keys[7], keys[6])]
    serve(core, tokens(0, 129))
    assert events.drain(CONFIG, core.state, seen) == ([], seen, False)  # nothing new
    serve(core, tokens(1, 250))
    serve(core, tokens(2, 250))
    lost = [event for event in events.drain(CONFIG, core.state, seen).events if isinstance(event, events.Removed)]
    assert [event.key for event in lost[:8]] == [*keys[4:], *keys[:4]]  # the tail goes before the head
    assert core.reset() and events.drain(CONFIG, core.state, seen).events[-1] == events.Cleared()


def test_keys_of_a_step_in_flight_are_told_by_its_commit_and_those_of_a_withdrawn_one_never(core):
    core.add(tokens(0, 100))
    core.plan()
    assert (index_size(core), told(core)) == (7, 0)  # six units and a state
    core.withdraw()
    assert (index_size(core), told(core)) == (0, 0)
    plan = core.plan()
    assert (index_size(core), told(core)) == (7, 0)
    core.execute(plan)
    core.commit()
    assert (index_size(core), told(core)) == (7, 7)


def test_a_listener_that_was_too_slow_is_told_so_and_starts_again_from_what_is_filed(core):
    for seed in range(40):
        serve(core, tokens(seed, 129))
    told, seen, lost = events.drain(CONFIG, core.state, 0)
    assert lost and not told and seen > CONFIG.events
    names = {event[:4] for event in events.snapshot(CONFIG, core.state)}
    assert names == set(filed(CONFIG, core.state)) and names
    core.add(tokens(99, 100))
    core.plan()  # what it announces is not there yet
    known = {event[:4] for event in events.snapshot(CONFIG, core.state)}
    assert known == set(filed(CONFIG, core.state)) and known <= names


@pytest.mark.parametrize("start", [2**31 - 5, 2**32 - 5])
def test_the_log_goes_on_where_its_counter_wraps(core, start):
    wrapped = np.asarray(core.state.counters).copy()
    wrapped[TOLD] = np.int64(start).astype(np.int32)
    core.state = core.state._replace(counters=jax.numpy.asarray(wrapped))
    core.listener = None
    serve(core, tokens(0, 129))
    told, seen, lost = events.drain(CONFIG, core.state, start)
    assert not lost and seen == (start + 9) % 2**32
    assert {event[:4] for event in told} == set(filed(CONFIG, core.state)) and len(told) == 9


def test_there_is_no_log_unless_it_is_asked_for():
    config = dataclasses.replace(CONFIG, events=0)
    for read in (events.drain, events.snapshot):
        with pytest.raises(UserError, match="log"):
            read(config, initial_state(config), *([0] if read is events.drain else []))
    with pytest.raises(UserError, match="power of two"):
        dataclasses.replace(CONFIG, events=100)


def test_statistics_count_each_admission_once_and_a_withdrawn_one_not_at_all(core):  # A26
    serve(core, tokens(0, 129))
    core.add(tokens(0, 129), 60)
    core.add(tokens(1, 250))  # waits for blocks
    for _ in range(3):
        core.plan()
        core.withdraw()
    core.run()
    seen = statistics(CONFIG, core.state)
    assert (seen.admissions, seen.queries, seen.hits) == (3, 129 + 129 + 250, 128)
    assert seen.reasons == {Reason.COLD: 2, Reason.NONE: 1}
    assert (seen.resumes, seen.preemptions, seen.skipped_states) == (0, 0, 0)
    assert (seen.states, seen.evictions) == (3, 0)


def test_a_resume_is_counted_apart(core):
    core.add(tokens(0, 150), 100)
    core.add(tokens(1, 150), 100)
    core.add(tokens(2, 60), 100)
    core.run()
    seen = statistics(CONFIG, core.state)
    assert seen.preemptions == seen.resumes >= 1
    assert (seen.admissions, seen.queries) == (3, 360)
    assert seen.resume_queries > 60 * seen.resumes


def test_totals_of_tokens_go_beyond_31_bits():
    state, yes = initial_state(CONFIG), jax.numpy.ones((), bool)
    for _ in range(5):
        state = count_admission(state, *(jax.numpy.int32(n) for n in (2**30 - 1, 2**30 - 2, 0)), ~yes, yes)
    seen = statistics(CONFIG, state)
    assert (seen.queries, seen.hits, seen.admissions) == (5 * (2**30 - 1), 5 * (2**30 - 2), 5)
    assert seen.resumes == seen.resume_queries == 0


def index_size(core: Serving) -> int:
    return int((np.asarray(core.state.entries)[:, OWNERS:] > 0).sum())


def told(core: Serving) -> int:
    return len(events.drain(CONFIG, core.state, 0).events)
