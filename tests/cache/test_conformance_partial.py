"""Hits that end inside a block, tails of prompts, and states inside chunks: more cases with numbers.

The comment behind a test names the case. Where ours serves more than the reference system, the test says so.
"""

import pytest

from hybrid_kv.cache.emission import SEVERAL
from hybrid_kv.cache.reference import Draft, Model, Rules
from hybrid_kv.geometry import resolve
from tests.cache.bench import NONE, ONE, Bench, full, state, tokens, window

DROP = {"draft": Draft.DROP}
EMISSIONS = pytest.mark.parametrize("emission", [SEVERAL, ONE, NONE], ids=["several", "one", "none"])


# Copies


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_a_tail_inside_a_block_is_served_from_a_copy_under_dcp(dcp):  # F8
    bench = Bench([full(4), state(4)], 2, dcp=dcp)
    bench.serve(a=tokens(0, 7))
    request = bench.arrive("b", tokens(0, 7))
    step = bench.schedule()
    assert bench.hits["b"] == 6 and bench.geometry.columns_of_hit(6) == (-(-6 // (4 * dcp)), 2)
    # Rows are copied, the state is read where it lies and written to a block of the request's own.
    assert step.copies == 1 and request.state_read[1] is not request.tables[1][0]
    bench.commit(step)


def test_a_copy_starts_without_a_name_and_its_source_keeps_its_own():  # G5, G6, G8
    bench = Bench([full(4), state(4)], 2)
    prompt = tokens(0, 7)
    bench.serve(a=prompt)
    assert bench.filed(prompt, 0) == [2, 4, 6] and bench.filed(prompt, 1) == [6]
    request = bench.arrive("b", prompt[:6] + tokens(1, 5), answer=3)
    step = bench.schedule()
    ((source, target),) = [pair for row in step.rows for pair in row.copies]
    assert bench.hits["b"] == 6 and request.tables[0][1] is target is not source
    assert source.holders == 1 and source.names and not target.names
    bench.commit(step)
    # Its step is done: nobody holds the source, and it is still found.
    assert source.holders == 0 and source.names and target.holders == 1
    assert bench.model.probe(prompt).tokens == 6


def test_rows_beyond_the_state_are_cut_to_the_common_hit():  # G7
    bench = Bench([full(4), state(4)], 2)
    prompt = tokens(0, 11)
    bench.serve(a=prompt[:7])
    bench.serve(b=prompt)
    for end in (8, 10):
        if end in bench.filed(prompt, 1):
            bench.forget(prompt, 1, end)
    bench.arrive("c", prompt, answer=2)
    step = bench.schedule()
    assert step.admitted["c"][:2] == (6, 10) and bench.geometry.columns_of_hit(6) == (2, 2)


def test_a_joint_hit_ends_at_the_last_state_there_is():  # F10
    bench = Bench([full(4), state(4)], 4, dcp=2, retention=None, tail=False)
    prompt = tokens(0, 20)
    bench.arrive("a", prompt)
    bench.step(budget=8)
    assert bench.model.probe(prompt).tokens == 8 and bench.geometry.columns_of_hit(8) == (1, 2)
    bench.step(budget=4)
    assert bench.model.probe(prompt).tokens == 12 and bench.geometry.columns_of_hit(12) == (2, 3)


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_a_drop_gives_up_one_hash_unit_under_dcp(dcp):  # F11, G11
    bench = Bench([full(4, draft=True), state(4)], 2, dcp=dcp, **DROP)
    bench.serve(a=tokens(0, 6))
    assert bench.serve(b=tokens(0, 6) + tokens(1, 2)) == [4]
    assert bench.geometry.columns_of_hit(4) == (1, 1)


@pytest.mark.parametrize(("unit", "hit"), [(2, 6), (4, 4)])
def test_a_state_below_what_proves_the_hit_is_kept(unit, hit):  # G12, G13
    bench = Bench([full(4, draft=True), state(4)], unit, **DROP)
    prompt = tokens(0, 9)
    bench.arrive("a", prompt)
    bench.step(budget=6)
    bench.drain(8192)
    assert hit in bench.filed(prompt, 1)
    assert bench.serve(b=prompt + tokens(1, 6)) == [hit]


def test_a_unit_far_below_the_block_serves_a_tail_of_it():  # G16, B16
    bench = Bench([full(1152), state(1152)], 128)
    bench.serve(a=tokens(0, 1600))
    assert bench.geometry.schedule_block == 1152
    assert bench.serve(b=tokens(0, 1600)) == [1536]
    bench = Bench([full(544, draft=True), state(544)], 16, draft=Draft.LOOKAHEAD, lookahead=1)
    bench.serve(a=tokens(0, 1249))
    assert bench.serve(b=tokens(0, 1249)) == [1248]


def test_a_tail_becomes_part_of_the_whole_block_and_stays_to_be_found():  # G19, G20
    bench = Bench([full(8)], 2)
    request = bench.arrive("a", tokens(0, 5), answer=9)
    bench.step()
    assert bench.filed(request.tokens, 0) == [2, 4]
    while request.name in bench.model.requests:
        bench.step()
    assert bench.filed(request.tokens, 0) == [2, 4, 6, 8, 10, 12]
    (whole,) = {bench.model.index.find((0, prefix)) for prefix in request.chain[:4]}
    assert len(whole.names) == 4
    assert bench.model.probe(tokens(0, 5)).tokens == 4
    # When the block goes, all that it served goes.
    bench.forget(request.tokens, 0, 8)
    assert bench.filed(request.tokens, 0) == [10, 12] and bench.model.probe(tokens(0, 5)).tokens == 0


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_a_decoded_block_is_found_once_the_tokens_its_name_covers_are_known(lookahead):  # B17
    bench = Bench([full(16, draft=True)], 16, draft=Draft.LOOKAHEAD, lookahead=lookahead)
    request = bench.arrive("a", tokens(0, 10), answer=20)
    while len(request.tokens) < 25:
        bench.step()
        found = bench.filed(request.tokens, 0)
        assert found == ([16] if len(request.tokens) >= 16 + lookahead else [])


# Which states are kept


def test_states_do_not_depend_on_dcp():  # E10
    kept = []
    for dcp in (1, 2, 16):
        bench = Bench([full(16), state(16)], 16, dcp=dcp, retention=64)
        prompt = tokens(0, 256)
        bench.serve(a=prompt[:96] + tokens(1, 9))
        bench.serve(b=prompt)
        kept.append(bench.filed(prompt, 1))
    assert kept == [[64, 96, 128, 192, 240, 256]] * 3


def test_a_prompts_last_boundary_is_kept_with_lookahead():  # E7
    bench = Bench([full(32, draft=True), state(32)], 32, draft=Draft.LOOKAHEAD, lookahead=1)
    bench.serve(a=tokens(0, 129))
    assert bench.filed(tokens(0, 129), 1) == [128]
    assert bench.serve(b=tokens(0, 129)) == [128]


@pytest.mark.parametrize(("rules", "hit"), [({}, 24), (DROP, 20)])
def test_a_shared_prefix_below_the_block_is_resumed_at_its_hash_boundary(rules, hit):  # E15: 12 in the reference system
    bench = Bench([full(16, draft=bool(rules)), state(16)], 4, **rules)
    shared = tokens(0, 24)
    assert [bench.serve(**{name: shared + tokens(ord(name), 40)})[0] for name in "abc"] == [0, 0, hit]


def test_an_extension_under_the_drop_hits_below_the_last_hash_boundary():  # E16
    bench = Bench([full(1024, draft=True), state(1024)], 64, **DROP)
    bench.serve(a=tokens(0, 1600))
    assert bench.serve(b=tokens(0, 1600) + tokens(1, 200)) == [1536]


@EMISSIONS
@pytest.mark.parametrize("block", [16, 128, 512])
@pytest.mark.parametrize("unit", [4, 32])
@pytest.mark.parametrize("shared", [75, 401, 610])
def test_wherever_two_prompts_part_the_third_resumes(emission, block, unit, shared):  # E17
    bench = Bench([full(max(block, unit)), state(max(block, unit))], unit, emission=emission, token_budget=300)
    head = tokens(0, shared)
    hits = [bench.serve(**{name: head + tokens(ord(name), 90)})[0] for name in "abc"]
    assert hits == [0, 0, shared // unit * unit]


@pytest.mark.parametrize(("prompt", "kept"), [(120, [96]), (104, [96]), (96, [64, 96])])
def test_the_end_of_a_prompt_is_kept_with_coarse_units(prompt, kept):  # I6
    bench = Bench([full(32), state(32)], 32)
    bench.serve(a=tokens(0, prompt))
    assert bench.filed(tokens(0, prompt), 1) == kept
    assert bench.serve(b=tokens(0, prompt)) == [(prompt - 1) // 32 * 32]


@EMISSIONS
def test_the_end_of_a_prompt_in_two_chunks_is_kept_with_coarse_units(emission):  # I7
    bench = Bench([full(32), state(32)], 32, token_budget=128, emission=emission)
    bench.serve(a=tokens(0, 240))
    assert bench.filed(tokens(0, 240), 1) == [224]
    assert bench.serve(b=tokens(0, 240) + tokens(1, 40)) == [224]


def test_under_the_drop_a_prompt_keeps_the_state_one_unit_before_its_end():  # I8
    bench = Bench([full(32, draft=True), state(32)], 32, **DROP)
    bench.serve(a=tokens(0, 104))
    assert bench.filed(tokens(0, 104), 1) == [64]
    assert bench.serve(b=tokens(0, 104)) == [64]


def test_a_chunk_that_ends_at_the_boundary_leaves_its_end():  # I9
    bench = Bench([full(4), state(4)], 2)
    prompt = tokens(0, 15)
    request = bench.arrive("a", prompt, answer=3)
    bench.step(budget=14)
    assert bench.filed(prompt, 1) == [14] and request.computed == 14


def test_what_is_read_saved_and_running_are_blocks_of_their_own():  # I10
    bench = Bench([full(4), state(4)], 2)
    prompt = tokens(0, 14)
    bench.serve(a=prompt[:7])
    request = bench.arrive("b", prompt)
    step = bench.schedule(budget=2)
    assert bench.hits["b"] == 6
    used = {request.state_read[1], request.tables[1][0]}
    bench.commit(step)
    step = bench.schedule(budget=6)
    used |= {block for row in step.rows for emission in row.emissions for block in emission.blocks}
    # The state at 12, where the same prompt resumes, and at 14, where a longer one does.
    assert [emission.boundary for row in step.rows for emission in row.emissions] == [14, 12]
    assert len(used) == 4
    bench.commit(step)


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("retention", [None, 0])
@pytest.mark.parametrize("first", [2, 4])
def test_slots_of_drafts_are_never_named(drafts, retention, first):  # I13
    bench = Bench([full(128, draft=True), state(128)], 128, draft=Draft.DROP, slots_ahead=drafts, retention=retention)
    prompt = tokens(0, 818)
    request = bench.arrive("a", prompt, answer=9)
    bench.step(budget=128 * first)
    bench.step(8192)
    for accepted in range(3):
        bench.model.propose("a", drafts)
        bench.step(accept=accepted)
        assert max(bench.filed(request.tokens, 1)) <= request.computed
    assert set(bench.filed(prompt, 1)) == ({128, 256, 384, 512, 640, 768} if retention is None else {640})


@pytest.mark.parametrize(
    ("unit", "starts", "lengths", "offsets"),
    [
        (16, [0, 16], [50, 16], [[48], [16]]), (128, [0], [530], [[512]]), (128, [480], [50], [[32]]),
        (16, [0], [530], [[528]]), (16, [480], [50], [[48]]),
    ],
)  # fmt: skip
def test_a_row_names_the_states_it_saves_by_their_distance_from_its_start(unit, starts, lengths, offsets):  # I15
    core = Model(Rules(resolve([full(unit), state(unit)], hash_unit=unit), (99, 99), (0, 1), chunk_limit=10**6))
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        core.arrive(str(number), tokens(number, start + length), answer=5)
        request = core.requests[str(number)]
        if start:
            # As if the first tokens had been computed in an earlier step.
            core.rules = Rules(core.rules.geometry, (99, 99), (0, 1), token_budget=start)
            others = [name for name in core.waiting if name != request.name]
            core.waiting = [request.name]
            core.commit(core.schedule(), {})
            core.waiting += others
    core.rules = Rules(core.rules.geometry, (99, 99), (0, 1))
    rows = {row.request.name: row for row in core.schedule().rows}
    for number, wanted in enumerate(offsets):
        row = rows[str(number)]
        assert (row.start, row.length) == (starts[number], lengths[number])
        assert sorted(emission.boundary - row.start for emission in row.emissions) == wanted


@pytest.mark.parametrize(("prompt", "hit"), [(7040, 6912), (7296, 7168)])
def test_a_resent_prompt_hits_the_last_unit_of_a_wide_block(prompt, hit):  # I21
    bench = Bench([full(6144), state(6144)], 128)
    bench.serve(a=tokens(0, prompt))
    assert bench.serve(b=tokens(0, prompt)) == [hit]


# Chunks


@pytest.mark.parametrize(
    ("prompt", "rules", "budget", "ends"),
    [
        (2002, {}, 2002, [2002]), (3602, {}, 2000, [1600, 3200, 3602]), (3602, DROP, 3602, [3602]),
        (2002, DROP, 2002, [2002]),
        (3602, DROP, 1700, [1600, 3200, 3602]),
        # Here the reference system waits for a whole block; this one goes on, and names nothing on the way.
        (3602, DROP, 512, [512, 1024, 1536, 1600, 2112, 2624, 3136, 3602]),
    ],
)  # fmt: skip
def test_a_state_inside_the_last_chunk_spares_a_cut(prompt, rules, budget, ends):  # H5
    bench = Bench([full(1600, draft=bool(rules)), state(1600)], 1600, token_budget=budget, emission=ONE, **rules)
    bench.serve(a=tokens(0, prompt))
    assert bench.ends["a"] == ends
    assert bench.serve(b=tokens(0, prompt)) == [(prompt // 1600 - bool(rules)) * 1600]


@pytest.mark.parametrize(("rules", "stop"), [({}, 3200), (DROP, 1600)])
def test_the_drop_decides_where_a_prompt_is_cut(rules, stop):  # H7
    bench = Bench([full(1600, draft=bool(rules)), state(1600)], 1600, emission=NONE, **rules)
    bench.serve(a=tokens(0, 3602))
    assert bench.ends["a"] == [stop, 3602]
    assert bench.serve(b=tokens(0, 3602)) == [stop]


@pytest.mark.parametrize(("prompt", "rules", "stop"), [(24576, DROP, 24448), (24577, DROP, 24448), (24577, {}, 24576)])
def test_a_chunk_stops_one_unit_lower_under_the_drop(prompt, rules, stop):  # H4
    geometry = resolve([full(1536, draft=bool(rules)), state(1536)], hash_unit=128)
    core = Model(Rules(geometry, (99, 99), (0, 1), emission=NONE, token_budget=23040, **rules))
    core.arrive("a", tokens(0, prompt))
    ends = []
    while core.requests:
        step = core.schedule()
        ends.append(step.rows[0].end)
        through = ["a"] if step.rows[0].samples else []
        core.commit(step, {name: [1] for name in through}, through)
    assert ends == [23040, stop, prompt]
    assert core.probe(tokens(0, prompt)).tokens == stop


@EMISSIONS
@pytest.mark.parametrize("lookahead", [1, 2])
def test_a_resent_prompt_hits_below_its_lookahead(lookahead, emission):  # H9
    bench = Bench(
        [full(1600, draft=True), state(1600)], 16, draft=Draft.LOOKAHEAD, lookahead=lookahead, emission=emission
    )
    bench.serve(a=tokens(0, 3601))
    assert bench.serve(b=tokens(0, 3601)) == [(3601 - lookahead) // 16 * 16]


@EMISSIONS
@pytest.mark.parametrize(
    ("block", "prompt", "budgets"),
    [(1536, 30000, [27648, 1024, 30000]), (12288, 30000, [12288, 4000, 30000]), (12288, 41000, [24576, 8000, 41000])],
)
def test_fragments_of_wide_blocks_leave_true_states_only(block, prompt, budgets, emission):  # H11
    bench = Bench([window(128, 128), state(block)], 128, emission=emission)
    bench.arrive("a", tokens(0, prompt))
    for budget in budgets:
        if bench.model.requests:
            bench.step(budget)
    bench.drain(60_000)
    assert bench.serve(b=tokens(0, prompt)) == [(prompt - 1) // 128 * 128]


# Drafts and several groups


@pytest.mark.parametrize("block", [3584, 4608])
@pytest.mark.parametrize("flying", [1, 2])
def test_a_prefill_of_half_a_million_tokens_holds_two_states_and_those_in_flight(block, flying):  # J3
    """The reference system holds up to seven and one a chunk in flight."""
    geometry = resolve([full(block, draft=True), state(block)], hash_unit=512)
    core = Model(
        Rules(geometry, (400, 40), (0, 1), steps_in_flight=flying, slots_ahead=5, draft=Draft.LOOKAHEAD, lookahead=1)
    )
    core.arrive("a", tokens(0, 480_031), answer=3)
    steps, most = [], 0
    while "a" in core.requests:
        if len(steps) < flying and (step := core.schedule()).rows:
            steps.append(step)
            most = max(most, 40 - core.pools[1].free)
            continue
        step = steps.pop(0)
        through = ["a"] if step.rows[0].samples else []
        core.commit(step, {name: [1] for name in through}, through if len(core.requests["a"].tokens) > 480_032 else [])
    assert most <= 3 + flying
    for step in steps:
        core.commit(step, {})
    assert core.pools[1].free == 40


def test_fewer_drafts_need_no_new_blocks():  # J5
    bench = Bench([full(16, draft=True), state(16)], 16, draft=Draft.DROP, slots_ahead=16)
    bench.arrive("a", tokens(0, 20), answer=60)
    bench.step()
    bench.model.propose("a", 16)
    bench.step(accept=0)
    free = bench.free
    for _ in range(3):
        bench.model.propose("a", 1)
        bench.step(accept=0)
    assert bench.free == free


def test_saved_states_are_held_by_nobody():  # J7
    bench = Bench([full(16), state(16)], 16, retention=None)
    prompt = tokens(0, 60)
    request = bench.arrive("a", prompt, answer=3)
    for budget in (16, 16, 16, 12):
        bench.step(budget)
    assert bench.filed(prompt, 1) == [16, 32, 48]
    held = set(request.held())
    for unit in range(3):
        block = bench.model.index.find((1, request.chain[unit]))
        assert block.holders == 0 and block not in held


def test_states_at_retention_and_at_the_end_of_a_prompt_lie_where_they_were_saved():  # J11, J12
    bench = Bench([full(4), state(4)], 4, retention=8)
    prompt = tokens(0, 16)
    bench.arrive("a", prompt, answer=3)
    saved = {}
    for _ in range(2):
        step = bench.schedule(budget=8)
        saved |= {emission.boundary: emission.blocks[0] for row in step.rows for emission in row.emissions}
        bench.commit(step)
    assert bench.filed(prompt, 1) == sorted(saved) == [8, 12, 16]
    chain = bench.model.requests["a"].chain
    assert all(bench.model.index.find((1, chain[boundary // 4 - 1])) is saved[boundary] for boundary in saved)


def test_a_state_is_saved_for_every_recurrent_group():  # J13
    bench = Bench([full(16), state(16, "one"), state(16, "two"), state(16, "three")], 16)
    bench.serve(a=tokens(0, 60))
    assert [bench.filed(tokens(0, 60), group) for group in (1, 2, 3)] == [[48]] * 3
    bench.forget(tokens(0, 60), 2, 48)
    assert bench.serve(b=tokens(0, 60)) == [0]
