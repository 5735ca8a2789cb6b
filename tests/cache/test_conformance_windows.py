"""Sliding windows: runs of blocks, holes, drops, what retention keeps, when blocks are given back.

Numbers of the reference system; the comment behind a test names the case. Where ours serves more, the test says why.
"""

import pytest

from hybrid_kv.cache.reference import Draft, Rules, lookup
from hybrid_kv.geometry import resolve
from tests.cache.bench import Bench, full, tokens, window


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
        ([], 80), ([(1, 16)], 80), ([(0, 16)], 0), ([(1, 80)], 64), ([(2, 80)], 64), ([(0, 80), (1, 16)], 64),
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
