"""Recurrent states: which are kept, what a resume inside a block leaves behind, chunks, drafts, turns.

Numbers of the reference system; the comment behind a test names the case. Where ours serves more, the test says why:
states are saved inside a chunk at any hash boundary, so no chunk is cut for one and none is named for another.
"""

import pytest

from hybrid_kv.cache.reference import Draft, Step
from hybrid_kv.simulate.scenarios import rules_of
from tests.cache.bench import NONE, Bench, full, state, tokens

# Which are kept


def test_a_prompt_of_whole_blocks_is_resumed_a_block_early_with_a_drop():  # E6
    bench = Bench([full(32, draft=True), state(32)], 32, draft=Draft.DROP, slots_ahead=3)
    prompt = tokens(0, 128)
    bench.serve(a=prompt)
    assert bench.filed(prompt, 1) == [96]
    assert bench.serve(b=prompt) == [96]
    assert bench.serve(c=prompt + tokens(1, 40)) == [96]


@pytest.mark.parametrize(
    ("retention", "shared", "kept"),
    [
        (0, 96, [96, 240, 256]), (0, 100, [96, 240, 256]), (64, 96, [64, 96, 128, 192, 240, 256]), (0, 0, [240, 256]),
        (16, 96, list(range(16, 257, 16))),
    ],
)  # fmt: skip
def test_a_shared_prefix_is_kept_whatever_retention_says(retention, shared, kept):  # E8, E9
    bench = Bench([full(16), state(16)], 16, retention=retention)
    bench.serve(a=tokens(0, 256))
    prompt = tokens(0, shared) + tokens(1, 256 - shared)
    bench.serve(b=prompt)
    # 256 as well, for prompts that go on from there.
    assert bench.filed(prompt, 1) == kept


def test_the_third_resumes_where_the_second_found_rows_without_a_state():  # E14
    bench = Bench([full(512), state(512)], 32)
    base = tokens(0, 2020)
    bench.serve(a=base)
    bench.forget(base, 1, 2016)
    bench.arrive("b", base[:2016] + tokens(1, 584))
    assert bench.step().admitted["b"][:2] == (0, 2016)
    bench.drain()
    assert bench.serve(c=base[:2016] + tokens(2, 584)) == [2016]


def test_a_prompts_end_is_kept_at_the_finest_boundary():  # I2, G1
    bench = Bench([full(32), state(32)], 16)
    bench.serve(a=tokens(0, 120))
    assert bench.filed(tokens(0, 120), 1) == [112]
    assert bench.serve(b=tokens(0, 120)) == [112]


