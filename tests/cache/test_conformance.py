"""Decisive cases with numbers, on the reference model, every block's content checked along the way.

The comment behind each names the case. Where this core serves more than the reference system did, the test says so.
"""

import pytest

from hybrid_kv.cache.emission import SEVERAL
from hybrid_kv.cache.reference import Draft
from tests.cache.bench import NONE, ONE, Bench, full, state, tokens, window


def test_a_prefix_that_others_share_gets_a_state_while_one_prefills():  # E11, E12
    bench = Bench([full(16), state(16)], 16)
    shared = tokens(0, 32)
    assert bench.serve(a=shared + tokens(1, 25)) == [0]
    assert bench.serve(b=shared + tokens(2, 25)) == [0]
    assert bench.serve(c=shared + tokens(3, 25)) == [32]
    # The reference system hits 0 here: the state one token before the end of a prompt is kept as well.
    bench = Bench([full(16), state(16)], 16)
    bench.serve(a=tokens(0, 48))
    bench.arrive("b", tokens(0, 48) + tokens(1, 7))
    assert bench.step().admitted["b"][:2] == (48, 48)  # no junction
    bench.arrive("c", tokens(0, 47) + tokens(2, 7))
    assert bench.step().admitted["c"][:2] == (32, 32)


@pytest.mark.parametrize(
    ("options", "hits"), [({"retention": None}, [0, 32, 32]), ({"junctions": 0}, [0, 0, 0]), ({}, [0, 0, 32])]
)
def test_without_retention_the_junction_is_what_the_third_request_hits(options, hits):  # E12
    bench = Bench([full(16), state(16)], 16, **options)
    shared = tokens(0, 32)
    assert [bench.serve(**{name: shared + tokens(ord(name), 40)})[0] for name in "abc"] == hits


def test_a_shared_length_without_a_state_is_reported_in_whole_units():  # E11
    bench = Bench([full(16), state(16)], 16, tail=False, turn_end=False)
    bench.serve(a=tokens(0, 48))
    bench.arrive("c", tokens(0, 47) + tokens(2, 7))
    assert bench.step().admitted["c"][:2] == (0, 32)
    assert bench.serve(d=tokens(0, 47) + tokens(3, 7)) == [32]


