"""The reference model is sound under random traffic, and its checks do notice what would make it unsound."""

import collections

import pytest

from hybrid_kv.cache.emission import EmissionCapability
from hybrid_kv.cache.reference import (
    Draft,
    Model,
    Row,
    Rules,
    admission,
    external,
    lookup,
    snapshot,
    states,
    windows,
)
from hybrid_kv.cache.reference.pool import Pool
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.simulate.soak import workload


def test_no_workload_reads_or_files_content_of_another_prefix():
    outcomes = [workload(seed) for seed in range(100)]
    assert [(one.seed, one.fault) for one in outcomes if one.fault] == []
    happened = collections.Counter()
    for one in outcomes:
        happened.update(one.counts)
        happened.update(dropping=one.rules.longest_lag, overlapped=one.rules.steps_in_flight > 1)
        happened.update({group.kind.value: 1 for group in one.rules.geometry.groups})
    assert min(count for what, count in happened.items() if what != "CAPPED") >= 5, happened


def _keep_names(monkeypatch):
    def take(self):
        block = self.nameless.pop() if self.nameless else self.named.popitem(last=False)[0]
        block.holders = 1
        return block

    monkeypatch.setattr(Pool, "take", take)


def _file_too_much(monkeypatch):
    real = Model.nameable
    monkeypatch.setattr(
        Model,
        "nameable",
        lambda self, request, group, computed: real(self, request, group, computed + self.rules.unit),
    )


def _trust_other_successors(monkeypatch):
    monkeypatch.setattr(Rules, "lag", lambda self, group: 0)


def _share_what_is_not_computed(monkeypatch):
    monkeypatch.setattr(admission, "find_hit", _greedy_hit)


def _greedy_hit(model, request):
    return lookup(model.rules, request.chain, len(request.tokens), model.find_soon), model.find_soon


def _hold_twice(monkeypatch):
    real = Pool.hold

    def hold(self, block):
        real(self, block)
        block.holders += 1

    monkeypatch.setattr(Pool, "hold", hold)


def _file_the_state_a_row_in_flight_writes_over(monkeypatch):
    monkeypatch.setattr(states, "written_over", lambda request, unit: set())


def _file_what_is_in_flight(monkeypatch):
    real = Model.nameable
    monkeypatch.setattr(
        Model, "nameable", lambda self, request, group, computed: real(self, request, group, request.planned)
    )


def _admit_before_late_tokens_are_in(monkeypatch):
    monkeypatch.setattr(Request, "awaits_tokens", False)


def _take_a_stale_row_for_a_row(monkeypatch):
    monkeypatch.setattr(Row, "stale", False)


def _share_what_lost_its_holders(monkeypatch):
    monkeypatch.setattr(Model, "forget_unheld", lambda self: None)


def _keep_refused_drafts(monkeypatch):
    monkeypatch.setattr(Row, "stands", lambda self, sampled: self.length)


def _leave_windows_before_the_commit(monkeypatch):
    real = windows.leave

    def leave(core, request):
        computed, request.computed = request.computed, request.planned
        real(core, request)
        request.computed = computed

    monkeypatch.setattr(windows, "leave", leave)


def _restore_all_but_the_order_of_eviction(monkeypatch):
    monkeypatch.setattr(snapshot, "_CONSTANT", (*snapshot._CONSTANT, "named"))


def _load_before_the_steps_in_flight_have_run(monkeypatch):
    real = external.begin

    def begin(*arguments):
        load = real(*arguments)
        load.after = None
        return load

    monkeypatch.setattr(external, "begin", begin)


def _free_a_load_with_its_request(monkeypatch):
    real = Model._leave

    def leave(self, name):
        load = self.requests[name].load
        real(self, name)
        if load:
            load.drop()
            load.drop = lambda: None

    monkeypatch.setattr(Model, "_leave", leave)


def _resume_where_the_store_has_no_state(monkeypatch):
    monkeypatch.setattr(
        external,
        "usable",
        lambda core, request, offer: (
            min(offer.tokens, core.rules.longest_hit(len(request.tokens)))
            // core.rules.geometry.hit_unit
            * core.rules.geometry.hit_unit
        ),
    )