@pytest.mark.parametrize("retention", [None, 0, 32, 64, 256])
@pytest.mark.parametrize("unit", [16, 32])
@pytest.mark.parametrize("drop", [False, True])
def test_a_prompt_in_two_chunks_keeps_its_end_and_what_retention_asks_for(retention, unit, drop):  # I3
    rules = {"draft": Draft.DROP} if drop else {}
    bench = Bench([full(32, draft=drop), state(32)], unit, token_budget=128, retention=retention, **rules)
    prompt = tokens(0, 240)
    bench.serve(a=prompt)
    assert bench.ends["a"] == [128, 240]
    assert (128 in bench.filed(prompt, 1)) == (retention in (None, 32, 64))
    assert bench.serve(b=prompt) == [(240 // unit - 1) * unit if drop else 239 // unit * unit]


NO_DRAFT, DROP = {}, {"draft": Draft.DROP}


def ahead(tokens: int) -> dict:
    return {"draft": Draft.LOOKAHEAD, "lookahead": tokens}


@pytest.mark.parametrize(
    ("unit", "rules"),
    [(32, NO_DRAFT), (16, NO_DRAFT), (32, DROP), (16, DROP), (32, ahead(1)), (16, ahead(1)), (16, ahead(3))],
)
@pytest.mark.parametrize(("prompt", "answer"), [(104, 1), (200, 1), (40, 25), (40, 26), (150, 44)])
@pytest.mark.parametrize("budget", [64, 3200])
@pytest.mark.parametrize("retention", [0, None, 64])
def test_what_is_planned_is_what_is_saved_and_filed(unit, rules, prompt, answer, budget, retention):  # I11
    bench = Bench(
        [full(32, draft=bool(rules)), state(32)],
        unit,
        token_budget=budget,
        turn_end=False,
        retention=retention,
        **rules,
    )
    request = bench.arrive("a", tokens(0, prompt), answer)
    planned = []
    while request.name in bench.model.requests:
        step = bench.schedule()
        planned += [boundary for row in step.rows for boundary, _ in row.emissions]
        bench.commit(step)
    last = (
        prompt // unit * unit - unit if rules is DROP else (prompt - max(rules.get("lookahead", 1), 1)) // unit * unit
    )
    assert last in planned or not last
    assert bench.filed(request.tokens, 1) == sorted(planned)


@pytest.mark.parametrize(
    ("lookahead", "prompt", "hit"),
    [(0, 1089, 1088), (1, 1089, 1088), (2, 1089, 1024), (2, 1090, 1088), (3, 1089, 1024), (3, 1091, 1088)],
)
def test_a_resent_prompt_leaves_the_tokens_that_prove_its_end(lookahead, prompt, hit):  # I14
    rules = {"draft": Draft.LOOKAHEAD, "lookahead": lookahead} if lookahead else {}
    bench = Bench([full(128, draft=bool(rules)), state(64)], 64, **rules)
    bench.serve(a=tokens(0, prompt))
    assert bench.serve(b=tokens(0, prompt)) == [hit]


def test_a_resent_prompt_with_a_drop_and_with_lookahead():  # B14: 16 and 16 with a drop in the reference system
    for rules, hits in (
        # The third unit of 48 tokens proves the second, though its last token is computed again.
        ({"draft": Draft.DROP}, [32, 16]),
        ({"draft": Draft.LOOKAHEAD, "lookahead": 1}, [32, 32]),
    ):
        for prompt, hit in zip((48, 37), hits, strict=True):
            bench = Bench([full(16, draft=True)], 16, **rules)
            bench.serve(a=tokens(0, prompt))
            assert bench.serve(b=tokens(0, prompt)) == [hit]


def test_lookahead_tokens_are_what_the_drafter_reads_ahead():  # B8
    config = {"groups": [{"kind": "mla", "block_size": 16}], "num_blocks": 9, "num_speculative_tokens": 2}
    cases = [
        ({"use_eagle": True}, 1), ({"use_eagle": True, "multi_module_mtp": True}, 2), ({}, 0),
        ({"use_eagle": True, "eagle_mode": "drop"}, 0), ({"use_eagle": True, "eagle_mode": "nodrop"}, 0),
        ({"enable_prefix_caching": False}, 0),
    ]  # fmt: skip
    assert [rules_of(config | more).lookahead for more, _ in cases] == [want for _, want in cases]


def test_of_the_states_of_a_grid_the_unspaced_go_first_and_a_prompts_end_last():
    bench = Bench([full(64), state(64)], 16, blocks=(20, 5), retention=None)
    prompt = tokens(0, 250)
    bench.serve(a=prompt)
    assert bench.filed(prompt, 1) == [64, 128, 192, 240]
    bench.serve(b=tokens(1, 120))
    assert bench.model.pools[1].evicted == 2
    assert bench.filed(prompt, 1) == [64, 240]


# Sharing a state


def test_rows_are_copied_and_a_state_is_read_where_it_lies():  # F9
    for dcp, blocks in ((2, 2), (4, 1)):
        bench = Bench([full(4), state(4)], 4, dcp=dcp)
        bench.serve(a=tokens(0, 13))
        request = bench.arrive("b", tokens(0, 12) + tokens(1, 9))
        step = bench.schedule()
        assert bench.hits["b"] == 12 and bench.geometry.columns_of_hit(12) == (blocks, 3)
        assert step.copies == 1 and request.copy[0] and not request.copy[1]
        bench.commit(step)


def test_a_partial_tail_is_hit_through_a_state_of_its_own():  # G1
    bench = Bench([full(2), state(4)], 2)
    prompt = [0, 0, 1, 1, 2, 2, 3]
    bench.serve(a=prompt)
    request = bench.arrive("b", prompt)
    bench.schedule()
    assert bench.hits["b"] == 6 and bench.geometry.columns_of_hit(6) == (3, 2)
    assert request.state_read[1] is not request.tables[1][0]


def test_who_saved_a_tail_goes_on_in_its_own_block():  # G2, G3
    bench = Bench([full(2), state(4)], 2)
    prompt = [0, 0, 1, 1, 2, 2, 3]
    owner = bench.arrive("a", prompt, answer=6)
    bench.step()
    running = owner.tables[1][0]
    for _ in range(4):
        bench.step()
    assert owner.tables[1][0] is running and not running.names
    bench.arrive("b", [*prompt, 9, 9])
    assert bench.step().admitted["b"].tokens == 6


def test_a_tail_saved_in_this_step_is_hit_in_the_next():  # G4
    bench = Bench([full(2), state(4)], 2)
    prompt = [0, 0, 1, 1, 2, 2, 3]
    for name in "ab":
        bench.arrive(name, prompt, answer=4)
    assert list(bench.step().admitted) == ["a"]
    assert bench.step().admitted["b"].tokens == 6


# Chunks


@pytest.mark.parametrize("dcp", [1, 4])
def test_a_prompt_is_not_cut_for_its_tail(dcp):  # H1: the reference system cuts at 8192, 9728, 9984
    bench = Bench([full(512), state(512)], 32, dcp=dcp)
    prompt = tokens(0, 10_000)
    bench.serve(a=prompt)
    assert bench.ends["a"] == [8192, 10_000]
    assert bench.filed(prompt, 1) == [9984]
    assert bench.serve(b=[*prompt[:9990], *tokens(1, 2010)]) == [9984]
    assert bench.ends["b"] == [12_000]


def test_a_prompt_is_cut_at_its_tail_alone_where_states_are_saved_at_the_ends_of_chunks():  # H1
    bench = Bench([full(512), state(512)], 32, emission=NONE)
    prompt = tokens(0, 10_000)
    bench.serve(a=prompt)
    assert bench.ends["a"] == [8192, 9984, 10_000]
    assert bench.serve(b=[*prompt[:9990], *tokens(1, 2010)]) == [9984]
    assert bench.ends["b"] == [11_968, 12_000]


def test_a_resume_inside_a_block_runs_on_and_names_no_skipped_boundary():  # H6: the reference system stops at 3200
    bench = Bench([full(1600), state(1600)], 16)
    bench.serve(a=tokens(0, 1985))
    prompt = tokens(0, 3602)
    assert bench.serve(b=prompt) == [1984] and bench.ends["b"] == [3602]
    assert bench.filed(prompt, 1) == [1984, 3600]


@pytest.mark.parametrize(
    ("prompt", "budgets"),
    [(2002, [364]), (3602, [1600, 1000])] + [(3602, [first]) for first in (800, 900, 1599, 1601, 2000)],
)
@pytest.mark.parametrize("retention", [None, 0])
def test_fragments_of_a_budget_leave_true_states_only(prompt, budgets, retention):  # H8, H10
    bench = Bench([full(1600), state(1600)], 16, retention=retention)
    request = bench.arrive("a", tokens(0, prompt))
    for budget in budgets:
        bench.step(budget)
    assert request.computed == sum(budgets)
    bench.drain(8192)
    dense = {1600, prompt // 1600 * 1600} if retention is None else set()
    assert set(bench.filed(tokens(0, prompt), 1)) == dense | {prompt // 16 * 16}
    assert bench.serve(b=tokens(0, prompt)) == [prompt // 16 * 16]


@pytest.mark.parametrize("retention", [None, 0])
def test_a_long_prefill_holds_its_running_state_and_no_other(retention):  # J3: 7 and more in the reference system
    bench = Bench([full(64), state(64)], 64, blocks=(400, 8), token_budget=146, retention=retention)
    bench.arrive("a", tokens(0, 3000), answer=2)
    while bench.model.requests:
        step = bench.schedule()
        saved = sum(len(row.emissions) for row in step.rows)
        assert saved <= 3 and bench.free[1] == 8 - 1 - saved
        bench.commit(step)
    assert bench.free[1] == 8 and bench.model.statistics.skipped_states == 0


# Drafts, resumes, turns


def test_a_dropped_tail_is_resumed_without_naming_what_was_skipped():  # Z4
    bench = Bench([full(1600, draft=True), state(1600)], 16, draft=Draft.DROP)
    base = tokens(0, 2000)
    bench.serve(a=base)
    longer = base + tokens(1, 3202)
    assert bench.serve(b=longer) == [1984]
    assert bench.filed(longer, 1) == [1984, 5184]


@pytest.mark.parametrize("slots", [1, 3])
def test_a_chunk_of_two_blocks_writes_each_state_once(slots):  # Z6, the bench refuses two writers
    bench = Bench([full(32, draft=True), state(32)], 16, draft=Draft.DROP, slots_ahead=slots, token_budget=64)
    prompt = tokens(0, 150)
    request = bench.arrive("a", prompt, answer=2)
    bench.step()
    running = request.tables[1][0]
    bench.step()
    assert bench.ends["a"] == [64, 128] and request.tables[1] == {0: running}
    bench.drain()
    assert bench.filed(prompt, 1) == [128]


def test_states_lie_on_the_recurrent_grid_under_smaller_blocks():  # Z7
    bench = Bench([full(32), state(64)], 32, retention=None)
    prompt = tokens(0, 256)
    bench.arrive("a", prompt)
    for budget in (96, 64, 96):
        bench.step(budget)
    assert bench.ends["a"] == [96, 160, 256]
    assert bench.filed(prompt, 1) == [64, 128, 192, 224, 256]


def test_a_prefill_gets_through_on_what_decodes_leave():  # Z9
    bench = Bench([full(1536), state(1536)], 1536, token_budget=1538)
    for number in range(3):
        bench.arrive(str(number), tokens(number, 5), answer=30)
    bench.step()
    bench.arrive("long", tokens(9, 5000), answer=2)
    for _ in range(5):
        bench.step()
    assert bench.ends["long"] == [1535, 3070, 4605, 5000, 5001]
    assert bench.model.requests.keys() == {"0", "1", "2"}


def test_a_resumed_request_keeps_its_prompts_end_and_its_own():  # Z10
    bench = Bench([full(128), state(128)], 16, turn_end=False)
    request = bench.arrive("a", tokens(0, 240), answer=200)
    while len(request.tokens) < 400:
        bench.step()
    # As if blocks had run out and nothing of it were left.
    bench.model._preempt(Step(), request)
    assert bench.model.reset()
    bench.step()
    assert bench.ends["a"][-1] == 400
    assert bench.filed(request.tokens, 1) == [224, 240, 384, 400]


def test_columns_are_those_of_the_groups_block_over_all_ranks():  # Z12
    (group,) = Bench([full(16)], 16, dcp=8).geometry.groups
    assert group.columns(256) == 2 and group.columns(130) == 2


def test_the_next_turn_resumes_behind_a_long_answer():  # Z13
    bench = Bench([full(64), state(64)], 16)
    request = bench.arrive("a", tokens(0, 100), answer=400)
    bench.drain()
    assert bench.serve(b=[*request.tokens, *tokens(1, 20)]) == [499 // 16 * 16]


@pytest.mark.parametrize(
    ("dcp", "rules"),
    [
        (1, {}), (2, {}), (1, {"draft": Draft.DROP, "slots_ahead": 2}),
        (2, {"draft": Draft.LOOKAHEAD, "lookahead": 1, "slots_ahead": 2}),
        (1, {"draft": Draft.LOOKAHEAD, "lookahead": 3, "slots_ahead": 3}),
    ],
)  # fmt: skip
def test_every_turn_is_served_the_one_before(dcp, rules):  # I23
    bench = Bench([full(16, draft=bool(rules)), state(32)], 16, dcp=dcp, **rules)
    text, least = tokens(0, 70), 0
    for turn in range(4):
        name = str(turn)
        # Long enough that a boundary of the answer is known to be shared, with the drop as well.
        request = bench.arrive(name, text, answer=43)
        while bench.model.requests:
            bench.step(accept=turn % 3)
            if rules and name in bench.model.requests:
                bench.model.propose(name, 2)
        assert bench.hits[name] >= least
        # Its last token was never computed. A drop gives up a unit, lookahead the tokens that prove one.
        provable = len(request.tokens) - max(bench.model.rules.lookahead, 1)
        least = provable // 16 * 16 - (16 if rules.get("draft") is Draft.DROP else 0)
        text = request.tokens + tokens(turn + 1, 30)
