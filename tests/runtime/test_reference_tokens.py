"""The engine gives the reference's tokens and logits on every mesh, whole and in chunks, cold and from the cache."""

import dataclasses

import numpy as np
import pytest

from hybrid_kv.runtime.engine import CacheOptions, Engine, SamplingParams
from tests.runtime.conftest import OPTIONS

MESHES = ["1x1", "model=2", "dcp=2", "model=2,dcp=4"]
GREEDY = SamplingParams(max_tokens=32, ignore_stop=True)


@pytest.mark.parametrize("chunk", [None, 16, 48, 64])
@pytest.mark.parametrize("mesh", MESHES)
def test_greedy_tokens_equal_the_reference_cold_and_warm(make_engine, reference, mesh, chunk):
    engine: Engine = make_engine(mesh, dataclasses.replace(OPTIONS, chunk_limit=chunk))
    prompts = [reference[f"prompt_{i}"].tolist() for i in range(4)]
    for _ in range(2):
        results = engine.generate(prompts, GREEDY)
        for i, result in enumerate(results):
            assert result.tokens == reference[f"greedy_{i}"].tolist()
    assert [result.hit for result in results] == [0, 0, 128, 192]
    if chunk:
        assert results[1].chunks == [*range(chunk, 64, chunk), 64]
    assert not engine.check()


@pytest.mark.parametrize("mesh", MESHES)
def test_last_logits_equal_the_reference(make_engine, reference, mesh):
    engine = make_engine(mesh, OPTIONS)
    for i in range(4):
        logits = engine.score(reference[f"prompt_{i}"].tolist())
        expected = reference[f"logits_last8_{i}"]
        assert logits.shape == (len(reference[f"prompt_{i}"]), engine.vocab_size)
        assert np.abs(logits[-len(expected) :] - expected).max() < 2e-4


@pytest.mark.parametrize("options", [
    CacheOptions(max_context=512, max_requests=4, token_budget=256, token_buckets=(256,), hash_unit=16, interleave=4),
    CacheOptions(max_context=512, max_requests=4, token_budget=256, token_buckets=(256,), hash_unit=16,
                 rows_per_rank=16, interleave=16),
])  # fmt: skip
def test_interleave_and_large_dcp_blocks_change_no_token(make_engine, reference, options):
    engine = make_engine("model=2,dcp=4", options)
    prompts = [reference[f"prompt_{i}"].tolist() for i in range(4)]
    for _ in range(2):
        for i, result in enumerate(engine.generate(prompts, GREEDY)):
            assert result.tokens == reference[f"greedy_{i}"].tolist()
    assert engine.result(engine.add_request([1])).hit == 0
    while engine.has_work:
        engine.step()
