"""K3 through the engine: the same greedy tokens on every mesh, whole and in chunks, cold, from the cache and without.

`scripts/check_meshes.py` does the same on more meshes.
"""

import dataclasses
import functools

import numpy as np
import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.models.make_tiny import make_tiny
from hybrid_kv.runtime.engine import CacheOptions, Engine, SamplingParams

OPTIONS = CacheOptions(max_context=256, max_requests=4, token_budget=128, token_buckets=(128,), hash_unit=16)
GREEDY = SamplingParams(max_tokens=24, ignore_stop=True)
RNG = np.random.default_rng(0)
STEM = RNG.integers(0, 500, 100).tolist()
PROMPTS = [[*STEM[:shared], *RNG.integers(0, 500, own).tolist()] for shared, own in
           ((0, 9), (60, 5), (100, 30), (100, 60))]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("k3")
    make_tiny(path, "tiny-k3", seed=0)
    return path


@pytest.fixture(scope="module")
def engine(checkpoint):
    @functools.cache
    def make(mesh: str, **changes) -> Engine:
        return Engine.from_checkpoint(checkpoint, mesh=mesh, cache=dataclasses.replace(OPTIONS, **changes))

    return make


@pytest.fixture(scope="module")
def expected(engine):
    """Tokens of one device with nothing cached, one request after the other."""
    alone, answers = engine("1x1"), []
    for prompt in PROMPTS:
        assert alone.reset_prefix_cache()
        answers.append(alone.generate([prompt], GREEDY)[0].tokens)
    assert alone.reset_prefix_cache()
    return answers


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("1x1", {}),
        ("1x1", {"chunk_limit": 48}),
        ("model=2,dcp=4", {"interleave": 4}),
        ("model=2,dcp=4", {"interleave": 4, "chunk_limit": 16}),
        ("model=2,dcp=4", {"interleave": 4, "prefix_caching": False}),
    ],
)
def test_no_mesh_chunk_or_cache_changes_a_token(engine, expected, mesh, changes):
    served = engine(mesh, **changes)
    cold, warm = served.generate(PROMPTS, GREEDY), served.generate(PROMPTS, GREEDY)
    for results in (cold, warm):
        assert [result.tokens for result in results] == expected
    assert [result.hit for result in warm] == ([0, 64, 128, 144] if changes.get("prefix_caching", True) else [0] * 4)
    limit = changes.get("chunk_limit", 128)
    assert all(np.diff([result.hit, *result.chunks]).max() <= limit for result in cold)
    assert max(len(result.chunks) for result in cold) >= 130 / limit
    assert not served.check()


def test_a_token_that_stands_for_media_is_refused_by_name(engine):
    with pytest.raises(UserError, match="prompt: got 505; this is media_placeholder_token_id"):
        engine("1x1").add_request([1, 505, 2])
    assert not engine("1x1").has_work
