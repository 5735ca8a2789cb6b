"""What the reference model says about itself: reasons of misses, and steps that are taken back."""

import pytest

from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference import Draft, Model, Rules
from hybrid_kv.cache.reference.events import Cleared, Removed, Stored
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


# Events and statistics


def test_every_registration_is_told_with_its_tokens_and_its_parent():  # C1, C3
    core = model(events=True)
    serve(core, "a", range(9))
    keys = core.prefixes.known(range(9), 4)
    assert core.drain_events() == [
        Stored(1, (keys[1],), 4, 8, keys[0], 4), Stored(0, (keys[0],), 0, 4, None, 4),
        Stored(0, (keys[1],), 4, 8, keys[0], 4),
    ]  # fmt: skip
    assert core.drain_events() == []
    serve(core, "b", range(9))
    assert core.drain_events() == []  # nothing new


def test_an_event_covers_the_units_that_were_filed_of_one_block():  # C3
    geometry = resolve([GroupSpec("mla", "mla", 16)], hash_unit=4)
    core = Model(Rules(geometry, (20,), (0,), events=True))
    core.arrive("a", range(10), answer=9)
    core.commit(core.schedule(), {"a": [10]})
    first = core.drain_events()
    for token in range(11, 19):
        core.commit(core.schedule(), {"a": [token]})
    keys = core.prefixes.known(range(20), 4)
    assert first == [Stored(0, (keys[0], keys[1]), 0, 8, None, 16)]
    # Units of the answer as they are computed, each behind the one before; the seventeenth token is no unit yet.
    assert core.drain_events() == [
        Stored(0, (keys[2],), 8, 12, keys[1], 16), Stored(0, (keys[3],), 12, 16, keys[2], 16),
    ]  # fmt: skip


def test_a_full_report_tells_of_hits_again_and_of_nothing_where_there_is_none():  # C2
    for hits, told in ((True, 2), (False, 0)):
        core = model(events=True, event_hits=hits)
        serve(core, "a", range(9))
        core.drain_events()
        core.arrive("b", [7] * 9, answer=5)
        step = core.schedule()
        assert core.drain_events() == []
        core.commit(step, {"b": [1]})
        core.drain_events()
        core.arrive("c", range(9), answer=5)
        core.schedule()
        events = core.drain_events()
        assert [(event.group, event.first, event.stop) for event in events] == (
            [(0, 0, 4), (0, 4, 8), (1, 4, 8)] if told else []
        )


def test_a_prompt_of_whole_units_leaves_rows_and_state_one_unit_before_its_end():  # Z11
    """Whoever follows the events, to keep a second copy elsewhere, hears of both."""
    geometry = resolve([GroupSpec("mla", "mla", 32), GroupSpec("kda", "recurrent", 32)], hash_unit=16)
    core = Model(Rules(geometry, (20, 20), (0, 1), events=True))
    serve(core, "a", range(64))
    told = core.drain_events()
    key = core.prefixes.known(range(64), 16)[2]  # of 48 tokens, where the same prompt resumes
    assert any(event.group == 0 and key in event.keys and event.block == 32 for event in told)
    assert [(event.first, event.stop) for event in told if event.group == 1] == [(48, 64), (32, 48)]
    assert core.probe(range(64)).tokens == 48


def test_the_loss_of_every_key_is_told():  # C1
    core = model(blocks=(3, 20), events=True)
    serve(core, "a", range(9))
    core.drain_events()
    serve(core, "b", [7] * 11)
    lost = [event for event in core.drain_events() if isinstance(event, Removed)]
    assert lost == [Removed(0, key) for key in reversed(core.prefixes.known(range(9), 4))]
    assert core.reset()
    assert core.drain_events()[-1] == Cleared()


def test_events_speak_of_blocks_in_the_geometry_of_their_group():  # Z12
    geometry = resolve([GroupSpec("mla", "mla", 16), GroupSpec("kda", "recurrent", 16)], dcp=8, hash_unit=16)
    core = Model(Rules(geometry, (20, 20), (0, 1), events=True, event_hits=True))
    serve(core, "a", range(257))
    filed = [event for event in core.drain_events() if event.group == 0]
    assert [(event.first, event.stop, event.block, len(event.keys)) for event in filed] == [
        (0, 128, 128, 8), (128, 256, 128, 8),
    ]  # fmt: skip
    assert serve(core, "b", [*range(256), 7, 7, 7]).tokens == 256
    served = [event for event in core.drain_events() if event.group == 0]
    assert served == filed  # 2 blocks of 128, not of 16


def test_events_of_a_step_that_may_be_withdrawn_are_held_back():
    core = model(blocks=(3, 20), events=True)
    serve(core, "a", range(9))
    core.drain_events()
    core.arrive("b", [7] * 11)
    step = core.schedule(revocable=True)
    assert core.drain_events() == []
    core.withdraw(step)
    assert core.drain_events() == []
    core.commit(core.schedule(), {"b": [1]}, ["b"])
    assert len(core.drain_events()) > 2


def test_nobody_listens_unless_asked_to():
    with pytest.raises(UserError, match="events"):
        model().drain_events()
    with pytest.raises(UserError, match="event_hits"):
        model(event_hits=True)


def test_statistics_count_each_admission_once():  # A26
    core = model(blocks=(7, 20))
    serve(core, "a", range(17))
    core.arrive("b", range(17), answer=8)
    core.arrive("c", [7] * 13)
    while core.requests:  # c waits for blocks
        step = core.schedule()
        samples = [row.request.name for row in step.rows if row.samples]
        core.commit(step, {name: [1] for name in samples}, samples)
    seen = core.statistics
    assert (seen.admissions, seen.queries, seen.hits) == (3, 17 + 17 + 13, 16)
    assert seen.reasons == {Reason.COLD: 2, Reason.NONE: 1}
    assert (seen.resumes, seen.preemptions) == (0, 0)
    assert seen.states >= 2 and core.evictions >= 1


def test_a_resume_is_counted_apart():
    core = model(blocks=(5, 9))
    core.arrive("a", range(11), answer=6)
    core.arrive("b", [7] * 6, answer=6)
    given = {"a": 0, "b": 0}
    while core.requests:
        step = core.schedule()
        samples = [row.request.name for row in step.rows if row.samples]
        for name in samples:
            given[name] += 1
        core.commit(step, {name: [1] for name in samples}, [name for name in samples if given[name] == 6])
    seen = core.statistics
    assert seen.preemptions == seen.resumes >= 1
    assert (seen.admissions, seen.queries) == (2, 17)
    assert seen.resume_queries > 6
