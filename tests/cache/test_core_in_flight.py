"""Two steps in flight, and loads beside them, on the compiled core; decisive numbers name their case."""

import dataclasses

import numpy as np
import pytest

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.state import BROUGHT, FREE, FREE_BLOCKS, LAST_PREFILL, RUNNING, WAITING, layout
from hybrid_kv.cache.statistics import statistics
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.content_model import Serving

GEOMETRY = resolve([GroupSpec("mla", "mla", 4), GroupSpec("kda", "recurrent", 4)], hash_unit=4)
# Rows alone, two units a block.
COARSE = resolve([GroupSpec("mla", "mla", 8)], hash_unit=4)


def serving(blocks=(21, 21)) -> Serving:
    """All tests share one program: pools of up to 64 blocks do."""
    return Serving(
        CacheConfig(
            GEOMETRY, blocks, (0, 1), max_requests=4, max_context=128, token_budget=64,
            max_drafts=3, steps_in_flight=2, loads=True,
        )
    )  # fmt: skip


def column(core: Serving, slot: int, name: int) -> int:
    return int(core.state.requests[name, slot])


def free(core: Serving) -> list[int]:
    return [int(n) for n in core.state.pools[:, FREE_BLOCKS]]


def settle(core: Serving) -> None:
    while core.flying:
        core.commit()
    core.assert_sound()


def ask(core: Serving, *drafts: int) -> None:
    """Drafts of the lowest slots for their next rows."""
    wanted = np.zeros(core.config.max_requests, np.int32)
    wanted[: len(drafts)] = drafts
    core.state = core.compiled["propose"](core.state, wanted)


def plan(core: Serving) -> list[tuple[int, int, int, int]]:
    """Plan a step and run it: slot, start, length and slack of every row."""
    step = core.plan()
    core.execute(step)
    core.assert_sound()
    return [tuple(int(part[i]) for part in (step.slot, step.start, step.length, step.slack)) for i in range(step.rows)]


def test_a_step_is_planned_on_tokens_that_are_not_sampled_yet():  # K2
    core = serving()
    core.add(range(7), 4)
    assert [plan(core), plan(core)] == [[(0, 0, 7, 0)], [(0, 7, 1, 0)]]
    assert plan(core) == [], "as many steps are in flight as may be"
    fields = layout(core.config)
    assert (column(core, 0, fields.COMPUTED), column(core, 0, fields.KNOWN)) == (0, 7)
    core.commit()
    assert (column(core, 0, fields.COMPUTED), column(core, 0, fields.KNOWN)) == (7, 8)
    settle(core)


def test_a_step_is_found_once_it_is_committed_and_not_before():  # K10
    core = serving()
    core.add(range(9), 9)
    plan(core), plan(core)
    core.commit()
    core.add([*range(8), 99])
    core.run()
    assert core.hits == [0, 8]


def test_no_row_is_planned_behind_the_longest_answer():  # K7, K10
    core = serving()
    core.add(range(7), 2)
    plan(core), plan(core)
    core.commit()
    assert plan(core) == []
    settle(core)
    assert free(core) == [20, 20] and not core.live


def test_drafts_in_flight_that_are_refused_move_the_next_row_back():
    core = serving()
    core.add(range(7), 60)
    plan(core)
    ask(core, 3)
    assert plan(core) == [(0, 7, 4, 0)]
    core.commit()
    ask(core, 3)
    accepted = len(core.flying[0].sampled[0]) - 1
    assert plan(core) == [(0, 11, 4, 3)]
    core.commit()
    assert column(core, 0, layout(core.config).COMPUTED) == 8 + accepted
    core.run()


def test_a_request_that_ended_leaves_a_row_in_flight_and_nothing_else():
    core = serving()
    slot = core.add(range(7), 30)
    core.runs[slot].limit = core.live[slot][1] = 8  # it samples a stop token, which nobody could foresee
    plan(core), plan(core)
    core.commit()
    assert free(core) == [20, 20] and not core.live
    other = core.add(range(50, 60), 2)
    assert other == slot, "the slot is free before the row that is still on its way has run"
    core.run()
    settle(core)


def test_the_state_of_a_turn_outlives_a_row_behind_its_end():
    core = serving()
    slot = core.add(range(6), 30)
    tokens = core.live[slot][0]
    core.runs[slot].limit = core.live[slot][1] = 13  # 12 computed; the row of the 13th is on its way when it ends
    core.run()
    settle(core)
    core.add([*tokens[:12], 99])
    core.run()
    assert core.hits == [0, 12]


