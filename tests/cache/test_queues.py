"""Who is tried first, who gives way, and that nobody waits forever, on the reference model."""

import random

import pytest

from hybrid_kv.cache.reference import Model, Rules
from hybrid_kv.geometry import GroupSpec, resolve


def model(blocks=8, **options) -> Model:
    geometry = resolve([GroupSpec("full", "full", 4)], hash_unit=4)
    return Model(Rules(geometry, (blocks,), (0,), **options))


def advance(core: Model, ended=()):
    """One step, every row that reaches its end giving one token."""
    step = core.schedule()
    samples = {row.request.name: [1] for row in step.rows if row.samples}
    core.commit(step, samples, [name for name in samples if name in ended])
    return step


def admitted(core: Model) -> list[str]:
    return list(advance(core).admitted)


def test_the_most_urgent_is_admitted_first_and_the_earlier_of_equals():  # L5
    core = model(priority=True, blocks=20)
    for name, priority in (("a", 2), ("b", 0), ("c", 1), ("d", 0)):
        core.arrive(name, [ord(name)] * 5, priority=priority)
    assert admitted(core) == ["b", "d", "c", "a"]


def test_the_least_urgent_gives_way_and_the_later_of_equals():  # L5
    core = model(priority=True, blocks=8)
    for name, priority in (("a", 1), ("b", 1), ("c", 0)):
        core.arrive(name, [ord(name)] * 7, answer=9, priority=priority)
    advance(core)  # 6 blocks of 8 are taken
    step = advance(core)
    assert not step.preempted
    step = advance(core)  # the ninth token of each needs a block: two are left, c comes first
    assert step.preempted == ["b"]
    assert [row.request.name for row in step.rows] == ["c", "a"]


def test_first_come_first_served_gives_way_in_the_reverse_order():
    core = model(blocks=6)
    for name in "abc":
        core.arrive(name, [ord(name)] * 7, answer=9, priority=ord("c") - ord(name))
    advance(core)
    advance(core)
    assert advance(core).preempted == ["c"]


def test_a_victim_that_was_planned_already_gives_its_tokens_back():  # L5
    core = model(priority=True, blocks=5, token_budget=8, chunk_limit=4)
    core.arrive("low", [1] * 8, answer=4, priority=5)
    advance(core)
    core.arrive("high", [2] * 7, answer=4, priority=0)
    seen = []
    for _ in range(6):
        step = advance(core)
        assert step.tokens <= 8
        assert not {row.request.name for row in step.rows} & set(step.preempted)
        seen += step.preempted
    assert set(seen) == {"low"}


def test_a_preempted_request_is_resumed_before_others_are_admitted():
    core = model(blocks=6)
    for name in "abc":
        core.arrive(name, [ord(name)] * 7, answer=9)
    advance(core)
    advance(core)
    assert advance(core).preempted == ["c"]
    core.arrive("d", [7] * 5)
    advance(core, ended="ab")
    assert admitted(core)[0] == "c"


@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("flying", [1, 2])
def test_everybody_is_served_in_a_pool_that_only_just_holds_one(priority, whole, flying):
    rng = random.Random(flying)
    core = model(blocks=6, token_budget=5, priority=priority, admit_whole=whole, steps_in_flight=flying)
    left = {}
    for number in range(12):
        left[f"r{number}"] = rng.randrange(1, 8)
        prompt = [number] * rng.randrange(1, 16)
        core.arrive(f"r{number}", prompt, answer=left[f"r{number}"], priority=rng.randrange(3))
    steps = []
    for _ in range(2000):
        step = core.schedule()
        if step.rows:
            steps.append(step)
        if len(steps) == flying or (steps and not step.rows):
            done = steps.pop(0)
            rows = [row for row in done.rows if row.samples and row.request.name in left]
            for row in rows:
                left[row.request.name] -= 1
            ended = [row.request.name for row in rows if not left[row.request.name]]
            core.commit(done, {row.request.name: [1] for row in rows}, ended)
            for name in ended:
                del left[name]
        if not core.requests:
            break
    assert not core.requests and not left


def test_decodes_do_not_starve_a_prefill_of_the_tokens_they_leave():  # Z9
    core = model(blocks=40, token_budget=3, chunk_limit=100)
    for name in "ab":
        core.arrive(name, [ord(name)], answer=40)
    advance(core)
    core.arrive("long", [9] * 20)
    for _ in range(30):
        advance(core, ended=["long"])
        if "long" not in core.requests:
            break
    assert "long" not in core.requests and {"a", "b"} <= core.requests.keys()
