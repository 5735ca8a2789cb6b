"""Hits in a store outside the pools: offers, loads, reservations and what happens when they fail. Numbers name their
case."""

import pytest

from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference import Load, Model, Offer, Rules
from hybrid_kv.cache.reference.content import Device, Unsound, broken
from hybrid_kv.cache.reference.snapshot import Snapshot
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.bench import Bench as Local
from tests.cache.bench import full, state, tokens


class Store:
    """Answers by name; nothing for those it does not know."""

    def __init__(self, **answers: Offer | None) -> None:
        self.answers = answers
        self.asked: list[tuple[str, int]] = []

    def ask(self, name, tokens, local):
        self.asked.append((name, local))
        return self.answers.get(name, Offer(0))


class Bench:
    """A model with a store and a device; asynchronous loads wait in `loads` until they are brought."""

    def __init__(self, store, specs=None, unit=16, blocks=100, **options) -> None:
        specs = specs or [GroupSpec("full", "full", 16)]
        geometry = resolve(specs, hash_unit=unit)
        self.store = store
        self.model = Model(Rules(geometry, (blocks,), (0,) * len(specs), **options), store)
        self.device = Device(self.model)
        self.hits = {}
        self.preempted: list[str] = []

    @property
    def free(self) -> int:
        return self.model.pools[0].free

    def step(self, failed=()):
        step = self.model.schedule()
        self.device.plan(step)
        self.hits |= step.admitted
        self.preempted += step.preempted
        through = [row.request.name for row in step.rows if row.samples and row.request.name not in failed]
        self.device.run(step, {name: [1] for name in through}, failed)
        self.model.commit(step, {name: [1] for name in through}, through, failed)
        self.device.check(step)
        assert broken(self.model) == []
        return step

    def bring(self, good=None) -> None:
        (load,) = self.model.loads
        self.device.load(load, good)
        self.model.loaded(load, good)
        assert broken(self.model) == []

    def serve(self, name, prompt, **options):
        self.model.arrive(name, prompt, **options)
        for _ in range(50):
            if name not in self.model.requests:
                return self.hits[name]
            self.step()
        raise AssertionError("no end in sight")


STATE = [GroupSpec("full", "full", 16), GroupSpec("kda", "recurrent", 16)]


def test_part_of_a_prompt_is_fetched_in_the_step_that_admits_it():  # L3
    bench = Bench(Store(a=Offer(40)))
    assert bench.serve("a", range(100)).tokens == 32
    assert bench.model.statistics.external == 32
    assert bench.free == 100
    assert bench.model.probe(range(100)).tokens == 96  # what was fetched is found like what was computed


def test_a_state_is_fetched_at_the_length_of_the_hit_or_nothing_is():  # 89
    assert Bench(Store(a=Offer(2048)), STATE, blocks=400).serve("a", range(2100)).tokens == 0
    bench = Bench(Store(a=Offer(2048, states=(1024,))), STATE, blocks=400)
    assert bench.serve("a", range(2100)).tokens == 1024
    assert bench.model.probe([*range(1024), 5]).tokens == 1024  # the fetched state is filed


@pytest.mark.parametrize(("specs", "hit"), [(None, 8688), (STATE, 8688)])
def test_a_store_that_has_everything_leaves_the_last_token_to_compute(specs, hit):  # 96
    bench = Bench(Store(a=Offer(8704, states=tuple(range(16, 8705, 16)))), specs, blocks=1200)
    assert bench.serve("a", range(8704)).tokens == hit
    bench = Bench(Store(a=Offer(8704, states=(8704,))), STATE, blocks=1200)
    assert bench.serve("a", range(8704)).tokens == 0  # a state behind the last token is none in front of it


