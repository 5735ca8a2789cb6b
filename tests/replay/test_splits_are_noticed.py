"""A prefill cut for a checkpoint's sake is counted; one that the token budget cut is not."""

import pytest

from hybrid_kv.replay.run import replay
from hybrid_kv.replay.splits import Split
from hybrid_kv.simulate.traces import map_trace


@pytest.mark.parametrize("budget", [4, 8, 13, 16, 24, 1000])
def test_cuts_by_the_budget_are_no_splits(two_sessions, toy_engine, sampling, budget) -> None:
    engine = toy_engine(token_budget=budget)
    run = replay(engine, map_trace(two_sessions, 97, 3), sampling, budget)
    assert run.splits == ()
    assert any(len(one.chunks) > 1 for one in run.served) == (budget < 1000)


def test_cuts_with_budget_left_are_splits(two_sessions, toy_engine, sampling) -> None:
    run = replay(toy_engine(splits=True, caching=False), map_trace(two_sessions, 97, 3), sampling, 1000)
    # The last boundary inside each prompt; 32 tokens long, request 4's prompt is 30.
    assert run.splits == (Split(0, 16), Split(3, 16), Split(1, 24), Split(4, 24), Split(2, 40))