def _name_what_has_not_arrived(monkeypatch):
    real = external.file
    monkeypatch.setattr(external, "file", lambda core, load, good: real(core, load, [load.tokens] * len(good)))


def _take_rows_on_a_failed_load_for_rows(monkeypatch):
    monkeypatch.setattr(Row, "void", property(lambda self: False, lambda self, value: None))


def _file_a_state_that_drafts_have_passed(monkeypatch):
    monkeypatch.setattr(states, "saved", lambda rules, row, start, end, boundary: start < boundary <= end)


def _file_a_running_state_that_moves_on(monkeypatch):
    monkeypatch.setattr(states, "under_way", lambda request: False)


# Where to begin looking, for those that show but now and then.
FIRST_SEED = {
    "_admit_before_late_tokens_are_in": 100, "_share_what_lost_its_holders": 50,
    "_load_before_the_steps_in_flight_have_run": 30,
}  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    [
        _keep_names, _file_too_much, _trust_other_successors, _share_what_is_not_computed, _hold_twice,
        _file_the_state_a_row_in_flight_writes_over, _file_what_is_in_flight, _admit_before_late_tokens_are_in,
        _take_a_stale_row_for_a_row, _share_what_lost_its_holders, _keep_refused_drafts,
        _leave_windows_before_the_commit, _restore_all_but_the_order_of_eviction,
        _load_before_the_steps_in_flight_have_run, _free_a_load_with_its_request,
        _resume_where_the_store_has_no_state, _name_what_has_not_arrived,
        _take_rows_on_a_failed_load_for_rows, _file_a_state_that_drafts_have_passed,
        _file_a_running_state_that_moves_on,
    ],
    ids=lambda fault: fault.__name__.strip("_"),
)  # fmt: skip
def test_a_broken_rule_is_noticed(fault, monkeypatch):
    fault(monkeypatch)

    def fails(seed):
        try:
            return bool(workload(seed).fault)
        except (AssertionError, KeyError, IndexError):
            return True

    first = FIRST_SEED.get(fault.__name__, 0)
    assert any(fails(seed) for seed in range(first, first + 150))


def _model(**options) -> Model:
    geometry = resolve([GroupSpec("mla", "mla", 4), GroupSpec("kda", "recurrent", 4)], dcp=1, hash_unit=4)
    return Model(Rules(geometry, (20, 20), (0, 1), **options))


def _serve(model: Model, name: str, prompt, answer=1) -> int:
    """Runs one request alone; its hit."""
    model.arrive(name, prompt, answer=answer)
    hit = None
    while name in model.requests:
        step = model.schedule()
        hit = step.admitted[name].tokens if name in step.admitted else hit
        row = step.rows[0]
        done = row.start + row.length == len(row.request.tokens)
        given = len(row.request.tokens) - len(prompt) + 1
        model.commit(step, {name: [9]} if done else {}, [name] if done and given == answer else [])
    return hit


def test_a_prompt_sent_again_is_served_up_to_its_last_unit():
    model = _model()
    assert _serve(model, "a", range(15)) == 0
    assert _serve(model, "b", range(15)) == 12
    assert _serve(model, "c", [*range(15), 9, 1, 2]) == 12
    assert model.probe(range(13)).tokens == 12


def test_the_next_turn_resumes_behind_the_answer():
    model = _model()
    _serve(model, "a", range(15), answer=12)
    assert model.probe([*range(15), *[9] * 11, 3, 3]).tokens == 24


def test_a_probe_changes_nothing():
    model = _model()
    _serve(model, "a", range(15))
    before = [(list(pool.named), list(pool.nameless)) for pool in model.pools]
    assert model.probe([*range(8), 5, 5, 5, 5, 5]) == model.probe([*range(8), 5, 5, 5, 5, 5])
    assert not model.prefixes.forks(model.prefixes.known(range(8), 4)[-1])
    assert [(list(pool.named), list(pool.nameless)) for pool in model.pools] == before


