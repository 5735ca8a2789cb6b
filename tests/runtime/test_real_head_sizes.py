"""A checkpoint with the head sizes of the published model is served equally on one device and on a mesh."""

import json

import numpy as np

from hybrid_kv.models.checkpoint_io import random_checkpoint
from hybrid_kv.runtime.engine import CacheOptions, Engine, SamplingParams

OPTIONS = CacheOptions(max_context=256, max_requests=2, token_budget=128, token_buckets=(128,), hash_unit=16)
GREEDY = SamplingParams(max_tokens=12, ignore_stop=True)


def test_128_wide_heads_and_a_512_wide_latent_change_no_token_across_meshes(tiny_checkpoint, tmp_path):
    raw = json.loads((tiny_checkpoint / "config.json").read_text())
    raw |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    raw |= {"num_experts": 16, "num_experts_per_token": 4, "hidden_size": 128}
    raw["linear_attn_config"] |= {"head_dim": 128}
    random_checkpoint(tmp_path, raw, seed=5)
    prompts = [np.random.default_rng(i).integers(3, 512, 70 + 60 * i).tolist() for i in range(2)]
    answers = []
    for mesh in ("1x1", "model=2,dcp=4"):
        engine = Engine.from_checkpoint(tmp_path, mesh, OPTIONS)
        cold, warm = engine.generate(prompts, GREEDY), engine.generate(prompts, GREEDY)
        assert [r.tokens for r in cold] == [r.tokens for r in warm]
        assert [r.hit for r in warm] == [64, 128]
        answers.append([r.tokens for r in cold])
    assert answers[0] == answers[1]
