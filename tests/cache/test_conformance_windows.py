"""Sliding windows: runs of blocks, holes, drops, what retention keeps, when blocks are given back.

Numbers of the reference system; the comment behind a test names the case. Where ours serves more, the test says why.
"""

import pytest

from hybrid_kv.cache.reference import Draft, Rules, lookup
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.bench import Bench, full, state, tokens, window


@pytest.mark.parametrize(
    ("blocks", "hit"),
    [
        ("T", 1), ("TF", 1), ("TT", 2), ("TTF", 2), ("TTT", 3), ("TTTF", 3),
        ("TTFTFFTTFTTT", 12), ("TTFTFFTTFFF", 8), ("TTFTFFTTFFFT", 8),
    ],
)  # fmt: skip
def test_a_run_as_long_as_the_window_is_a_hit_and_so_is_a_shorter_one_from_the_start(blocks, hit):  # D1
    rules = Rules(resolve([window(2, 4)]), (99,), (0,))
    chain = list(range(len(blocks)))
    found = lookup(rules, chain, 2 * len(blocks) + 1, lambda name: blocks[name[1]] == "T" or None)
    assert found.tokens == 2 * hit


def three(width: int, **options) -> Bench:
    draft = options.get("draft", Draft.NONE) is not Draft.NONE
    groups = [full(16, draft=draft), *(window(16, width, name, draft=draft) for name in ("one", "two"))]
    return Bench(groups, 16, blocks=60, retention=None, **options)


def columns(bench: Bench, name: str) -> list[list[int]]:
    return [sorted(table) for table in bench.model.requests[name].tables]


def hit_without(bench: Bench, prompt, evicted) -> int:
    """Evict blocks, (group, end of a unit each holds), and send the prompt again as "b"; its hit."""
    for group, end in evicted:
        bench.forget(prompt, group, end)
    bench.arrive("b", prompt, answer=2)
    bench.schedule()
    return bench.hits["b"]