def test_tokens_of_a_preempted_request_are_delivered_and_it_is_admitted_again_after_them():  # K8, K10
    core = serving(blocks=(6, 10))
    core.add(range(11), 6), core.add([7] * 6, 6)
    assert plan(core) == [(0, 0, 11, 0), (1, 0, 6, 0)]
    plan(core)
    core.commit()
    assert [row[:2] for row in plan(core)] == [(0, 12)]  # the thirteenth token of a needs the block that b has
    status = layout(core.config).STATUS
    assert column(core, 1, status) == WAITING and len(core.live[1][0]) == 7
    core.commit()
    assert len(core.live[1][0]) == 8
    core.run()
    settle(core)


def test_an_aborted_request_gives_its_blocks_back_with_two_rows_on_their_way():
    core = serving()
    slot = core.add(range(30), 6)
    plan(core), plan(core)
    core.abort(slot)
    core.assert_sound()
    assert free(core) == [20, 20]
    core.add([*range(28), 99])
    core.run()
    assert core.hits[-1] == 0, "nothing of it was committed"
    settle(core)


def test_the_step_planned_last_is_withdrawn_and_the_one_before_it_stands():
    core = serving()
    core.add(range(7), 6)
    plan(core)
    core.add(range(40, 60), 3)
    again = core.plan()
    core.withdraw()
    core.assert_sound()
    step = core.plan()
    assert [int(n) for n in step.slot[: step.rows]] == [int(n) for n in again.slot[: again.rows]] == [0, 1]
    core.execute(step)
    core.run()
    settle(core)


def test_a_withdrawn_step_gives_a_request_that_was_preempted_since_no_tokens_to_wait_for():
    core = serving()
    core.add(range(7), 4)
    core.plan()
    core.preempt_running()
    core.withdraw()
    assert plan(core) == [(0, 0, 7, 0)]
    core.run()
    settle(core)


# Loads


def test_a_prefix_is_admitted_once_it_is_loaded_and_found_like_what_was_computed():  # L3, A20
    core = serving()
    slot = core.add(range(30), 2)
    load = core.restore(slot, 16)
    assert (int(load.tokens), load.first.tolist(), int((load.tables > 0).sum()), int(load.after)) == (16, [0, 16], 4, 0)
    other = core.add(range(60, 70), 2)
    assert [row[0] for row in plan(core)] == [other], "others go on"
    core.bring(slot)
    core.assert_sound()
    core.run()
    assert core.hits == [0, 16]
    core.add([*range(16), 99])
    core.run()
    assert core.hits[-1] == 16
    settle(core)
    assert free(core) == [20, 20]


def test_rows_that_are_here_are_not_loaded_again():  # 92
    core = serving()
    core.add(range(11))
    core.run()
    slot = core.add([*range(10), *range(50, 70)])
    load = core.restore(slot, 24)
    assert load.first.tolist() == [8, 24]
    core.bring(slot)
    core.run()
    assert core.hits == [0, 24]


@pytest.mark.parametrize("tokens", [0, 6, 32, 28 + 4])
def test_a_load_that_is_no_hit_or_leaves_nothing_to_compute_is_refused(tokens):  # 23, 96
    core = serving()
    slot = core.add(range(32), 2)
    before = free(core)
    assert not core.restore(slot, tokens).tokens
    assert free(core) == before
    core.run()


def test_a_load_no_longer_than_what_is_here_is_refused():
    core = serving()
    core.add(range(17))
    core.run()
    slot = core.add(range(17))
    assert not core.restore(slot, 16).tokens and not core.restore(slot, 8).tokens
    core.run()
    assert core.hits == [0, 16]


@pytest.mark.parametrize(("good", "hit"), [([16, 0], 0), ([8, 16], 0), ([16, 16], 16), ([0, 0], 0)])
def test_a_failure_in_one_group_cuts_the_hit_for_all_and_harms_nobody_else(good, hit):  # 86, 89
    core = serving()
    slot = core.add(range(30), 2)
    other = core.add(range(60, 70), 8)
    core.restore(slot, 16)
    plan(core)
    core.bring(slot, good)
    core.assert_sound()
    core.run()
    assert {one: (length, reason) for one, length, _, reason in core.admissions} == {
        other: (0, Reason.COLD.name), slot: (hit, Reason.STORE_FAILURE.name if hit < 16 else Reason.COLD.name),
    }  # fmt: skip


