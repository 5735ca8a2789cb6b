"""Replicas of one engine answer as one device without a cache does, and do not disturb each other.

`scripts/check_meshes.py` has more combinations of model, experts, interleave, chunk and cache.
"""

import dataclasses
import functools
import operator

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.models.checkpoint_io import load, load_config
from hybrid_kv.models.make_tiny import make_tiny
from hybrid_kv.planning import plan_cache
from hybrid_kv.runtime import metadata
from hybrid_kv.runtime.engine import CacheOptions, Engine, SamplingParams
from hybrid_kv.runtime.routing import Router
from hybrid_kv.sharding import MeshSpec
from tests.models.harness import Runner, mesh_of
from tests.test_sharding import SHAPE

MESH = "data=2,model=2,dcp=2"
OPTIONS = CacheOptions(max_context=256, max_requests=3, token_budget=64, token_buckets=(64,), hash_unit=16)
ANSWER = 10
GREEDY = SamplingParams(max_tokens=ANSWER, ignore_stop=True)
RNG = np.random.default_rng(0)
STEM = RNG.integers(3, 500, 100).tolist()
# More than the six slots of both replicas, of 3 to 160 tokens.
PROMPTS = [[*STEM[:shared], *RNG.integers(3, 500, own).tolist()] for shared, own in
           ((0, 9), (60, 5), (100, 30), (100, 60), (40, 7), (0, 3), (100, 2), (80, 20))]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tiny_checkpoint, tmp_path_factory):
    k3 = tmp_path_factory.mktemp("k3")
    make_tiny(k3, "tiny-k3", seed=0)
    return {"tiny-kimi-linear": tiny_checkpoint, "tiny-k3": k3}


@pytest.fixture(scope="module")
def expected(folder):
    """Greedy tokens of one device that computes every text anew for each token, with no choice closer than 1e-4."""

    @functools.cache
    def answers(model: str) -> list[list[int]]:
        config, mesh, rows = load_config(folder[model]), mesh_of(), len(PROMPTS)
        plain = Runner(config, load(folder[model], config, mesh, jnp.float32), mesh, rows=rows)
        texts = [list(prompt) for prompt in PROMPTS]
        room = sum(map(len, texts)) + rows * ANSWER
        for _ in range(ANSWER):
            logits = plain.run(plain.batch(texts, [0] * rows, pad_to=room))
            best = np.sort(logits[np.cumsum([len(text) for text in texts]) - 1], axis=-1)
            assert (best[:, -1] - best[:, -2]).min() > 1e-4
            for text, end in zip(texts, np.cumsum([len(text) for text in texts]), strict=True):
                text.append(int(logits[end - 1].argmax()))
        return [text[-ANSWER:] for text in texts]

    return answers


@pytest.fixture(scope="module")
def make(folder):
    @functools.cache
    def engine(model: str, experts: str, kda: str = "tensor", residual: str = "replicated", **changes) -> Engine:
        cache = dataclasses.replace(OPTIONS, **changes)
        return Engine.from_checkpoint(folder[model], MESH, cache, experts=experts, kda=kda, residual=residual)

    return engine


@pytest.fixture
def kimi(make):
    """An engine with an empty cache."""
    engine = make("tiny-kimi-linear", "tensor")
    assert not engine.has_work and engine.reset_prefix_cache()
    return engine


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        assert engine.check() == []


# Everything that differs at once: each configuration of the scheduler and each interleave are programs of their own.
WIDE = {"rows_per_rank": 16, "interleave": 16, "chunk_limit": 24, "prefix_caching": False}


@pytest.mark.parametrize(
    ("model", "experts", "changes"),
    [
        ("tiny-kimi-linear", "tensor", {}),
        ("tiny-kimi-linear", "mesh", WIDE),
        ("tiny-k3", "mesh", {"kda": "replicated", "residual": "sequence"}),
    ],
)
def test_replicas_answer_as_one_device_without_a_cache_does(make, expected, model, experts, changes):
    engine = make(model, experts, **changes)
    for _ in ("cold", "warm"):
        ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        drain(engine)
        results = [engine.result(i) for i in ids]
        assert [result.tokens for result in results] == expected(model)
        assert {result.replica for result in results} == {0, 1}
    hits = [result.hit for result in results]
    if changes.get("prefix_caching", True):
        assert [hits[i] for i in (0, 3, 5)] == [0, 144, 0] and sum(hits) >= 400
    else:
        assert not any(hits)
    if "chunk_limit" in changes:
        assert all(np.diff([result.hit, *result.chunks]).max() <= 24 for result in results)