@pytest.mark.parametrize(
    ("evicted", "hit"),
    [
        ([], 48), ([(1, 16)], 48), ([(0, 16)], 0), ([(0, 48), (1, 48), (2, 48)], 32), ([(0, 48)], 32), ([(1, 48)], 32),
        ([(2, 48)], 32), ([(0, 48), (1, 16)], 0),
    ],
)  # fmt: skip
def test_full_attention_and_two_windows_agree_on_one_hit(evicted, hit):  # D9
    bench = three(32)
    prompt = tokens(0, 55)
    bench.serve(a=prompt)
    assert hit_without(bench, prompt, evicted) == hit
    if not evicted:
        # The block the windows have left is not taken up; the last of each is new.
        assert columns(bench, "b") == [[0, 1, 2, 3], [1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize(
    ("evicted", "hit"),
    [
        ([], 80), ([(1, 16)], 80), ([(0, 16)], 0), ([(0, 80)], 64), ([(1, 80)], 64), ([(2, 80)], 64),
        ([(0, 80), (1, 80), (2, 80)], 64), ([(0, 80), (1, 16)], 64),
        ([(0, 80), (1, 32)], 16),
    ],
)  # fmt: skip
def test_a_draft_layers_hit_ends_a_unit_early_and_needs_no_proof_beyond(evicted, hit):  # D10
    """The reference system needs the unit behind a hit to be there as well, and hits a unit less once that is gone.

    Here the name of a unit proves the next one, so the sixth block is never asked for.
    """
    bench = three(48, draft=Draft.DROP)
    prompt = tokens(0, 6 * 16 + 7)
    bench.serve(a=prompt)
    assert bench.filed(prompt, 0) == [16, 32, 48, 64, 80]
    assert hit_without(bench, prompt, evicted) == hit
    if not evicted:
        assert columns(bench, "b") == [[0, 1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [2, 3, 4, 5, 6]]


def test_without_retention_only_the_end_of_a_prompt_is_kept():  # E4
    bench = Bench([full(32), window(8, 8)], 8)
    bench.serve(a=tokens(0, 128))
    # Hits in units of 8 instead of 32, so the end is 120 and not 96.
    assert bench.filed(tokens(0, 128), 1) == [112, 120, 128]
    assert bench.model.probe(tokens(0, 96)).tokens == 0
    assert bench.serve(b=tokens(0, 128)) == [120]


def test_an_interval_keeps_the_windows_at_its_multiples():  # E1
    bench = Bench([full(32), window(8, 8)], 8, retention=64)
    bench.serve(a=tokens(0, 128))
    assert bench.filed(tokens(0, 128), 1) == [64, 112, 120, 128]
    assert bench.serve(b=tokens(0, 70)) == [64]


def test_a_window_gives_back_what_it_has_left_when_the_step_is_done():  # K1
    bench = Bench([full(16), window(16, 32)], 16)
    request = bench.arrive("a", tokens(0, 160), answer=20)
    step = bench.schedule()
    assert sorted(request.tables[1]) == list(range(10))
    bench.commit(step)
    # The next token is at 160 and reads from 129 on.
    assert sorted(request.tables[1]) == [8, 9]
    step = bench.schedule()
    assert sorted(request.tables[1]) == [8, 9, 10]
    for _ in range(17):
        bench.commit(step)
        step = bench.schedule()
    assert sorted(request.tables[1]) == [9, 10, 11]
    bench.commit(step)


def local(block: int, chunk: int, name: str = "local") -> GroupSpec:
    return GroupSpec(name, "chunked_local", block, window=chunk)


# Which runs are hits


@pytest.mark.parametrize(
    ("blocks", "tail", "hit"),
    [
        ("TF", 0, 2), ("TF", 1, 2), ("TTF", 0, 2), ("TTF", 1, 2), ("TTTF", 0, 4), ("TTTF", 1, 4),
        ("TTFTFFTTTF", 0, 10), ("TTFTFFTTTF", 1, 10), ("TTFTFFTTFT", 0, 10), ("TTFTFFTTFT", 1, 10),
        ("TTFTFFTTT", 1, 9), ("TTFTFFTTF", 1, 8),
    ],
)  # fmt: skip
def test_blocks_before_the_chunk_of_the_next_token_need_not_be_there(blocks, tail, hit):  # D2
    rules = Rules(resolve([local(2, 4)]), (99,), (0,))
    chain = list(range(len(blocks)))
    known = 2 * len(blocks) + tail + 1
    assert lookup(rules, chain, known, lambda name: blocks[name[1]] == "T" or None).tokens == 2 * hit


def test_a_window_of_coarser_blocks_than_the_hash_unit_hits_in_whole_blocks():  # D3, B11
    bench = Bench([window(4, 8)], 2, retention=None)
    bench.serve(a=tokens(0, 9))
    bench.arrive("b", tokens(0, 8) + tokens(1, 5), answer=2)
    bench.schedule()
    assert bench.hits["b"] == 8 and columns(bench, "b") == [[0, 1, 2, 3]]
    # Seven of the tokens are three units and a half, and one block.
    assert bench.model.probe(tokens(0, 7) + [5] * 4).tokens == 4


@pytest.mark.parametrize(
    ("specs", "unit", "hits"),
    [
        ([full(2)], 2, {2, 4, 6, 8, 10}), ([full(4)], 2, {2, 4, 6, 8, 10}), ([full(4), state(4)], 4, {4, 8}),
        ([full(4), window(4, 4)], 2, {4, 8}), ([full(4), local(4, 4)], 2, {4, 8}),
        ([full(4), window(2, 4)], 2, {2, 4, 6, 8, 10}),
    ],
    ids=["unit is the block", "finer unit", "coarse unit", "coarse window", "coarse chunk", "fine window"],
)  # fmt: skip
def test_hits_are_as_fine_as_the_unit_unless_a_window_has_coarser_blocks(specs, unit, hits):  # B11, B12
    bench = Bench(specs, unit, retention=None)
    prompt = tokens(0, 12)
    bench.serve(a=prompt)
    found = {bench.model.probe(prompt[:length] + [5] * 3).tokens for length in range(2, 12)}
    assert found - {0} == hits


def test_a_hash_unit_that_does_not_divide_a_block_is_refused():  # B11, M17
    with pytest.raises(UserError, match="hash_unit: got 3; it must divide the block of group 'full'"):
        Bench([full(4)], 3)


def test_a_coarse_window_makes_the_hits_of_all_groups_coarse():  # G14
    bench = Bench([full(4), window(4, 8), state(4)], 2)
    bench.serve(a=tokens(0, 12))
    assert bench.geometry.hit_unit == 4
    assert bench.serve(b=tokens(0, 12)) == [8]


LAYOUTS = {
    "full": [full(16)], "full x2": [full(16), full(16, "two")], "window": [window(16, 32)], "state": [state(16)],
    "full, window": [full(16), window(16, 32)], "window, full": [window(16, 32), full(16)],
    "full, large": [full(16), window(16, 64)], "two windows": [window(16, 32), window(16, 64, "large")],
    "full, two windows": [full(16), window(16, 32), window(16, 64, "large")],
    "full, state": [full(16), state(16)], "state, full": [state(16), full(16)],
    "window, state": [window(16, 32), state(16)],
    "full, window, state": [full(16), window(16, 32), state(16)], "two states": [full(16), state(16), state(16, "two")],
    "state, large, full, window": [state(16), window(16, 64, "large"), full(16), window(16, 32)],
    "full, chunk": [full(16), local(16, 32)], "all": [full(16), window(16, 32), local(16, 32), state(16)],
}  # fmt: skip


@pytest.mark.parametrize("specs", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_mix_of_groups_in_any_order_serves_what_is_shared(specs):  # D11, J4
    bench = Bench(specs, 16)
    head = tokens(0, 48)
    bench.serve(a=head + tokens(1, 7))
    # A whole chunk ends at 48, so such a group reads nothing that lies before.
    assert bench.serve(b=head + tokens(2, 7)) == [48]


@pytest.mark.parametrize(
    "specs", [[full(16, draft=True), window(16, 48, draft=True)], [full(16, draft=True), window(16, 48)]]
)
def test_full_rows_and_a_window_drop_one_unit_together(specs):  # D12
    bench = Bench(specs, 16, draft=Draft.DROP, retention=None)
    head = tokens(0, 64)
    bench.serve(a=head + tokens(1, 7))
    bench.arrive("b", head + tokens(2, 7), answer=2)
    bench.schedule()
    assert bench.hits["b"] == 48 and bench.geometry.columns_of_hit(48) == (3, 3)


def test_a_window_alone_drops_a_unit_and_needs_the_one_it_reads():  # D13
    bench = Bench([window(16, 16, draft=True)], 16, draft=Draft.DROP)
    prompt = tokens(0, 37)
    bench.serve(a=prompt)
    assert bench.model.probe(prompt).tokens == 16
    bench.forget(prompt, 0, 16)
    assert bench.serve(b=prompt) == [0]


@pytest.mark.parametrize(
    ("prompt", "more", "hit"),
    # The reference system hits in units of 32: 96, 32 and 64.
    [(128, 0, 120), (40, 24, 32), (72, 24, 64), (127, 0, 112)],
)
@pytest.mark.parametrize("windows", [1, 2])
def test_a_window_keeps_what_a_hit_with_a_drop_ends_in(prompt, more, hit, windows):  # D14, D15, D16, E5
    groups = [window(8, 8, f"w{number}", draft=True) for number in range(windows)]
    bench = Bench([full(32, draft=True), *groups], 8, draft=Draft.DROP)
    bench.serve(a=tokens(0, prompt))
    assert bench.serve(b=tokens(0, prompt) + tokens(1, more)) == [hit]


def test_blocks_of_unlike_size_serve_one_hit():  # D17
    bench = Bench([full(32), window(16, 32)], 16, retention=None)
    prompt = tokens(0, 112)
    bench.serve(a=prompt)
    assert bench.model.probe(prompt).tokens == 96 and bench.geometry.columns_of_hit(96) == (3, 6)
    for end in (80, 96):
        bench.forget(prompt, 1, end)
    assert bench.serve(b=prompt) == [64] and bench.geometry.columns_of_hit(64) == (2, 4)


# What retention keeps


@pytest.mark.parametrize(
    ("width", "retention", "ends"),
    [
        (16, 0, [96, 240]), (48, 0, [64, 80, 96, 208, 224, 240]), (16, 64, [64, 96, 128, 192, 240, 256]),
        (16, None, list(range(16, 257, 16))),
    ],
)  # fmt: skip
def test_the_window_before_a_shared_prefix_ends_is_kept(width, retention, ends):  # D21
    bench = Bench([full(16), window(16, width)], 16, retention=retention)
    bench.serve(a=tokens(0, 256))
    prompt = tokens(0, 96) + tokens(1, 160)
    bench.serve(b=prompt)
    assert set(bench.filed(prompt, 1)) >= set(ends)
    assert bench.serve(c=prompt[:96] + tokens(2, 40)) == [96]


@pytest.mark.parametrize(
    ("retention", "ends"), [(64, [64, 128, 192, 240, 256]), (0, [240]), (None, list(range(16, 257, 16)))]
)
def test_a_window_alone_keeps_its_end_and_what_retention_asks_for(retention, ends):  # D23
    bench = Bench([window(16, 16)], 16, retention=retention)
    prompt = tokens(0, 256)
    bench.serve(a=prompt)
    assert set(bench.filed(prompt, 0)) >= set(ends)
    # Besides, the units around the end, where an edited prompt or a longer one resumes.
    assert set(bench.filed(prompt, 0)) <= {*ends, 224, 240, 256} | {end - 16 for end in ends}
    assert bench.serve(b=prompt) == [240]


@pytest.mark.parametrize(("drop", "hit"), [(False, 64), (True, 48)])
@pytest.mark.parametrize("junctions", [5, 0])
def test_the_second_sharer_of_a_window_makes_the_third_hit_without_retention(drop, hit, junctions):  # E13
    rules = {"draft": Draft.DROP} if drop else {}
    bench = Bench([full(16, draft=drop), window(16, 32, draft=drop)], 16, junctions=junctions, **rules)
    head = tokens(0, 64)
    assert [bench.serve(**{name: head + tokens(ord(name), 90)})[0] for name in "abc"] == [0, 0, hit if junctions else 0]


@pytest.mark.parametrize("retention", [33, -33, -32])
def test_an_interval_at_which_no_hit_can_end_is_refused(retention):  # E2
    with pytest.raises(UserError, match=f"retention: got {retention}; use None, 0 or a multiple of 8"):
        Bench([full(32), window(8, 8)], 8, retention=retention)
    with pytest.raises(UserError, match="use None, 0 or a multiple of 32"):
        Bench([full(32), window(8, 8)], 4, retention=retention)  # with the finer unit a window hits in whole blocks
    Bench([full(16)], 16, retention=0)


def test_what_retention_keeps_outlives_another_long_request():  # E3
    specs = [full(256), window(64, 512), window(8, 128, "middle"), window(4, 8, "small")]
    bench = Bench(specs, 4, blocks=(40, 100, 700, 1300), retention=1024)
    prompt = tokens(0, 4096)
    bench.serve(a=prompt)
    for seed in (1, 2):
        bench.serve(**{f"fill {seed}": tokens(seed, 4096)})
        assert bench.model.probe(prompt[:1800]).tokens == 1024
        assert bench.geometry.columns_of_hit(1024) == (4, 16, 128, 256)
        assert bench.serve(**{f"again {seed}": prompt[:1025] + tokens(seed, 775)}) == [1024]


# When blocks are given back


@pytest.mark.parametrize(
    ("spec", "computed", "left"),
    [
        (window(2, 4), 4, 0), (window(2, 4), 5, 1), (window(2, 4), 6, 1), (window(2, 4), 7, 2), (window(2, 4), 11, 4),
        (local(2, 4), 3, 0), (local(2, 4), 4, 2), (local(2, 4), 6, 2), (local(2, 4), 12, 6),
    ],
)  # fmt: skip
def test_a_block_is_given_back_when_no_later_token_reads_it(spec, computed, left):  # D4, D5
    bench = Bench([full(2), spec], 2, blocks=(99, 99))
    request = bench.arrive("a", tokens(0, 30))
    bench.step(budget=computed)
    assert request.computed == computed
    held = bench.geometry.groups[1].columns(computed)
    assert sorted(request.tables[1]) == list(range(left, held))
    assert bench.free == [99 - held, 99 - (held - left)]
