"""The compiled core makes, and counts, the reference model's decisions where both serve the same kinds."""

import dataclasses

import numpy as np

from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.cache.reference import Model, Rules
from hybrid_kv.cache.statistics import Statistics, statistics
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.simulate.compiled import Core, config_of
from tests.cache.content_model import Serving


def test_every_hit_of_requests_one_after_another_is_the_models():
    geometry = resolve([GroupSpec("mla", "mla", 4), GroupSpec("kda", "recurrent", 8)], dcp=2, hash_unit=4)
    config = CacheConfig(
        geometry=geometry, pool_blocks=(400, 400), group_pool=(0, 1), max_requests=2, max_context=96, token_budget=40,
        placement=Placement(ladder=(16,), positions=(20, 48)),
    )  # fmt: skip
    core = Serving(config)
    rules = Rules(
        geometry,
        (399, 399),
        (0, 1),
        max_requests=2,
        max_context=96,
        token_budget=40,
        ladder=(16,),
        junctions=1,
        positions=(20, 48),
    )
    model = Model(rules)
    rng = np.random.default_rng(3)
    stems = [rng.integers(0, 3, 64).tolist() for _ in range(3)]
    served: list[list[int]] = []
    for number in range(60):
        stem = served[rng.integers(len(served))] if number % 3 == 2 else stems[rng.integers(3)]
        prompt = [*stem[: rng.integers(0, 65)], *rng.integers(0, 3, rng.integers(1, 20)).tolist()]
        answer = int(rng.integers(1, 12))
        slot = core.add(prompt, answer)
        tokens = core.live[slot][0]
        core.run()
        served.append(tokens)
        assert _serve(model, str(number), prompt, tokens[len(prompt) :]) == core.hits[-1], number
    assert sum(core.hits) > 500 and min(core.hits) == 0
    counted = {field.name for field in dataclasses.fields(Statistics)} - {"evictions", "unfiled"}
    seen, wanted = statistics(config, core.state), model.statistics
    assert {name: getattr(seen, name) for name in counted} == {name: getattr(wanted, name) for name in counted}
    assert seen.evictions == model.evictions


def _serve(model: Model, name: str, prompt: list[int], answer: list[int]) -> int:
    """One request alone, giving this answer; its hit."""
    model.arrive(name, prompt, answer=len(answer))
    hit, given = -1, 0
    while name in model.requests:
        step = model.schedule()
        if name in step.admitted:
            hit = step.admitted[name].tokens
        (row,) = step.rows
        sampled = answer[given : given + 1] if row.start + row.length == len(row.request.tokens) else []
        given += len(sampled)
        model.commit(step, {name: sampled} if sampled else {}, [name] if given == len(answer) else [])
    return hit


def test_every_step_of_requests_side_by_side_is_the_models_through_resets_that_preempt():  # L6
    geometry = resolve([GroupSpec("mla", "mla", 64), GroupSpec("kda", "recurrent", 64)], hash_unit=16)
    # The deepest shared prefix alone: the model remembers every fork it has seen, the core those of what is filed.
    # Enough blocks: where content is held twice, the two may be served from either, which decides what is evicted.
    rules = Rules(geometry, (120, 120), (0, 1), max_requests=4, max_context=256, token_budget=128, junctions=1)
    model, core = Model(rules), Core(rules, config_of(rules, slots=4, max_context=256, drafts=0))
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 99, 150).tolist()
    left: dict[str, int] = {}
    for number in range(100):
        if len(model.requests) < 4 and rng.random() < 0.4:
            name, answer = str(number), int(rng.integers(1, 20))
            prompt = stem[: rng.integers(1, 120)] + rng.integers(0, 99, rng.integers(1, 30)).tolist()
            left[name] = answer
            for one in (model, core):
                one.arrive(name, prompt, answer=answer)
        if number % 30 == 29:
            assert model.running and not model.reset() and not core.reset()
            assert model.reset(preempt_running=True) and core.reset(preempt_running=True)
        planned, step = model.schedule(), core.schedule()
        assert _told(planned) == _told(step), number
        answers = {row.request.name: [7] for row in planned.rows if row.samples}
        for name in answers:
            left[name] -= 1
        ended = [name for name in answers if not left[name]]
        model.commit(planned, answers, ended)
        if step.rows:
            core.commit(step, answers, ended)
    assert model.statistics.preemptions > 6 and model.statistics.hits > 500


def _told(step) -> tuple[list, dict, list]:
    """Rows, hits and who was preempted."""
    rows = sorted((row.request.name, row.start, row.length) for row in step.rows)
    return rows, {name: hit.tokens for name, hit in step.admitted.items()}, sorted(step.preempted)
