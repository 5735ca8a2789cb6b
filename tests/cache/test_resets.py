"""Forgetting everything, with and without requests that run, on the reference model; the comment names the case."""

import pytest

from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference import Model, Rules
from hybrid_kv.cache.reference.events import Cleared
from hybrid_kv.cache.reference.snapshot import Snapshot
from hybrid_kv.geometry import resolve
from tests.cache.bench import Bench, full, state, tokens, window
from tests.cache.test_external import Bench as Fetching
from tests.cache.test_external import Offer, Store


def test_a_reset_is_refused_while_anything_is_held_and_clears_every_name_after():  # A10, G20
    bench = Bench([full(32), window(16, 32), state(32)], 16, events=True)
    prompt = tokens(0, 90)
    bench.arrive("a", prompt, answer=9)
    bench.step()
    before = Snapshot(bench.model)
    assert not bench.model.reset() and Snapshot(bench.model) == before
    bench.drain()
    assert [bench.filed(prompt, group) != [] for group in range(3)] == [True] * 3
    assert bench.model.reset()
    # Blocks, and parts of blocks, have lost their names.
    assert not list(bench.model.index.names()) and not any(b.names for b in bench.model.pools[0].blocks)
    assert bench.model.drain_events()[-1] == Cleared()
    assert bench.model.probe(prompt)[::2] == (0, Reason.COLD)


def test_a_reset_may_preempt_all_that_run():  # L6
    bench = Bench([full(16), window(16, 32), state(16)], 16)
    held = {}
    for name in "abc":
        bench.arrive(name, tokens(ord(name), 70), answer=9)
    for _ in range(4):
        bench.step()
    for name, request in bench.model.requests.items():
        held[name] = list(request.tokens)
    assert not bench.model.reset()
    assert bench.model.reset(preempt_running=True)
    assert bench.free == [4000] and not bench.model.running and bench.model.statistics.preemptions == 3
    assert {name: request.tokens for name, request in bench.model.requests.items()} == held
    step = bench.step()
    # In their old order, from the first token on.
    assert list(step.admitted) == ["a", "b", "c"] and [row.start for row in step.rows] == [0, 0, 0]
    bench.drain()
    assert bench.serve(again=tokens(ord("a"), 70)) == [64]


@pytest.mark.parametrize("flying", [1, 2, 3])
def test_steps_in_flight_deliver_their_tokens_to_preempted_requests_and_leave_nothing(flying):  # L6
    bench = Bench([full(16), state(16)], 16, steps_in_flight=flying)
    requests = [bench.arrive(name, tokens(ord(name), 40), answer=9) for name in "ab"]
    steps = [bench.schedule() for _ in range(flying)]
    assert bench.model.reset(preempt_running=True) and bench.free == [4000]
    for number, step in enumerate(steps, 1):
        bench.commit(step)
        assert [len(request.tokens) for request in requests] == [40 + number] * 2
        assert not list(bench.model.index.names())
    step = bench.step()
    assert {name: hit.tokens for name, hit in step.admitted.items()} == {"a": 0, "b": 0}
    bench.drain()


def test_a_reset_that_preempts_is_done_again_when_the_step_before_it_is_withdrawn():
    model = Model(Rules(resolve([full(4), state(4)]), (20, 20), (0, 1)))
    model.arrive("a", range(9), answer=5)
    model.commit(model.schedule(), {"a": [1]})
    step = model.schedule(revocable=True)
    assert model.reset(preempt_running=True)
    model.withdraw(step)
    assert model.waiting == ["a"] and not list(model.index.names())
    assert all(pool.free == pool.size for pool in model.pools)


def test_a_load_under_way_forbids_a_reset_and_preempts_nobody():  # L6
    bench = Fetching(Store(a=Offer(64, asynchronous=True)))
    bench.model.arrive("b", [7] * 40, answer=9)
    bench.step()
    bench.model.arrive("b2", [8] * 40, answer=9)
    bench.model.commit(bench.model.schedule(), {"b2": [1]})
    bench.model.arrive("a", range(100))
    step = bench.model.schedule()
    assert bench.model.loads
    before = Snapshot(bench.model)
    assert not bench.model.reset(preempt_running=True)
    assert Snapshot(bench.model) == before
    bench.model.commit(step, {"b2": [1]})


def test_what_was_fetched_and_not_yet_read_is_forgotten_and_fetched_again():  # I22, L6
    bench = Fetching(Store(a=Offer(64, asynchronous=True)))
    bench.model.arrive("a", range(100))
    bench.step()
    bench.bring()
    assert bench.free == 96
    assert bench.model.reset(preempt_running=True) and bench.free == 100
    bench.step()
    bench.bring()
    assert bench.step().admitted["a"].tokens == 64
    assert bench.store.asked == [("a", 0), ("a", 0)]
