"""What the reference model says about itself: reasons of misses, and steps that are taken back."""

import pytest

from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference import Draft, Model, Rules
from hybrid_kv.cache.reference.snapshot import Snapshot
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve


def model(*, blocks=(20, 20), **options) -> Model:
    geometry = resolve([GroupSpec("mla", "mla", 4), GroupSpec("kda", "recurrent", 4)], hash_unit=4)
    return Model(Rules(geometry, blocks, (0, 1), **options))


def serve(core: Model, name: str, prompt, **options):
    """One request alone, to its end; what its admission hit."""
    core.arrive(name, prompt, **options)
    hit = None
    while name in core.requests:
        step = core.schedule()
        hit = step.admitted.get(name, hit)
        core.commit(step, {name: [9]} if step.rows[0].samples else {}, [name] if step.rows[0].samples else [])
    return hit


def test_a_hit_that_could_not_be_longer_has_no_reason():
    core = model()
    assert serve(core, "a", range(13)).reason is Reason.COLD
    assert serve(core, "b", range(13)) == (12, 12, Reason.NONE)
    assert core.probe(range(13)) == (12, 12, Reason.NONE)
    assert core.probe(range(4)).reason is Reason.GRANULARITY
    assert core.probe([7] * 9).reason is Reason.COLD


def test_a_prefix_without_a_state_says_so():
    core = model()
    serve(core, "a", range(17))
    assert core.probe([*range(8), 7, 7, 7]) == (0, 8, Reason.NO_STATE)


def test_what_was_evicted_is_not_called_cold():
    core = model(blocks=(6, 20))
    serve(core, "a", range(17))
    serve(core, "b", [7] * 23)
    assert core.probe(range(17)).reason is Reason.EVICTED
    assert core.reset()
    assert core.probe(range(17)).reason is Reason.COLD


def test_an_evicted_state_is_not_called_one_that_never_was():
    core = model(blocks=(40, 3))
    serve(core, "a", range(17))
    for number in range(4):
        serve(core, f"b{number}", [30 + number] * 9)
    assert core.probe(range(17))[1:] == (16, Reason.EVICTED)


def test_another_salt_is_a_reason_of_its_own():
    core = model()
    serve(core, "a", range(13), salt="one")
    assert core.probe(range(13)).reason is Reason.SALT
    assert core.probe(range(13), "two").reason is Reason.SALT
    assert core.probe(range(13), "one").reason is Reason.NONE


def test_a_request_that_does_not_read_and_a_cache_that_is_off():
    core = model()
    serve(core, "a", range(13))
    assert serve(core, "b", range(13), read_cache=False).reason is Reason.SKIPPED
    core = model(caching=False)
    assert serve(core, "a", range(13)).reason is core.probe(range(13)).reason is Reason.CACHING_OFF


def test_what_the_drop_gives_up_is_no_miss():
    geometry = resolve([GroupSpec("mla", "mla", 4, draft=True), GroupSpec("kda", "recurrent", 4)], hash_unit=4)
    core = Model(Rules(geometry, (20, 20), (0, 1), draft=Draft.DROP))
    serve(core, "a", range(13))
    assert core.probe(range(13)) == (8, 8, Reason.NONE)


def test_a_hit_given_up_for_lack_of_blocks_is_capped():
    geometry = resolve([GroupSpec("full", "full", 4)], hash_unit=2)
    core = Model(Rules(geometry, (2,), (0,)))
    serve(core, "a", [1, 2, 3, 4, 5, 6, 8])
    assert serve(core, "b", [1, 2, 3, 4, 5, 6, 8])[::2] == (0, Reason.CAPPED)


def test_a_withdrawn_step_leaves_nothing_behind():
    core = model(blocks=(6, 4))
    serve(core, "a", range(9))
    serve(core, "b", [7] * 9)
    core.arrive("c", [5] * 20)  # evicts
    before = Snapshot(core)
    step = core.schedule(revocable=True)
    assert step.rows and core.probe(range(9)).reason is Reason.EVICTED
    core.withdraw(step)
    assert Snapshot(core) == before
    assert core.probe(range(9)).tokens == 8
    assert core.schedule().admitted.keys() == {"c"}


def test_what_was_asked_for_after_a_withdrawn_step_stands():
    core = model(steps_in_flight=2)
    core.arrive("a", range(9), answer=5)
    core.arrive("gone", [5] * 4)
    first = core.schedule()
    second = core.schedule(revocable=True)
    core.commit(first, {"a": [1], "gone": [1]}, [])
    core.arrive("b", [8] * 4)
    core.abort("gone")
    core.withdraw(second)
    assert core.requests.keys() == {"a", "b"} and core.requests["a"].tokens == [*range(9), 1]
    assert core.probe(range(9)).tokens == 8
    third = core.schedule()
    assert {row.request.name: row.start for row in third.rows} == {"a": 9, "b": 0}


def test_only_a_revocable_step_that_is_not_committed_can_be_withdrawn():
    core = model()
    core.arrive("a", range(5), answer=5)
    step = core.schedule()
    with pytest.raises(UserError, match="revocable"):
        core.withdraw(step)
    core.commit(step, {"a": [1]})
    step = core.schedule(revocable=True)
    core.commit(step, {"a": [1]})
    with pytest.raises(UserError, match="revocable"):
        core.withdraw(step)