def test_nothing_compiles_after_warm_up(kimi):
    kimi.warm_up()
    kimi.generate(PROMPTS, GREEDY)
    kimi.generate(PROMPTS[:3], dataclasses.replace(GREEDY, temperature=1.0, top_k=5))
    kimi.abort(kimi.add_request(PROMPTS[0]))
    assert kimi.stats().compilations_after_warm_up == 0


def test_a_text_is_scored_while_the_other_replica_answers(kimi, expected):
    prompt, answer = PROMPTS[1], expected("tiny-kimi-linear")[1]
    others = [kimi.add_request(PROMPTS[i], GREEDY) for i in (0, 5)]
    logits = kimi.score([*prompt, *answer])
    drain(kimi)
    assert logits.shape == (len(prompt) + len(answer), kimi.vocab_size)
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    assert [kimi.result(i).tokens for i in others] == [expected("tiny-kimi-linear")[i] for i in (0, 5)]


def test_a_replica_without_work_runs_along(kimi, expected):
    """Two requests, of which the first ends long before the second: first both replicas work, then one."""
    short = kimi.add_request(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=2))
    long = kimi.add_request(PROMPTS[3], GREEDY)
    drain(kimi)
    results = [kimi.result(i) for i in (short, long)]
    assert [result.replica for result in results] == [0, 1]
    assert [result.tokens for result in results] == [
        expected("tiny-kimi-linear")[0][:2],
        expected("tiny-kimi-linear")[3],
    ]
    assert kimi.step() == []


def test_a_replica_may_draw_while_the_other_is_greedy(kimi, expected):
    drawn = dataclasses.replace(GREEDY, temperature=1.0, top_k=5, seed=3)
    alone = kimi.generate(PROMPTS[1:2], drawn)[0].tokens
    ids = [kimi.add_request(PROMPTS[1], drawn), kimi.add_request(PROMPTS[0], GREEDY)]
    drain(kimi)
    assert [kimi.result(i).tokens for i in ids] == [alone, expected("tiny-kimi-linear")[0]]
    assert {kimi.result(i).replica for i in ids} == {0, 1}


