"""The closed loop: trace order, one live request a session, generated answers in later prompts."""

import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.replay.contract import ReplayFailure
from hybrid_kv.replay.order import next_request
from hybrid_kv.replay.run import replay
from hybrid_kv.simulate.traces import TraceRequest, map_trace, prompts


def test_a_session_has_one_live_request(two_sessions) -> None:
    assert next_request(two_sessions, sent=set(), live=set()) == 0
    # a is busy and b's first prompt needs only a's first prompt.
    assert next_request(two_sessions, sent={0}, live={0}) == 3
    assert next_request(two_sessions, sent={0, 3}, live={0, 3}) is None
    assert next_request(two_sessions, sent={0, 3}, live={3}) == 1
    assert next_request(two_sessions, sent={0, 1, 2, 3, 4}, live=set()) is None


def test_a_prompt_waits_for_the_answer_that_it_contains() -> None:
    requests = [
        TraceRequest(0, "a", -1, 0, (1, 2), (9,) * 3),
        TraceRequest(1, "b", 0, 4, (5,), (9,)),
        TraceRequest(2, "b", 0, 2, (6,), (9,)),
        TraceRequest(3, "c", 0, 2, (7,), (9,)),
    ]
    # 1 reaches into 0's answer; 2 could start but must not overtake 1 in its session.
    assert next_request(requests, sent={0}, live={0}) == 3
    assert next_request(requests, sent={0, 3}, live={3}) == 1


def test_every_prompt_holds_the_generated_answers(two_sessions, toy_engine, sampling) -> None:
    engine = toy_engine()
    requests = map_trace(two_sessions, engine.vocab_size, engine.reserved_tokens)
    run = replay(engine, requests, sampling, 1000, in_flight=8)
    answers = {one.index: one.answer.tolist() for one in run.served}
    assert [len(answers[request.index]) for request in requests] == [len(request.out) for request in requests]
    expected = list(prompts(requests, answers.__getitem__))
    for one in run.served:
        assert one.prompt.tolist() == expected[one.index].tolist()
    assert [tuple(one.prompt) for one in run.served] == engine.added
    assert run.steps == 6 + 4 + 5  # session a, with b beside it


def test_no_more_than_in_flight_are_live(two_sessions, toy_engine, sampling) -> None:
    for in_flight, live in ((1, 1), (2, 2), (8, 2)):
        engine = toy_engine()
        run = replay(engine, map_trace(two_sessions, 97, 3), sampling, 1000, in_flight=in_flight)
        assert engine.most_live == live
        assert len(run.served) == 5
    assert [one.index for one in run.served] == [0, 3, 1, 4, 2]
    with pytest.raises(UserError, match="in flight"):
        replay(toy_engine(), two_sessions, sampling, 1000, in_flight=0)


def test_a_stalled_or_short_engine_fails_the_replay(two_sessions, toy_engine, sampling) -> None:
    requests = map_trace(two_sessions, 97, 3)
    with pytest.raises(ReplayFailure, match="no work"):
        replay(toy_engine(stalls=True), requests, sampling, 1000)
    with pytest.raises(ReplayFailure, match="5 of 6"):
        replay(toy_engine(stops_early=0), requests, sampling, 1000)