def test_rows_that_are_here_are_not_fetched_again():  # 92
    bench = Bench(Store(b=Offer(1496, states=(1488,))), STATE, blocks=400)
    bench.serve("a", range(1024 + 5))
    bench.model.arrive("b", [*range(1024), *[7] * 476])
    (load,) = bench.step().loads
    assert (load.tokens, load.first) == (1488, [1024, 1488])
    assert bench.hits["b"].tokens == 1488


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("groups", [2, 3])
def test_hits_of_all_groups_are_held_before_a_fetch_takes_anything(groups, asynchronous):  # A20
    # Five blocks of each group are here, two are fetched, one is computed: all there are.
    specs = [GroupSpec(str(number), "full", 16) for number in range(groups)]
    bench = Bench(Store(), specs, blocks=8 * groups)
    prompt = list(range(120))
    bench.serve("a", prompt[:81])
    for name in ("b", "c"):  # b again once it has left, and what it left was overwritten
        bench.store.answers[name] = Offer(112, asynchronous=asynchronous)
        bench.model.arrive(name, prompt, answer=2)
        request = bench.model.requests[name]
        step = bench.model.schedule()
        (load,) = step.loads
        if asynchronous:
            bench.bring()
            step = bench.model.schedule()
        assert load.first == [80] * groups and step.admitted[name].tokens == 112
        held = request.held()
        assert len(set(held)) == len(held) - (7 * groups if request.pins else 0)
        assert [sorted(table) for table in request.tables] == [list(range(8))] * groups
        assert all(block.holders == 1 for block in held) and bench.free == 0
        bench.model.abort(name)
        assert bench.free == 8 * groups
        bench.model.commit(step, {})
        bench.model.reset()
        bench.serve(f"a before {name}", prompt[:81])


def test_rows_and_states_of_one_length_are_what_is_fetched():  # N1
    specs = [GroupSpec("full", "full", 32), GroupSpec("kda", "recurrent", 32)]
    for offer, hit in ((Offer(48, (32, 48)), 48), (Offer(48, (32,)), 32), (Offer(32, (32, 48)), 32)):
        bench = Bench(Store(a=offer), specs)
        assert bench.serve("a", range(60)).tokens == hit
    # The same of what is here: states at 32 and 48, rows to 48.
    for group, hit in ((None, 48), (1, 32), (0, 32)):
        bench = Local([full(32), state(32)], 16, retention=None)
        prompt = tokens(0, 60)
        bench.serve(a=prompt[:49])
        assert [bench.filed(prompt, g) for g in (0, 1)] == [[16, 32, 48], [32, 48]]
        if group is not None:
            bench.forget(prompt, group, 48)
        assert bench.serve(b=prompt) == [hit]


@pytest.mark.parametrize(
    ("offer", "hit", "first"), [(Offer(0), 16, None), (Offer(80), 16, None), (Offer(80, (80,)), 80, [64, 80])]
)
def test_rows_that_lie_deeper_than_the_state_count_once_the_state_is_fetched(offer, hit, first):  # E21
    bench = Local([full(16), state(16)], 16)
    prompt = tokens(0, 100)
    bench.serve(a=prompt[:17], b=prompt[:65])
    bench.forget(prompt, 1, 64)
    assert bench.model.probe(prompt)[:2] == (16, 64)
    bench.model.external = Store(c=offer)
    bench.arrive("c", prompt)
    step = bench.step()
    assert step.admitted["c"].tokens == hit
    assert [load.first for load in step.loads] == ([first] if first else [])


def test_a_fetch_that_ends_inside_a_block_goes_on_in_it_and_leaves_its_own_tail():  # G17
    specs = [GroupSpec("full", "full", 8), GroupSpec("kda", "recurrent", 8)]
    bench = Bench(Store(a=Offer(10, (10,))), specs, unit=2)
    prompt = list(range(15))
    bench.model.arrive("a", prompt, answer=9)
    step = bench.step()
    assert step.admitted["a"].tokens == 10 and not step.copies
    assert {bench.model.probe([*prompt[:length], 99, 98]).tokens for length in (10, 12, 14)} == {10, 14}