def test_an_abort_in_one_replica_leaves_the_others_and_the_counts(kimi, expected):
    ids = [kimi.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for step in range(5):
        kimi.step()
        kimi.abort(ids[step])
        assert kimi.check() == []
    drain(kimi)
    assert [kimi.result(i).tokens for i in ids[5:]] == expected("tiny-kimi-linear")[5:]
    for replica in kimi.stats().replicas:
        assert all(used == 0 for used, *_ in replica.pools.values())


def test_a_prompt_goes_where_its_prefix_is_while_there_is_a_slot(kimi):
    first = kimi.generate(PROMPTS[3:4], GREEDY)[0].replica
    ids = [kimi.add_request(prompt, GREEDY) for prompt in (PROMPTS[3], PROMPTS[0], *PROMPTS[3:4] * 3)]
    kimi.step()
    results = [kimi.result(i) for i in ids]
    assert [result.replica for result in results] == [first, 1 - first, first, first, 1 - first]
    assert [result.hit for result in results] == [144, 0, 144, 144, 0]
    drain(kimi)


def keys_of(*units: int) -> np.ndarray:
    """A chain that differs from another from the first unit on that differs."""
    return np.array([[*units[: n + 1], *[0] * (3 - n)] for n in range(len(units))], np.uint32)


def test_the_router_weighs_a_prefix_against_the_work_that_waits():
    router = Router(plan_cache(SHAPE, OPTIONS, MeshSpec()).config, 2)
    assert router.route(keys_of(1, 2, 3), 50, {0: 5, 1: 5}) == (0, 0)  # the first of equals
    assert router.route(keys_of(4), 16, {0: 50, 1: 49}) == (1, 0)
    assert router.route(keys_of(1, 2, 5), 50, {0: 31, 1: 0}) == (0, 32)
    assert router.route(keys_of(1, 2, 5), 50, {1: 31}) == (1, 0)  # there is no slot elsewhere
    assert router.route(keys_of(1, 2, 3), 47, {0: 33, 1: 0}) == (1, 32)  # the third unit is not whole
    assert router.route(keys_of(1, 2, 3), 50, {0: 9, 1: 8}, reads=False) == (1, 0)
    router.forget()
    assert router.route(keys_of(1, 2, 3), 50, {0: 1, 1: 0}) == (1, 0)


def test_the_router_forgets_the_oldest_prompts_from_their_ends():
    router = Router(plan_cache(SHAPE, dataclasses.replace(OPTIONS, attention_blocks=5), MeshSpec()).config, 1)
    for units in ((1, 2, 3, 4), (5, 6, 7)):
        assert router.route(keys_of(*units), 64, {0: 0}) == (0, 0)
    assert router.route(keys_of(1, 2, 3, 4), 64, {0: 0}) == (0, 48)  # six keys are kept
    assert router.route(keys_of(5, 6, 7), 64, {0: 0}) == (0, 32)


def test_totals_are_sums_over_the_replicas(kimi):
    kimi.generate(PROMPTS, GREEDY)
    stats = kimi.stats()
    for field in ("tokens_prefilled", "tokens_saved", "checkpoints", "evictions", "preemptions"):
        assert getattr(stats, field) == sum(getattr(replica, field) for replica in stats.replicas)
    assert all(replica.tokens_prefilled for replica in stats.replicas)
    for name, counts in stats.pools.items():
        assert counts == tuple(map(operator.add, *(replica.pools[name] for replica in stats.replicas)))
        assert counts[1] > 0


def test_a_cache_is_emptied_in_all_replicas_or_in_none(kimi, expected):
    kimi.generate(PROMPTS, GREEDY)
    held = [replica.pools for replica in kimi.stats().replicas]
    running = kimi.add_request([7] * 5, GREEDY)
    kimi.step()
    busy = kimi.result(running).replica
    assert not kimi.reset_prefix_cache()
    assert kimi.stats().replicas[1 - busy].pools == held[1 - busy]
    assert kimi.reset_prefix_cache(preempt_running=True) and kimi.check() == []
    for replica in kimi.stats().replicas:
        assert all(used == cached == 0 for used, cached, *_ in replica.pools.values())
    drain(kimi)


@pytest.mark.parametrize("where", ["before dispatch", "second plan", "second settled"])
def test_an_interrupted_step_loses_nothing_in_any_replica(kimi, expected, monkeypatch, where):
    second = kimi._replicas[1].controller
    target = {
        "before dispatch": (metadata, "build"), "second plan": (second, "plan"),
        "second settled": (second, "no_outcome"),
    }[where]  # fmt: skip
    ids = [kimi.add_request(prompt, GREEDY) for prompt in PROMPTS]
    gained = kimi.step()
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(*target, interrupted)
            with pytest.raises(KeyboardInterrupt):
                kimi.step()
        assert kimi.check() == []
        gained += kimi.step()
    while kimi.has_work:
        gained += kimi.step()
    answers = [[t for o in gained if o.request_id == i for t in o.tokens] for i in ids]
    assert answers == [kimi.result(i).tokens for i in ids] == expected("tiny-kimi-linear")


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("mesh", "experts", "words"),
    [
        (MESH, "all", "experts: got 'all'; use one of tensor, mesh"),
        ("data=3", "mesh", "num_experts: got 8; must be a multiple of data \\* model \\* dcp = 3"),
        ("data=4,dcp=4", "tensor", "it needs 16 devices, 8 are there"),
    ],
)
def test_what_cannot_work_is_refused_when_the_engine_is_made(tiny_checkpoint, mesh, experts, words):
    with pytest.raises(UserError, match=words):
        Engine.from_checkpoint(tiny_checkpoint, mesh, OPTIONS, experts=experts)