@pytest.mark.parametrize(("replicated", "columns"), [(False, [2, 2, 16]), (True, [2, 16, 16])])
def test_each_group_serves_a_hit_in_blocks_of_its_own_geometry(replicated, columns):  # F1
    specs = [full(16), full(16, "draft", draft=True, replicated=replicated), state(16)]
    bench = Bench(specs, 16, dcp=8)
    shared = tokens(0, 256)
    bench.serve(a=shared + tokens(1, 10))
    assert bench.serve(b=shared + tokens(2, 10)) == [256]
    assert [group.columns(256) for group in bench.model.rules.geometry.groups] == columns


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(
    ("dcp", "unit", "block", "prompt"),
    [(4, 2, 2, 7), (8, 16, 16, 512), (8, 16, 16, 513)]
    + [(8, 128, 896, p) for p in (127, 128, 129, 7040, 7168, 7296, 7449)],
)
def test_a_resent_prompt_hits_its_last_unit_under_dcp(dcp, unit, block, prompt, drop):  # F7
    rules = {"draft": Draft.DROP} if drop else {}
    bench = Bench([full(block, draft=drop), state(block)], unit, dcp=dcp, **rules)
    bench.serve(a=tokens(0, prompt))
    want = max((prompt // unit - 1) * unit, 0) if drop else (prompt - 1) // unit * unit
    # The state that an identical prompt resumes from, and the one a longer prompt does.
    kept = {want, want if drop else prompt // unit * unit} - {0}
    assert set(bench.filed(tokens(0, prompt), 1)) == kept
    assert bench.serve(b=tokens(0, prompt)) == [want]
    # A longer one: a prompt of whole units is served to its end, where nothing is dropped.
    longer = want if drop else prompt // unit * unit
    assert bench.serve(c=tokens(0, prompt) + tokens(1, 32)) == [longer]


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_a_state_needs_the_tokens_its_name_covers(lookahead):  # B15
    prompt = 1249
    boundary = (prompt - max(lookahead, 1)) // 16 * 16
    rules = {"draft": Draft.LOOKAHEAD, "lookahead": lookahead} if lookahead else {}
    for beyond in range(lookahead + 2):
        bench = Bench([full(544, draft=bool(rules)), state(544)], 16, **rules)
        bench.serve(a=tokens(0, prompt))
        assert bench.serve(b=tokens(0, boundary + beyond) + tokens(1, 40)) == [boundary if beyond >= lookahead else 0]


def test_the_drop_gives_up_one_unit_inside_a_block():  # G10
    for prompt, hit in ((8, 6), (6, 4)):
        bench = Bench([full(4, draft=True)], 2, draft=Draft.DROP)
        bench.serve(a=tokens(0, prompt))
        assert bench.serve(b=tokens(0, prompt) + tokens(1, 4)) == [hit]


def test_a_prompt_is_never_split_for_a_block_wider_than_the_budget():  # H2
    bench = Bench([full(11392), state(11392)], 11392, token_budget=8192)
    bench.serve(a=tokens(0, 30000))
    assert bench.ends["a"] == [8192, 16384, 24576, 30000]


@pytest.mark.parametrize(
    ("block", "budget", "prompt", "ends"),
    [
        (11392, 8192, 30000, [8192, 11392, 19584, 22784, 30000]),  # H2
        (512, 384, 1300, [384, 512, 896, 1024, 1300]),  # H3
    ],
)
def test_a_block_wider_than_the_budget_is_reached_in_pieces_where_states_are_saved_at_ends(block, budget, prompt, ends):
    bench = Bench([full(block), state(block)], block, token_budget=budget, emission=NONE)
    bench.serve(a=tokens(0, prompt))
    assert bench.ends["a"] == ends
    assert bench.serve(b=tokens(0, prompt)) == [prompt // block * block]


@pytest.mark.parametrize("prompt", [1601, 1602, 3202])
def test_a_prompt_just_over_a_block_finishes(prompt):  # Z8
    bench = Bench([full(1600, draft=True), state(1600)], 16, draft=Draft.LOOKAHEAD, lookahead=3, token_budget=1600)
    bench.serve(a=tokens(0, prompt))
    assert bench.ends["a"][-1] == prompt


def test_siblings_of_an_older_state_start_in_one_step():  # J6
    bench = Bench([full(16), state(16)], 16)
    bench.serve(a=tokens(0, 40))
    for name in "bcd":
        bench.arrive(name, tokens(0, 32) + tokens(ord(name), 9))
    assert {name: hit.tokens for name, hit in bench.step().admitted.items()} == {"b": 32, "c": 32, "d": 32}


def test_no_copy_has_an_unfinished_source():  # Z1
    bench = Bench([full(32), state(32)], 16)
    bench.serve(a=tokens(0, 17))
    twin = tokens(0, 16) + tokens(1, 50)
    # The second waits for the first's state instead of copying from a block in the making.
    assert bench.serve(x=twin, y=twin) == [16, 64]


def test_a_block_written_in_this_step_is_not_copied_from():  # Z2
    bench = Bench([full(64), state(64)], 32, dcp=4)
    bench.serve(a=tokens(0, 65))
    sibling = tokens(0, 65) + tokens(1, 255)
    hits = bench.serve(x=sibling, y=sibling)
    assert hits[0] == 64 and hits[1] >= 64


def test_an_older_state_is_no_reason_to_copy_rows_that_this_step_writes():  # Z2
    bench = Bench([full(64), state(64)], 32, dcp=4)
    bench.serve(a=tokens(0, 65))
    bench.forget(tokens(0, 65), 0, 64)
    sibling = tokens(0, 65) + tokens(1, 255)
    assert (bench.filed(sibling, 0), bench.filed(sibling, 1)) == ([], [64])
    bench.arrive("x", sibling, answer=2)
    bench.arrive("y", sibling, answer=2)
    step = bench.step()
    assert {name: hit.tokens for name, hit in step.admitted.items()} == {"x": 0} and not step.copies
    assert bench.step().admitted["y"].tokens == 288


@pytest.mark.parametrize("emission", [SEVERAL, ONE, NONE])
@pytest.mark.parametrize("at", [336, 352, 1584])
def test_one_emission_after_a_start_inside_a_block_files_no_state_that_was_skipped(at, emission):  # Z3
    bench = Bench([full(1600), state(1600)], 16, emission=emission)
    bench.serve(a=tokens(0, at + 1))
    assert bench.serve(b=tokens(0, 3602)) == [at]
    # Two chunks only where nothing can be saved inside one.
    assert bench.ends["b"] == ([3600, 3602] if emission is NONE else [3602])
    assert bench.serve(c=[*tokens(0, 3300), 5]) == [at]  # no key 1600, no key 3200
    assert bench.serve(d=tokens(0, 3602)) == [3600]


@pytest.mark.parametrize("emission", [SEVERAL, ONE, NONE])
def test_an_extension_under_the_drop_files_no_state_that_was_skipped(emission):  # Z4
    bench = Bench([full(1600, draft=True), state(1600)], 16, draft=Draft.DROP, emission=emission)
    bench.serve(a=tokens(0, 2000))
    assert bench.serve(b=tokens(0, 5202)) == [1984]
    assert bench.serve(c=[*tokens(0, 3300), 5]) == [1984]
    assert bench.serve(d=tokens(0, 5202)) == [5184]


@pytest.mark.parametrize("emission", [SEVERAL, ONE, NONE])
def test_a_junction_gets_its_own_state_from_every_back_end(emission):  # Z5
    bench = Bench([full(1600), state(1600)], 16, emission=emission)
    base, shared = tokens(0, 2000), tokens(1, 3000)
    bench.serve(a=base)
    bench.serve(b=base + shared + tokens(2, 4000))
    assert bench.serve(c=base + shared + tokens(3, 3000)) == [2000]
    assert bench.serve(d=base + shared + tokens(4, 3000)) == [4992]


@pytest.mark.parametrize("emission", [SEVERAL, ONE, NONE])
def test_a_state_inside_a_chunk_of_two_columns_has_a_block_of_its_own(emission):  # Z6
    bench = Bench([full(32), state(32)], 16, token_budget=64, slots_ahead=1, emission=emission)
    assert bench.serve(a=tokens(0, 113)) == [0]
    assert bench.serve(b=tokens(0, 113)) == [112]


@pytest.mark.parametrize("emission", [SEVERAL, ONE, NONE])
def test_states_are_named_by_what_they_are_not_by_the_smallest_block(emission):  # Z7, 18
    bench = Bench([full(32), state(64)], 32, retention=None, token_budget=96, emission=emission)
    bench.serve(a=tokens(0, 256))
    filed = sorted(bench.device.length_of(name) for name in bench.model.index.names() if name[0] == 1)
    assert filed == {SEVERAL: [64, 128, 192, 224, 256], ONE: [64, 192, 224, 256], NONE: [192, 224, 256]}[emission]
    assert bench.serve(z=tokens(0, 256)) == [224]


@pytest.mark.parametrize("drop", [False, True])
def test_an_aborted_prefill_leaves_what_was_committed_and_nothing_else(drop):  # 26
    specs = [full(1024, draft=drop), state(1024)]
    bench = Bench(specs, 1024, token_budget=8192, draft=Draft.DROP if drop else Draft.NONE)
    prompt = tokens(0, 40000)
    bench.model.arrive("a", prompt)
    step = bench.model.schedule()
    bench.model.abort("a")
    bench.device.plan(step)
    bench.device.run(step, {})
    bench.model.commit(step, {})
    assert bench.model.probe(prompt).tokens == 0
    bench.model.arrive("b", prompt)
    bench.step()
    bench.model.abort("b")
    assert bench.model.probe(prompt).tokens == 8192
    assert bench.model.reset()


def test_admission_counts_what_a_window_holds_at_once():  # A21
    bench = Bench([full(16), window(16, 64)], 16, blocks=32 + 13, token_budget=128, max_context=1024)
    assert bench.serve(a=tokens(0, 512)) == [0]
    assert bench.serve(b=tokens(0, 512)) == [496]