def test_what_can_never_run_is_refused_and_nothing_changes():
    model = _model()
    with pytest.raises(UserError, match="alone needs"):
        model.arrive("a", range(90))
    with pytest.raises(UserError, match="prompt"):
        model.arrive("a", [])
    assert not model.requests and not model.waiting
    with pytest.raises(UserError, match="retention"):
        _model(retention=3)
    with pytest.raises(UserError, match="lookahead"):
        _model(draft=Draft.LOOKAHEAD)


def test_a_draft_layer_never_gets_a_row_that_saw_another_next_token():
    geometry = resolve([GroupSpec("mla", "mla", 4, draft=True)], dcp=1, hash_unit=4)
    model = Model(Rules(geometry, (20,), (0,), draft=Draft.DROP))
    _serve(model, "a", [*range(8), 1, 1, 1, 1, 1])
    # The rows of the first two units are known to continue with a's third unit only.
    assert model.probe([*range(8), 2, 2, 2, 2, 2]).tokens == 4
    assert model.probe([*range(8), 1, 1, 1, 1, 2]).tokens == 8


def _drive(model: Model, steps: int = 60) -> bool:
    """Runs until nothing is live; whether that came about."""
    for _ in range(steps):
        step = model.schedule()
        through = [row.request.name for row in step.rows if row.start + row.length == len(row.request.tokens)]
        model.commit(step, {name: [9] for name in through}, through)
        if not model.requests:
            return True
    return False


def test_a_hit_that_needs_more_blocks_than_there_are_is_given_up():
    model = Model(Rules(resolve([GroupSpec("full", "full", 4)], dcp=1, hash_unit=2), (2,), (0,)))
    for name in "abc":
        model.arrive(name, [1, 2, 3, 4, 5, 6, 8])
        assert _drive(model)


def test_who_left_before_the_commit_counts_for_nothing():
    model = _model()
    model.arrive("a", range(15))
    step = model.schedule()
    model.abort("a")
    model.arrive("a", [7, 7])
    model.commit(step, {"a": [1]}, ["a"])
    assert model.waiting == ["a"]
    step = model.schedule()
    model.abort("a")
    model.commit(step, {})
    assert model.reset()
    model.arrive("b", range(15))
    assert _drive(model)


def test_a_windowed_draft_group_shares_inside_a_step():
    local = GroupSpec("local", "chunked_local", 4, draft=True, window=4)
    geometry = resolve([local, GroupSpec("mla", "mla", 4)], dcp=1, hash_unit=4)
    model = Model(Rules(geometry, (50,), (0, 0), draft=Draft.DROP))
    for name in "ab":
        model.arrive(name, [1, 2, 3, 4, 5, 6])
    assert _drive(model)


def test_drafts_are_for_one_row():
    model = Model(Rules(resolve([GroupSpec("mla", "mla", 4)], dcp=1, hash_unit=4), (20,), (0,), slots_ahead=3))
    model.arrive("a", range(6), answer=10)
    model.commit(model.schedule(), {"a": [1]})
    model.propose("a", 3)
    lengths = []
    for _ in range(2):
        step = model.schedule()
        lengths.append(step.rows[0].length)
        model.commit(step, {"a": [1]})
    assert lengths == [4, 1]


@pytest.mark.parametrize(
    ("options", "named"),
    [({"ladder": (6,)}, "ladder"), ({"ladder": (0,)}, "ladder"), ({"slots_ahead": -1}, "slots_ahead"),
     ({"token_budget": 0}, "token_budget"), ({"chunk_limit": 0}, "chunk_limit"), ({"max_requests": 0}, "max_requests"),
     ({"junctions": -1}, "junctions: got -1"), ({"lookahead": -1}, "lookahead: got -1"),
     ({"emission": EmissionCapability(-1, 1, True)}, "emission"),
     ({"emission": EmissionCapability(1, 0, True)}, "emission")],
)  # fmt: skip
def test_rules_that_cannot_work_are_refused(options, named):
    with pytest.raises(UserError, match=named):
        _model(**options)
