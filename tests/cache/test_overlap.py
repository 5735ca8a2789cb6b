"""Two steps in flight, caps and cadence, on the reference model; decisive numbers name their case."""

import pytest

from hybrid_kv.cache.reference import Model, Rules, room
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve


def model(*, blocks=(20, 20), specs=None, **options) -> Model:
    specs = specs or [GroupSpec("mla", "mla", 4), GroupSpec("kda", "recurrent", 4)]
    geometry = resolve(specs, dcp=1, hash_unit=4)
    return Model(Rules(geometry, blocks, tuple(range(len(specs))), **options))


def overlapped(**options) -> Model:
    return model(steps_in_flight=2, **options)


def rows(step) -> dict[str, tuple[int, int]]:
    return {row.request.name: (row.start, row.length) for row in step.rows}


def test_a_step_is_planned_on_tokens_that_are_not_sampled_yet():  # K2
    core = overlapped()
    core.arrive("a", range(7), answer=4)
    request = core.requests["a"]
    first, second = core.schedule(), core.schedule()
    assert (rows(first), rows(second)) == ({"a": (0, 7)}, {"a": (7, 1)})
    assert (request.computed, request.planned, request.promised) == (0, 8, 2)
    core.commit(first, {"a": [1]})
    assert (request.computed, request.planned, request.promised) == (7, 8, 1)


def test_no_key_names_what_is_in_flight():  # K10
    core = overlapped()
    core.arrive("a", range(9), answer=9)
    first, second = core.schedule(), core.schedule()
    assert core.probe(range(9)).tokens == 0
    core.commit(first, {"a": [9]})
    assert core.probe(range(9)).tokens == 8
    core.commit(second, {"a": [9]})


def test_no_row_is_planned_behind_the_longest_answer():  # K7, K10
    core = overlapped()
    core.arrive("a", range(7), answer=2)
    steps = [core.schedule(), core.schedule()]
    core.commit(steps[0], {"a": [1]})
    assert not core.schedule().rows
    core.commit(steps[1], {"a": [1]}, ["a"])
    assert all(pool.free == pool.size for pool in core.pools)


def test_drafts_in_flight_that_are_refused_move_the_next_row_back():
    core = overlapped()
    core.arrive("a", range(7), answer=30)
    first = core.schedule()
    core.propose("a", 3)
    second = core.schedule()
    core.propose("a", 3)
    core.commit(first, {"a": [1]})
    third = core.schedule()
    assert [(row.start, row.length, row.slack) for step in (second, third) for row in step.rows] == [
        (7, 4, 0), (11, 4, 3),
    ]  # fmt: skip
    core.commit(second, {"a": [1, 1]})
    assert (core.requests["a"].computed, core.requests["a"].planned) == (9, 13)
    core.commit(third, {"a": [1]})
    assert (core.requests["a"].computed, core.requests["a"].planned) == (10, 10)


def test_a_request_that_ended_leaves_a_row_in_flight_and_nothing_else():
    core = overlapped()
    core.arrive("a", range(7), answer=30)
    first, second = core.schedule(), core.schedule()
    core.commit(first, {"a": [1]}, ["a"])
    assert all(pool.free == pool.size for pool in core.pools)
    core.commit(second, {})
    assert core.reset()


def test_the_state_of_a_turn_outlives_a_row_behind_its_end():
    core = overlapped()
    core.arrive("a", range(6), answer=30)
    flying = [core.schedule(), core.schedule()]
    # 6 + 7 tokens known, 12 computed: the row that computes the 13th is on its way.
    for _ in range(6):
        core.commit(flying.pop(0), {"a": [9]})
        flying.append(core.schedule())
    core.commit(flying.pop(0), {"a": [9]}, ["a"])
    assert core.probe([*range(6), *[9] * 6, 5]).tokens == 12
    core.commit(flying.pop(0), {})


def test_tokens_of_a_preempted_request_are_delivered_and_it_is_admitted_again_after_them():  # K8, K10
    core = overlapped(blocks=(5, 9))
    core.arrive("a", range(11), answer=6)
    core.arrive("b", [7] * 6, answer=6)
    first = core.schedule()
    assert rows(first) == {"a": (0, 11), "b": (0, 6)}
    second = core.schedule()
    core.commit(first, {"a": [1], "b": [1]})
    third = core.schedule()  # the thirteenth token of a needs the block that b has
    assert third.preempted == ["b"] and rows(third) == {"a": (12, 1)}
    assert core.requests["b"].awaits_tokens
    core.commit(second, {"a": [1], "b": [2]})
    assert core.requests["b"].tokens == [*[7] * 6, 1, 2]
    assert not core.requests["b"].awaits_tokens