def test_a_store_serves_after_a_reset_what_it_has():  # I22
    specs = [GroupSpec("full", "full", 6144), GroupSpec("kda", "recurrent", 6144)]
    bench = Bench(Store(b=Offer(7449, (7424,))), specs, unit=128)
    assert bench.serve("a", range(7449)).tokens == 0
    assert bench.model.reset()
    assert bench.serve("b", range(7449)).tokens == 7424


def test_what_was_fetched_is_tried_before_all_that_wait():  # L4
    bench = Bench(Store(late=Offer(64, asynchronous=True)), max_active=1)
    bench.model.arrive("late", range(100))
    bench.step()
    bench.model.arrive("running", [8] * 20, answer=9)
    first = bench.model.schedule()
    bench.device.plan(first)
    assert list(first.admitted) == ["running"]
    bench.device.run(first, {"running": [1]})
    bench.model.commit(first, {"running": [1]})
    bench.device.check(first)
    bench.model.arrive("early", [9] * 20)
    bench.bring()
    bench.model.requests["late"].order = 99  # whoever came first
    bench.model.finish("running")
    assert list(bench.step().admitted) == ["late"]
    assert list(bench.step().admitted) == ["early"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_loaded_back_lies_beside_what_took_its_old_place_in_the_same_step(asynchronous):  # 45
    bench = Bench(Store(again=Offer(96, asynchronous=asynchronous)), blocks=14)
    prompt = list(range(100))
    bench.serve("a", prompt)
    assert bench.model.reset()  # it is in the store alone
    bench.model.arrive("b", [7] * 79, answer=9)
    bench.model.arrive("again", prompt, answer=9)
    step = bench.model.schedule()
    bench.device.plan(step)
    (load,) = step.loads
    taken = bench.model.requests["b"].held()
    # b has the blocks that a had, and none of those that are loaded into.
    assert [block.number for block in taken] == [1, 2, 3, 4, 5] and not set(taken) & set(load.held())
    if asynchronous:
        bench.bring()
    answers = {row.request.name: [1] for row in step.rows}
    bench.device.run(step, answers)
    bench.model.commit(step, answers)
    bench.device.check(step)
    # The device looks at every row that is read.
    step = bench.step()
    assert {row.request.name for row in step.rows} == {"b", "again"}


@pytest.mark.parametrize("leaving", ["finish", "abort", "abort in the middle of its prefill", "preempt"])
def test_blocks_given_back_with_a_step_in_flight_are_not_loaded_into_before_it_has_run(leaving):  # K5, K6, K9
    bench = Bench(Store(b=Offer(96, asynchronous=True)), blocks=7, steps_in_flight=3, chunk_limit=16, admit_whole=False)
    model, device = bench.model, bench.device
    model.arrive("a", range(100, 180), answer=20, read_cache=False)
    model.arrive("other", [7, 8], answer=9)
    steps = []
    while "a" in model.requests and len(steps) < 2:
        steps.append(model.schedule())
        device.plan(steps[-1])
        if leaving != "abort in the middle of its prefill" and model.requests["a"].planned < 80:
            step = steps.pop(0)
            answers = {row.request.name: [1] for row in step.rows if row.samples}
            device.run(step, answers)
            model.commit(step, answers)
    model.abort("other")
    if leaving == "finish":
        model.finish("a")
    elif leaving == "preempt":
        assert model.reset(preempt_running=True)
        model.abort("a")
    else:
        model.abort("a")
    assert bench.free == 7  # at once: steps run in their order
    model.arrive("b", range(100))
    model.schedule()
    (load,) = model.loads
    assert load.after is steps[-1]
    with pytest.raises(Unsound, match="a load begins before a step that may write"):
        device.load(load)
    for step in steps:  # in the order they were planned, and not the fence of the last one only
        with pytest.raises(Unsound):
            device.load(load)
        device.run(step, {})
        model.commit(step, {})
    bench.bring()
    assert model.schedule().admitted["b"].tokens == 96


def test_a_shorter_offer_than_what_is_here_is_not_taken():
    bench = Bench(Store(b=Offer(32)))
    bench.serve("a", range(100))
    assert bench.serve("b", range(100)).tokens == 96
    assert bench.store.asked[-1] == ("b", 96)


def test_an_undecided_store_holds_up_nobody_else_and_counts_for_nothing():  # A26
    bench = Bench(Store(a=None))
    bench.model.arrive("a", range(40))
    assert bench.serve("b", [7] * 40).tokens == 0
    for _ in range(5):
        assert not bench.step().rows
    assert (bench.model.statistics.admissions, bench.model.statistics.queries) == (1, 40)
    bench.store.answers["a"] = Offer(32)
    bench.step()
    assert bench.hits["a"].tokens == 32
    assert (bench.model.statistics.queries, bench.model.statistics.hits) == (80, 32)


def test_a_request_that_does_not_read_the_cache_asks_no_store():  # L3
    bench = Bench(Store(a=Offer(32)))
    assert bench.serve("a", range(40), read_cache=False).reason is Reason.SKIPPED
    assert bench.store.asked == []


def test_an_asynchronous_load_waits_beside_the_steps():
    bench = Bench(Store(a=Offer(64, asynchronous=True)))
    bench.model.arrive("a", range(100))
    assert not bench.step().rows and bench.free == 96
    assert bench.serve("b", [7] * 40).tokens == 0  # others go on
    bench.bring()
    assert bench.step().admitted["a"].tokens == 64
    assert bench.model.statistics.external == 64 and bench.free == 100


def test_a_load_is_admitted_above_what_prefills_under_way_still_need():  # L2
    bench = Bench(Store(a=Offer(64, asynchronous=True), b=Offer(64, asynchronous=True)), blocks=9)
    bench.model.arrive("a", range(127))
    bench.model.arrive("b", [*range(64), *[7] * 15])
    bench.step()
    assert [load.request.name for load in bench.model.loads] == ["a"] and bench.free == 5
    assert not bench.model.requests["b"].held()
    bench.bring()
    bench.step()
    assert bench.hits["a"].tokens == 64 and bench.free >= 4
    for _ in range(4):
        bench.step()
        if bench.model.loads:
            bench.bring()
    assert bench.hits["b"].tokens == 64 and not bench.preempted and bench.free == 9


@pytest.mark.parametrize("order", ["completion, then abort", "abort, then completion", "abort, then given up"])
def test_blocks_of_a_load_come_back_once_whenever_its_request_is_aborted(order):  # 36
    bench = Bench(Store(a=Offer(64, asynchronous=True)))
    bench.model.arrive("a", range(100))
    bench.step()
    (load,) = bench.model.loads
    if order == "completion, then abort":
        bench.bring()
        bench.model.abort("a")
    else:
        bench.model.abort("a")
        assert bench.free == 96 and not bench.model.reset()  # something may still be written there
        bench.bring(None if order.endswith("completion") else [0])
    assert bench.free == 100
    with pytest.raises(UserError, match="once"):
        bench.model.loaded(load)
    assert bench.model.probe(range(100)).tokens == (0 if order.endswith("up") else 64)
    assert bench.model.reset()


def test_a_load_that_fails_in_one_group_is_cut_for_all_and_harms_nobody_else():  # 86
    specs = [GroupSpec("a", "full", 16), GroupSpec("b", "full", 32), GroupSpec("c", "full", 64)]
    bench = Bench(Store(a=Offer(192, asynchronous=True)), specs)
    bench.model.arrive("a", range(200))
    bench.model.arrive("b", [7] * 100)
    bench.step()
    bench.bring([96, 192, 192])
    # The reference system would fall back to 64, a whole block of every group; here every hash unit is served.
    assert bench.step().admitted["a"] == (96, 96, Reason.STORE_FAILURE)
    assert bench.hits["b"].tokens == 0 and bench.free == 100


def test_a_load_without_its_state_is_no_hit_and_the_store_is_not_asked_again():
    bench = Bench(Store(a=Offer(64, states=(64,), asynchronous=True)), STATE)
    bench.model.arrive("a", range(100))
    bench.step()
    bench.bring([64, 0])
    assert bench.step().admitted["a"] == (0, 64, Reason.STORE_FAILURE)
    assert bench.store.asked == [("a", 0)]


@pytest.mark.parametrize("flying", [1, 2])
def test_rows_that_read_a_failed_load_count_for_nothing(flying):
    bench = Bench(Store(a=Offer(64, states=(64,))), STATE, steps_in_flight=flying)
    bench.model.arrive("a", range(100), answer=9)
    steps = []
    for _ in range(flying):
        steps.append(bench.model.schedule())
        bench.device.plan(steps[-1])
    bench.device.run(steps[0], {}, ["a"])
    bench.model.commit(steps[0], {}, (), ["a"])
    assert bench.model.requests["a"].tokens == list(range(100)) and bench.model.probe(range(100)).tokens == 0
    for step in steps[1:]:
        bench.device.run(step, {})
        bench.model.commit(step, {})
        bench.device.check(step)
    assert bench.model.requests["a"].tokens == list(range(100)) and broken(bench.model) == []
    assert bench.model.schedule().admitted["a"] == (0, 0, Reason.STORE_FAILURE)


def test_nobody_shares_what_rests_on_a_load_that_may_fail():
    for store, shared in ((Store(), 192), (Store(a=Offer(64)), 0)):
        bench = Bench(store, [GroupSpec("w", "sliding_window", 16, window=32)])
        bench.model.arrive("a", range(200))
        bench.model.arrive("b", range(200))
        step = bench.step(failed=list(store.answers))
        assert step.admitted["b"].tokens == shared


def test_no_load_begins_before_the_steps_that_may_write_to_its_blocks():
    bench = Bench(Store(b=Offer(32, asynchronous=True)), steps_in_flight=2)
    bench.model.arrive("a", range(40), answer=20)
    first = bench.model.schedule()
    bench.model.arrive("b", [7] * 40)
    second = bench.model.schedule()
    assert second.loads[0].after is first
    bench.model.commit(first, {"a": [1]})
    bench.model.commit(second, {"a": [1]})


def test_what_was_fetched_gives_way_when_nothing_else_can_run():
    bench = Bench(Store(a=Offer(64, asynchronous=True)), blocks=8)
    bench.model.arrive("a", range(80))
    bench.step()
    bench.bring()
    bench.model.arrive("b", [7] * 110)
    bench.model.requests["a"].read_cache = False  # it needs all it would have to itself
    for _ in range(6):
        bench.step()
    assert not bench.model.requests and bench.free == 8


@pytest.mark.parametrize("answer", [Offer(-1), Offer(64, states=(-16,)), None])
def test_a_store_that_fails_while_a_step_is_planned_leaves_everything_as_it_was(answer):
    bench = Bench(Store(b=answer))
    if answer is None:
        bench.store.answers = None  # a fault of its own: it raises
    bench.model.arrive("a", range(40), answer=9, read_cache=False)
    bench.model.commit(bench.model.schedule(), {"a": [1]})
    bench.model.arrive("b", [7] * 40)
    before = Snapshot(bench.model)
    with pytest.raises((UserError, AttributeError)):
        bench.model.schedule()
    assert Snapshot(bench.model) == before
    bench.store.answers = {}
    assert bench.model.schedule().admitted.keys() == {"b"}


@pytest.mark.parametrize(("report", "named"), [((64, 64), "good"), ((-1,), "good")])
def test_reports_that_make_no_sense_are_refused(report, named):
    bench = Bench(Store(a=Offer(64, asynchronous=True)))
    bench.model.arrive("a", range(100))
    bench.step()
    (load,) = bench.model.loads
    with pytest.raises(UserError, match=named):
        bench.model.loaded(load, report)
    assert bench.model.loads == [load] and isinstance(load, Load)
    bench.model.arrive("b", range(5))
    with pytest.raises(UserError, match="failed"):
        bench.model.commit(bench.model.schedule(), {"b": [1]}, (), ["b"])
