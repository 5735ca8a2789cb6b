"""What a user may rely on: pressure changes no token, draws are reproducible, bad input disturbs nobody."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from hybrid_kv.cache.state import PLACES
from hybrid_kv.errors import UserError
from hybrid_kv.hashing import Adapter, ExtraKeys, Media, new_secret
from hybrid_kv.models import checkpoint_io
from hybrid_kv.models.checkpoint_io import random_checkpoint
from hybrid_kv.runtime import metadata
from hybrid_kv.runtime.engine import CacheOptions, Engine, SamplingParams
from tests.runtime.conftest import OPTIONS

SMALL = dataclasses.replace(OPTIONS, attention_blocks=9, state_slots=9)


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        assert engine.check() == []


def shared_prompts(seed: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    stem = rng.integers(3, 512, 150)
    return [[*map(int, stem[: rng.integers(20, 150)]), *map(int, rng.integers(3, 512, 40))] for _ in range(count)]


def test_eviction_and_preemption_change_no_token_and_counts_return(make_engine):
    params = SamplingParams(max_tokens=120, ignore_stop=True)
    prompts = shared_prompts(0, 24)
    plain = make_engine("1x1", dataclasses.replace(OPTIONS, prefix_caching=False))
    expected = [result.tokens for result in plain.generate(prompts, params)]
    engine = make_engine("1x1", SMALL)
    before = engine.stats()
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    drain(engine)
    after = engine.stats()
    assert [engine.result(i).tokens for i in ids] == expected
    assert after.preemptions - before.preemptions >= 20
    assert after.evictions - before.evictions >= 20
    assert all(used == 0 for used, *_ in after.pools.values())


def test_nothing_compiles_after_warm_up(make_engine):  # 97
    engine = make_engine("1x1", OPTIONS)
    engine.warm_up(score=True)
    engine.generate(shared_prompts(1, 6), SamplingParams(max_tokens=20))
    engine.generate(shared_prompts(1, 3), SamplingParams(max_tokens=20, temperature=1.0, top_k=5))
    engine.score(shared_prompts(2, 1)[0])
    engine.abort(engine.add_request([1, 2, 3]))
    assert engine.stats().compilations_after_warm_up == 0


def test_a_draw_depends_on_seed_and_position_only(make_engine):
    engine = make_engine()
    params = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=7, ignore_stop=True)
    prompts = shared_prompts(3, 3)
    alone = engine.generate(prompts[:1], params)[0].tokens
    together = engine.generate(prompts, params)[0].tokens
    other = engine.generate(prompts[:1], dataclasses.replace(params, seed=8))[0].tokens
    assert alone == together != other


def test_top_k_1_and_tiny_top_p_are_greedy(make_engine):
    engine = make_engine()
    prompts = shared_prompts(4, 2)
    greedy = engine.generate(prompts, SamplingParams(max_tokens=8, ignore_stop=True))
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        drawn = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=2.0, ignore_stop=True, **narrow))
        assert [r.tokens for r in drawn] == [r.tokens for r in greedy]


def test_stop_tokens_end_an_answer_and_are_kept(make_engine):
    engine = make_engine()
    prompt = shared_prompts(5, 1)
    tokens = engine.generate(prompt, SamplingParams(max_tokens=12, ignore_stop=True))[0].tokens
    stop = tokens[5]
    result = engine.generate(prompt, SamplingParams(max_tokens=12, ignore_stop=True, stop_tokens=(stop,)))[0]
    assert result.tokens == tokens[: tokens.index(stop) + 1] and result.finish_reason == "stop"


def test_a_stream_gives_the_tokens_one_by_one_and_may_be_left(make_engine):
    engine = make_engine()
    prompt = shared_prompts(6, 1)[0]
    expected = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_stop=True))[0].tokens
    assert list(engine.stream(prompt, SamplingParams(max_tokens=8, ignore_stop=True))) == expected
    stream = engine.stream(prompt, SamplingParams(max_tokens=8, ignore_stop=True))
    assert next(stream) == expected[0]
    stream.close()
    assert not engine.has_work and engine.check() == []


def test_scores_agree_with_what_was_generated(make_engine):
    engine = make_engine()
    prompt = shared_prompts(7, 1)[0]
    answer = engine.generate([prompt], SamplingParams(max_tokens=20, ignore_stop=True))[0].tokens
    logits = engine.score([*prompt, *answer])
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_a_bad_request_never_disturbs_the_others(make_engine):
    engine = make_engine()
    good = shared_prompts(8, 2)
    params = SamplingParams(max_tokens=6, ignore_stop=True)
    expected = [r.tokens for r in engine.generate(good, params)]
    ids = [engine.add_request(prompt, params) for prompt in good]
    engine.step()
    for bad, words in [
        ([], "prompt"),
        ([[1, 2]], "flat list"),
        ([1.5], "integer"),
        ([[1], [1, 2]], "flat list"),
        ([10**30], "token ids lie in 0..511"),
        ([512], "token ids lie in 0..511"),
        ([-1], "token ids lie in 0..511"),
        ([3] * 600, "shorten them or raise max_context"),
    ]:
        with pytest.raises(UserError, match=words):
            engine.add_request(bad, params)
        with pytest.raises(UserError):
            engine.generate([good[0], bad], params)
        engine.step()
    for field in (
        {"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0},
        {"top_k": -1}, {"top_k": 2**31}, {"seed": -1}, {"seed": 2**40},
    ):  # fmt: skip
        with pytest.raises(UserError, match=next(iter(field))):
            SamplingParams(**field)
    with pytest.raises(UserError, match="request_id"):
        engine.result(10**9)
    drain(engine)
    assert [engine.result(i).tokens for i in ids] == expected


def test_aborting_at_any_moment_leaves_the_others_and_the_counts(make_engine):
    engine = make_engine()
    prompts = shared_prompts(9, 6)
    params = SamplingParams(max_tokens=10, ignore_stop=True)
    expected = [r.tokens for r in engine.generate(prompts, params)]
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    for step in range(5):
        engine.step()
        engine.abort(ids[step])
        assert engine.check() == []
    drain(engine)
    assert engine.result(ids[5]).tokens == expected[5]
    assert engine.result(ids[0]).finish_reason in ("aborted", "length")
    assert all(used == 0 for used, *_ in engine.stats().pools.values())


@pytest.mark.parametrize(
    ("mesh", "options", "words"),
    [
        ("model=3", {}, "heads"),
        ("model=8,dcp=2", {}, "model \\* dcp = 16"),
        ("data=3,model=4", {}, "it needs 12 devices, 8 are there"),
        ("modle=2", {}, "write axes once each"),
        ("1x1", {"attention_blocks": 3}, None),
        ("1x1", {"max_context": 10**6}, "max_context: got 1000000; the model reaches 65536"),
        ("1x1", {"token_budget": 2}, "token_budget"),
        ("dcp=4", {"rows_per_rank": 16, "interleave": 3}, "interleave"),
        ("1x1", {"ladder": (100,)}, "placement.ladder"),
    ],
)
def test_what_cannot_work_is_refused_when_the_engine_is_made(tiny_checkpoint, mesh, options, words):
    cache = dataclasses.replace(OPTIONS, **options)
    if words is None:
        engine = Engine.from_checkpoint(tiny_checkpoint, mesh, cache)
        with pytest.raises(UserError, match="pool mla: got 3; one request of 301 tokens needs 5 blocks"):
            engine.add_request([3] * 285)
        return
    with pytest.raises(UserError, match=words):
        Engine.from_checkpoint(tiny_checkpoint, mesh, cache)


def test_weights_come_from_their_cache_the_second_time(tiny_checkpoint, tmp_path, monkeypatch):
    def make():
        return Engine.from_checkpoint(tiny_checkpoint, "dcp=2", OPTIONS, weights_cache=tmp_path / "cache")

    make()
    monkeypatch.setattr(checkpoint_io, "_read", lambda *_: pytest.fail("a tensor was read from the checkpoint"))
    make()


def test_options_are_checked_where_they_are_made():
    with pytest.raises(UserError, match="hash_unit: got 0"):
        CacheOptions(hash_unit=0)


def test_forgetting_what_running_requests_hold_changes_no_token(make_engine):  # L6
    prompts = shared_prompts(11, 3)
    params = SamplingParams(max_tokens=30, ignore_stop=True)
    engine = make_engine("1x1", OPTIONS)
    expected = [result.tokens for result in engine.generate(prompts, params)]
    engine = make_engine("1x1", OPTIONS)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    for _ in range(9):
        engine.step()
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(preempt_running=True) and engine.check() == []
    assert all(used == cached == 0 for used, cached, *_ in engine.stats().pools.values())
    drain(engine)
    assert [engine.result(i).tokens for i in ids] == expected


def test_warming_up_disturbs_neither_the_cache_nor_live_requests(make_engine):
    engine = make_engine()
    prompt = shared_prompts(10, 1)[0]
    params = SamplingParams(max_tokens=6, ignore_stop=True)
    expected = engine.generate([prompt], params)[0].tokens
    request_id = engine.add_request(prompt, params)
    engine.step()
    engine.warm_up()
    drain(engine)
    result = engine.result(request_id)
    assert result.tokens == expected and result.hit == (len(prompt) - 1) // 64 * 64


@pytest.mark.parametrize("kinds", [((1, 2, 3), ()), ((), (1, 2, 3))], ids=["only KDA", "only MLA"])
def test_a_model_with_one_kind_of_layer_is_served(tiny_checkpoint, tmp_path, kinds):
    raw = json.loads((tiny_checkpoint / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types"):
        del raw[name]
    raw["num_hidden_layers"] = 3
    raw["linear_attn_config"] |= {"kda_layers": list(kinds[0]), "full_attn_layers": list(kinds[1])}
    random_checkpoint(tmp_path, raw, seed=0)
    engine = Engine.from_checkpoint(tmp_path, "dcp=2", dataclasses.replace(OPTIONS, hash_unit=16))
    prompt = shared_prompts(11, 1)[0]
    params = SamplingParams(max_tokens=8, ignore_stop=True)
    first, second = engine.generate([prompt], params)[0], engine.generate([prompt], params)[0]
    assert first.tokens == second.tokens and second.hit == (len(prompt) - 1) // 16 * 16
    assert engine.score([*prompt, *first.tokens])[len(prompt) - 1 : -1].argmax(-1).tolist() == first.tokens


def test_streams_that_share_an_engine_lose_no_token(make_engine):
    engine = make_engine()
    prompts = shared_prompts(12, 2)
    params = SamplingParams(max_tokens=8, ignore_stop=True)
    expected = [r.tokens for r in engine.generate(prompts, params)]
    pairs = list(itertools.zip_longest(*(engine.stream(prompt, params) for prompt in prompts)))
    assert [list(tokens) for tokens in zip(*pairs, strict=True)] == expected
    stream = engine.stream(prompts[0], params)
    tokens = [next(stream)]
    engine.generate(prompts[1:], params)
    assert [*tokens, *stream] == expected[0]


def test_a_text_of_the_whole_context_is_scored_and_a_preempted_score_is_whole(make_engine):
    engine = make_engine()
    text = np.random.default_rng(13).integers(3, 512, 512)
    expected = engine.score(text)
    assert expected.shape == (512, engine.vocab_size)
    small = make_engine("1x1", SMALL)
    ids = [
        small.add_request(prompt, SamplingParams(max_tokens=200, ignore_stop=True)) for prompt in shared_prompts(14, 3)
    ]
    for _ in range(20):
        small.step()
    assert np.abs(small.score(text) - expected).max() < 1e-3
    drain(small)
    assert all(small.result(i).finish_reason == "length" for i in ids)


@pytest.mark.parametrize("before_dispatch", [True, False])
def test_an_interrupted_step_loses_nothing(make_engine, monkeypatch, before_dispatch):
    engine = make_engine()
    prompts = shared_prompts(15, 3)
    params = SamplingParams(max_tokens=8, ignore_stop=True)
    expected = [r.tokens for r in engine.generate(prompts, params)]
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    engine.step()
    target = (metadata, "build") if before_dispatch else (engine._replicas[0].controller, "no_outcome")
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(*target, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert engine.check() == []
        engine.step()
    drain(engine)
    assert [engine.result(i).tokens for i in ids] == expected


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_bucket_as_small_as_a_decode_step_is_compiled_too(make_engine):
    engine = make_engine("1x1", dataclasses.replace(OPTIONS, token_budget=16, token_buckets=(4, 16)))
    engine.warm_up()
    ids = [engine.add_request([5, 6, 7], SamplingParams(max_tokens=20, ignore_stop=True))]
    for _ in range(3):
        engine.step()
        ids.append(engine.add_request([8, 9, 10], SamplingParams(max_tokens=3, ignore_stop=True)))
    drain(engine)
    assert engine.stats().compilations_after_warm_up == 0


def test_the_default_ladder_fits_any_hash_unit(tiny_checkpoint):
    for unit in (48, 100, 512):
        engine = Engine.from_checkpoint(tiny_checkpoint, "1x1", dataclasses.replace(OPTIONS, hash_unit=unit))
        assert all(grid % unit == 0 for grid in engine.config.placement.ladder)


def test_only_requests_of_the_same_salt_and_extra_keys_share_a_prefix(make_engine):
    engine = make_engine()
    prompt = shared_prompts(16, 1)[0]
    params = SamplingParams(max_tokens=4, ignore_stop=True)
    whole = (len(prompt) - 1) // 64 * 64
    names = [
        {}, {"salt": "a"}, {"salt": "b"}, {"extra_keys": ExtraKeys(Adapter("a"))},
        {"extra_keys": ExtraKeys(media=(Media("a", 0, 3),))}, {"salt": "a", "extra_keys": ExtraKeys(Adapter("a"))},
    ]  # fmt: skip
    for hit in (0, whole):
        ids = []
        for name in names:
            ids.append(engine.add_request(prompt, params, **name))
            drain(engine)
        results = [engine.result(i) for i in ids]
        assert [result.hit for result in results] == [hit] * len(names)
        assert len({tuple(result.tokens) for result in results}) == 1
        if not hit:
            assert [result.miss_reason for result in results[:4]] == ["cold", "salt", "salt", "cold"]


def test_a_secret_is_in_every_key(make_engine, tiny_checkpoint):
    prompt = list(range(3, 133))
    engines = [make_engine(), *(Engine.from_checkpoint(tiny_checkpoint, "1x1", OPTIONS, secret=s) for s in SECRETS)]
    requests = [engine._requests[engine.add_request(prompt)] for engine in engines]
    keys = [request.prompt_keys(2) for request in requests]
    assert np.array_equal(keys[1], keys[2])
    assert all((keys[one] != keys[other]).any(1).all() for one, other in ((0, 1), (0, 3), (1, 3)))
    engines[0].abort(requests[0].id)
    with pytest.raises(UserError, match="secret: got 'bytes of length 3'"):
        Engine.from_checkpoint(tiny_checkpoint, "1x1", OPTIONS, secret=b"abc")


def test_what_free_blocks_and_states_hold_reaches_no_token(make_engine):
    engine = make_engine()
    prompts = shared_prompts(18, 2)
    params = SamplingParams(max_tokens=8, ignore_stop=True)
    expected = [result.tokens for result in engine.generate(prompts, params)]
    state, offset = engine._replicas[0].controller.state, engine.config.pool_offset
    nameless = ~(np.asarray(state.blocks)[:, PLACES:] > 0).any(1)
    nameless[list(offset)] = False  # the null blocks
    blocks, slots = engine.config.pool_blocks
    mla, states = nameless[:blocks], nameless[offset[1] : offset[1] + slots]
    caches = engine._device.caches
    engine._device.caches = type(caches)(*(
        jax.device_put(np.where(free.reshape(-1, *[1] * (array.ndim - 2)), np.nan, np.asarray(array)), array.sharding)
        for array, free in ((caches.mla, mla), (caches.kda, states), (caches.conv, states))
    ))  # fmt: skip
    assert mla.any() and states.any()
    again = engine.generate(prompts, params)
    assert [result.tokens for result in again] == expected
    assert all(result.hit == (result.prompt_length - 1) // 64 * 64 for result in again)
    engine._device.caches = caches


SECRETS = (b"0123456789abcdef", b"0123456789abcdef", new_secret())