def test_blocks_of_a_request_aborted_during_its_load_belong_to_the_load():  # 36
    core = serving()
    slot = core.add(range(30), 2)
    core.restore(slot, 16)
    held = free(core)
    core.abort(slot)
    assert free(core) == held
    assert core.add(range(60, 70), 2) != slot
    core.run()
    core.bring(slot)
    core.assert_sound()
    settle(core)
    assert free(core) == [20, 20]
    core.add([*range(16), 99])
    core.run()
    assert core.hits[-1] == 16, "what it brought is found"


def test_a_store_that_has_not_answered_holds_up_nobody_else():  # A26
    core = serving()
    slot, other = core.add(range(10), 1), core.add(range(60, 70), 1)
    core.state = core.compiled["undecided"](core.state, slot, True)
    assert [row[0] for row in plan(core)] == [other]
    settle(core)
    assert plan(core) == []
    core.state = core.compiled["undecided"](core.state, slot, False)
    core.run()


def test_a_load_is_not_admitted_on_the_blocks_that_prefills_under_way_need():  # L2
    core = serving(blocks=(24, 9))
    core.add([*range(40), *range(40)], 2)  # 21 blocks in the end; 16 in the first step of 64 tokens
    plan(core)
    slot = core.add(range(90, 104), 2)
    assert free(core)[0] == 7 and not core.restore(slot, 12).tokens
    core.run()
    settle(core)


def test_nothing_is_loaded_for_a_preempted_request_that_a_step_in_flight_may_end():
    core = serving()
    slot = core.add(range(30), 20)
    core.runs[slot].limit = core.live[slot][1] = 31  # it samples a stop token, which nobody could foresee
    plan(core)
    core.preempt_running()
    assert not core.restore(slot, 16).tokens
    core.commit()
    assert column(core, slot, layout(core.config).STATUS) == FREE and free(core) == [20, 20]
    settle(core)


def test_what_was_loaded_is_held_until_its_request_is_admitted_or_nothing_else_can_run():
    core = serving(blocks=(9, 9))
    first, second = core.add(range(20), 2), core.add(range(60, 80), 2)
    core.restore(second, 16)
    core.bring(second)
    fields = layout(core.config)
    assert column(core, second, fields.LOAD) == BROUGHT
    assert plan(core) == [], "the first does not fit beside what is held for the second"
    core.run()
    assert column(core, first, fields.STATUS) != RUNNING
    settle(core)
    assert free(core) == [8, 8]


def test_nothing_is_forgotten_while_a_load_has_blocks():  # L6
    core = serving()
    slot = core.add(range(30), 2)
    core.restore(slot, 16)
    assert not core.reset()
    core.abort(slot)
    assert not core.reset()
    core.bring(slot)
    assert core.reset() and free(core) == [20, 20]


def test_what_was_loaded_and_not_yet_read_is_forgotten_by_a_reset_that_preempts_and_a_load_under_way_forbids_it():  # L6
    core = serving()
    core.add(range(60, 70), 4)
    plan(core)
    slot = core.add(range(30), 2)
    core.restore(slot, 16)
    held = free(core)
    core.preempt_running()
    assert free(core) == held and not core.reset(), "nobody gives way while a load is under way"
    core.bring(slot)
    assert not core.reset()
    core.preempt_running()
    assert core.reset() and free(core) == [20, 20]
    assert core.restore(slot, 16).tokens, "it may be loaded again"
    core.bring(slot)
    core.run()
    settle(core)
    assert {one: length for one, length, _, _ in core.admissions}[slot] == 16


def test_steps_withdrawn_one_after_the_other_leave_no_count_behind():
    core = serving()
    core.add(range(7), 6)
    plan(core)
    core.commit()
    before = statistics(core.config, core.state), int(core.state.counters[LAST_PREFILL])
    core.add(range(40, 60), 3)
    core.plan()
    core.add(range(60, 80), 3)
    core.plan()
    assert statistics(core.config, core.state).admissions == 3
    core.withdraw(), core.withdraw()
    assert (statistics(core.config, core.state), int(core.state.counters[LAST_PREFILL])) == before
    core.run()
    settle(core)


def test_the_next_chunk_of_a_block_leaves_what_is_committed_of_it_to_be_copied_from():
    """Two chunks in flight share a block: after the commit of the first, its unit is found, the other's is not."""
    core = Serving(
        dataclasses.replace(serving().config, geometry=COARSE, pool_blocks=(21,), group_pool=(0,), token_budget=12)
    )
    core.add(range(24), 2)
    plan(core), plan(core)
    core.commit()
    core.add([*range(12), 99])
    core.step()
    core.run()
    assert core.hits == [0, 12]
    settle(core)
