"""Random shared-prefix traffic never reads content of another prefix and leaks nothing."""

import functools

import numpy as np
import pytest

from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.content_model import Serving


@functools.cache
def _config(dcp: int, groups: int, shared: bool, unit: int, ladder: tuple[int, ...], whole: bool = True) -> CacheConfig:
    specs = [GroupSpec("mla", "mla", 8)]
    specs += [GroupSpec(f"kda{i}", "recurrent", 8) for i in range(groups)]
    pools = (36 // dcp + 70 * shared,) + (() if shared else (12,) * groups)
    group_pool = (0,) * (1 + groups) if shared else tuple(range(1 + groups))
    return CacheConfig(
        geometry=resolve(specs, dcp=dcp, hash_unit=unit),
        pool_blocks=pools,
        group_pool=group_pool,
        max_requests=4,
        max_context=96,
        token_budget=40,
        chunk_limit=1 << 30 if whole else 16,
        whole_prompts=whole,
        placement=Placement(ladder=ladder),
    )


CONFIGS = {
    "plain": _config(1, 1, False, 8, ()),
    "partial hits, striped": _config(2, 1, False, 4, (16,)),
    "two recurrent groups": _config(1, 2, False, 8, ()),
    "one pool for all": _config(2, 2, True, 8, (16,)),
    "attention only": _config(2, 0, False, 4, ()),
    "admitted by the chunk": _config(1, 1, False, 8, (16,), whole=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_random_traffic_is_sound_and_leaves_nothing_behind(name):
    config = CONFIGS[name]
    for seed in range(2):
        rng = np.random.default_rng(seed)
        serving = Serving(config, seed)
        stems = [rng.integers(0, 3, 60) for _ in range(2)]
        queue = []
        for _ in range(25):
            stem = stems[rng.integers(2)][: rng.integers(0, 60)]
            prompt = np.concatenate([stem, rng.integers(0, 3, rng.integers(1, 25))])
            queue += [(prompt, int(rng.integers(1, 10)))] * int(rng.integers(1, 3))
        free = np.asarray(serving.state.pools)[:, 3].copy()
        for _ in range(4000):
            while queue and len(serving.live) < config.max_requests and rng.random() < 0.7:
                prompt, answer = queue.pop()
                serving.add(prompt, answer)
            if not serving.live:
                if not queue:
                    break
                continue
            plan = serving.plan()
            if rng.random() < 0.05:
                serving.withdraw()
                continue
            serving.execute(plan)
            if rng.random() < 0.05:
                serving.abort(int(rng.choice(list(serving.live))))
            serving.commit(plan)
            serving.assert_sound()
        assert not serving.live and not queue
        assert np.array_equal(np.asarray(serving.state.pools)[:, 3], free)
