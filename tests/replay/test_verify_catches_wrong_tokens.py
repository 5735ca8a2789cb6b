"""Verification passes exactly the greedy answers of the plain run."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.replay.run import replay
from hybrid_kv.replay.verify import EXPERT_TIE_MARGIN, EXPERT_TIE_REACH, TIE_MARGIN, group_by_prefix, verify
from hybrid_kv.simulate.traces import map_trace


def test_right_answers_pass(two_sessions, toy_engine, sampling) -> None:
    run = replay(toy_engine(), map_trace(two_sessions, 97, 3), sampling, 1000)
    judged = []
    found = verify(toy_engine(caching=False).score_with_margins, run.served, judged.append)
    assert found.passed
    assert (found.requests, found.tokens) == (5, 27)
    assert not found.ties
    assert sum(judged) == 5
    # Each session's last turn contains its earlier ones.
    assert found.sequences_scored == 2


def test_one_wrong_token_is_found_where_it_is(two_sessions, toy_engine, sampling) -> None:
    for order, index, offset in ((0, 0, 0), (0, 0, 5), (1, 3, 4), (4, 2, 4)):
        run = replay(toy_engine(wrong=(order, offset)), map_trace(two_sessions, 97, 3), sampling, 1000)
        found = verify(toy_engine().score_with_margins, run.served)
        assert not found.passed
        assert [(one.index, one.offset) for one in found.mismatches] == [(index, offset)]
        assert found.mismatches[0].served != found.mismatches[0].plain
        assert found.mismatches[0].margin == 1.0


def rows_for(*pairs: tuple[float, float]):
    """Scores of a two-token vocabulary with these logit rows after one prompt token."""
    return lambda tokens: (np.asarray([*pairs], np.float32)[: len(tokens)], np.ones(len(tokens), np.float32))


def test_only_a_near_tie_may_differ(served_by) -> None:
    close, apart = TIE_MARGIN / 2, TIE_MARGIN * 2
    found = verify(rows_for((1.0, 1.0 - close)), [served_by([0], [1])])
    assert found.passed
    assert len(found.ties) == 1
    found = verify(rows_for((1.0, 1.0 - apart)), [served_by([0], [1])])
    assert not found.passed
    assert not found.ties


def test_a_difference_right_after_an_expert_tie_is_told_apart_and_not_excused(served_by) -> None:
    length = 2 * EXPERT_TIE_REACH

    def score(tie_at):
        margins = np.ones(length, np.float32)
        margins[tie_at] = EXPERT_TIE_MARGIN / 2
        rows = np.tile(np.asarray([1.0, 0.0], np.float32), (length, 1))
        return lambda tokens: (rows[: len(tokens)], margins[: len(tokens)])

    answer = [0] * (length - 1) + [1]
    for tie_at, told in (
        (length - 1, True),
        (length - 1 - EXPERT_TIE_REACH, True),
        (length - 2 - EXPERT_TIE_REACH, False),
    ):
        found = verify(score(tie_at), [served_by([0], answer)])
        assert not found.passed
        assert (len(found.expert_ties), len(found.mismatches)) == (told, not told)
        assert not found.ties


def test_a_tie_of_two_others_does_not_excuse_a_third(served_by) -> None:
    def score(tokens):
        return np.asarray([[1.0, 1.0, 0.0]], np.float32), np.ones(1, np.float32)

    assert verify(score, [served_by([0], [1])]).passed
    assert not verify(score, [served_by([0], [2])]).passed


def test_rows_that_are_not_finite_prove_nothing(served_by) -> None:
    for bad in (np.nan, np.inf):
        for token in (0, 1):
            assert not verify(rows_for((bad, 0.0)), [served_by([0], [token])]).passed


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=8))
def test_groups_hold_each_sequence_once_under_an_extension_of_it(lists) -> None:
    groups = group_by_prefix([np.asarray(one, np.int32) for one in lists])
    assert sorted(member for _, members in groups for member in members) == list(range(len(lists)))
    for longest, members in groups:
        for member in members:
            assert lists[longest][: len(lists[member])] == lists[member]
    heads = [lists[longest] for longest, _ in groups]
    assert not any(a != b and b[: len(a)] == a for a in heads for b in heads)
    assert len({tuple(head) for head in heads}) == len(heads)