def test_steps_are_committed_in_their_order_and_no_more_are_planned_than_may_fly():
    core = overlapped()
    core.arrive("a", range(7), answer=9)
    first, second = core.schedule(), core.schedule()
    with pytest.raises(UserError, match="commit the oldest first"):
        core.schedule()
    with pytest.raises(UserError, match="in the order"):
        core.commit(second, {"a": [1]})
    with pytest.raises(UserError, match="this row gives 1 to 1"):
        core.commit(first, {"a": [1, 2]})
    with pytest.raises(UserError, match="this row gives 1 to 1"):
        core.commit(first, {})
    core.commit(first, {"a": [1]})
    core.commit(second, {"a": [1]})


@pytest.mark.parametrize(("kind", "window", "flying", "blocks"), [
    ("sliding_window", 1024, 1, 129), ("sliding_window", 1024, 2, 193),
    ("chunked_local", 1024, 1, 129), ("chunked_local", 1024, 2, 193),
])  # fmt: skip
def test_a_window_counts_the_tokens_of_every_step_in_flight(kind, window, flying, blocks):  # K3
    geometry = resolve([GroupSpec("w", kind, 16, window=window)])
    rules = Rules(geometry, (500,), (0,), token_budget=1024, steps_in_flight=flying)
    assert room.most_at_once(rules, geometry.groups[0]) == blocks


def test_a_window_is_left_when_the_step_that_moved_it_is_committed():  # K1, K4
    core = overlapped(blocks=(50,), specs=[GroupSpec("w", "sliding_window", 4, window=4)])
    core.arrive("a", range(23), answer=9)
    first, second = core.schedule(), core.schedule()
    assert len(core.requests["a"].tables[0]) == 6
    core.commit(first, {"a": [1]})
    assert sorted(core.requests["a"].tables[0]) == [5]
    core.commit(second, {"a": [1]})


# Caps and cadence


def test_fewer_requests_run_than_there_are_places_for():
    core = model(max_active=2)
    for name in "abc":
        core.arrive(name, [ord(name)] * 5)
    assert list(rows(core.schedule())) == ["a", "b"]


def test_the_chunk_limit_holds_while_several_live_and_may_grow_to_a_fair_share():
    core = model(chunk_limit=4, token_budget=24)
    core.arrive("a", range(20))
    core.commit(core.schedule(), {"a": [1]}, ["a"])
    for name in "ab":
        core.arrive(name, [ord(name)] * 20)
    assert rows(core.schedule()) == {"a": (0, 4), "b": (0, 4)}
    core = model(chunk_limit=4, chunk_adaptive=True, token_budget=24)
    for name in "ab":
        core.arrive(name, [ord(name)] * 20)
    assert rows(core.schedule()) == {"a": (0, 12), "b": (0, 12)}


def test_prefills_keep_their_distance_while_others_decode():
    core = model(prefill_interval=3)
    core.arrive("a", range(5), answer=20)
    core.commit(core.schedule(), {"a": [1]})
    core.arrive("b", [8] * 5)
    seen = []
    for _ in range(3):
        step = core.schedule()
        seen.append(sorted(rows(step)))
        core.commit(step, {name: [1] for name in rows(step)})
    assert seen == [["a"], ["a"], ["a", "b"]]


def test_an_admission_leaves_a_share_of_the_pool_free_while_others_run():
    core = model(blocks=(20, 20), watermark=0.25)
    core.arrive("a", range(40))
    core.arrive("b", [8] * 24)  # 10 of 20 blocks are taken, 6 wanted, 5 to stay free
    assert list(rows(core.schedule())) == ["a"]


@pytest.mark.parametrize(("whole", "admitted"), [(True, ["a"]), (False, ["a", "b"])])
def test_admission_counts_the_whole_prompt_or_its_first_chunk(whole, admitted):
    core = model(blocks=(10, 10), admit_whole=whole, token_budget=16, chunk_limit=8)
    core.arrive("a", range(36))
    core.arrive("b", [8] * 36)
    assert list(rows(core.schedule())) == admitted


@pytest.mark.parametrize("options", [
    {"steps_in_flight": 0}, {"max_active": 0}, {"prefill_interval": 0}, {"watermark": 1.0}, {"watermark": -0.1},
])  # fmt: skip
def test_caps_out_of_range_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        model(**options)
