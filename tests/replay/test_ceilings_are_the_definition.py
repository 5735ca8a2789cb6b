"""The fast ceilings equal the slow definition and the recorded numbers of the shipped traces."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv.errors import UserError
from hybrid_kv.simulate.ceilings import ceilings
from hybrid_kv.simulate.traces import prompts, read_trace

Served = list[tuple[list[int], list[int]]]


@pytest.mark.parametrize(
    ("name", "percent"),
    [("miniswe_60", (94.90, 93.00, 94.88, 94.88)), ("magagent_60", (79.94, 64.10, 64.10, 73.35))],
)
def test_shipped_traces_have_their_recorded_ceilings(traces_dir: Path, name: str, percent: tuple[float, ...]) -> None:
    requests = read_trace(traces_dir / f"{name}.jsonl.gz")
    answers = [request.out for request in requests]
    found = ceilings(list(zip(prompts(requests, answers.__getitem__), answers, strict=True)), grid=64)
    rates = (found.attention, found.end, found.end_turn, found.end_turn_branch)
    assert tuple(round(100 * rate, 2) for rate in rates) == percent


def slow_hits(served: Served, grid: int) -> tuple[int, int, int, int]:
    """Hit tokens of the four policies, by comparing every request with every earlier one."""

    def common(left: list[int], right: list[int]) -> int:
        pairs = enumerate(zip(left, right, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))

    seen: list[tuple[list[int], list[set[int]]]] = []
    totals = [0, 0, 0, 0]
    for prompt, answer in served:
        length = len(prompt)
        best = max((common(prompt, tokens) for tokens, _ in seen), default=0)
        hits = [
            max(
                (p for tokens, kept in seen for p in kept[k] if p <= min(common(prompt, tokens), length - 1)),
                default=0,
            )
            for k in range(3)
        ]
        totals[0] += min(best, length - 1) // grid * grid
        totals[1:] = [total + hit for total, hit in zip(totals[1:], hits, strict=True)]
        end = {length // grid * grid}
        turn = end | {(length + len(answer) - 1) // grid * grid}
        fork = best // grid * grid
        seen.append((prompt + answer, [end, turn, turn | ({fork} if fork > hits[2] else set())]))
    return totals[0], totals[1], totals[2], totals[3]


tokens = st.lists(st.integers(0, 1), max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(tokens.filter(len), tokens), min_size=1, max_size=8), st.sampled_from([1, 2, 3]))
def test_any_requests_have_the_hits_of_the_slow_definition(served: Served, grid: int) -> None:
    found = ceilings(served, grid)
    rates = np.array([found.attention, found.end, found.end_turn, found.end_turn_branch])
    assert tuple(np.rint(rates * found.prompt_tokens).astype(int)) == slow_hits(served, grid)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(UserError, match="grid"):
        ceilings([([1], [2])], grid=0)
    with pytest.raises(UserError, match="prompt"):
        ceilings([], grid=4)
