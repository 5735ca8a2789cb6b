"""The compiled core makes, and counts, the reference model's decisions where both serve the same kinds."""

import dataclasses

import numpy as np

from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.cache.reference import Model, Rules
from hybrid_kv.cache.statistics import Statistics, statistics
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.content_model import Serving


def test_every_hit_of_requests_one_after_another_is_the_models():
    geometry = resolve([GroupSpec("mla", "mla", 4), GroupSpec("kda", "recurrent", 8)], dcp=2, hash_unit=4)
    config = CacheConfig(
        geometry=geometry, pool_blocks=(400, 400), group_pool=(0, 1), max_requests=2, max_context=96, token_budget=40,
        placement=Placement(ladder=(16,)),
    )  # fmt: skip
    core = Serving(config)
    rules = Rules(
        geometry, (399, 399), (0, 1), max_requests=2, max_context=96, token_budget=40, ladder=(16,), junctions=1
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
