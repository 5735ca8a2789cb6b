"""The tiny golden decoders: logits and every cache after 77 tokens, on one device and on two."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from hybrid_kv.models.checkpoint_io import load
from hybrid_kv.models.config import KimiLinearConfig
from tests.kernels import golden
from tests.models.harness import Runner, mesh_of

MLA = {"tiny_kimi_linear": (3, 4), "tiny_k3": (3, 5)}


def config_of(name: str, file: dict) -> dict:
    cfg = {
        key.removeprefix("cfg/"): value.item()
        for key, value in file.items()
        if key.startswith("cfg/") and not value.ndim
    }
    layers = cfg["num_hidden_layers"]
    raw = {
        "model_type": "kimi_linear", "vocab_size": cfg["vocab"], "hidden_size": cfg["hidden_size"],
        "intermediate_size": cfg["dense_intermediate"], "num_hidden_layers": layers,
        "num_attention_heads": cfg["mla_heads"], "kv_lora_rank": cfg["kv_lora_rank"],
        "qk_nope_head_dim": cfg["qk_nope"], "qk_rope_head_dim": cfg["qk_rope"],
        "v_head_dim": cfg["v_head_dim"], "num_experts": cfg["experts"],
        "num_experts_per_token": cfg["topk"], "moe_intermediate_size": cfg["moe_intermediate"],
        "first_k_dense_replace": 1, "routed_scaling_factor": cfg["routed_scaling_factor"],
        "linear_attn_config": {
            "num_heads": cfg["kda_heads"], "head_dim": cfg["kda_head_dim"], "short_conv_kernel_size": cfg["conv"],
            "full_attn_layers": [i + 1 for i in MLA[name]],
            "kda_layers": [i + 1 for i in range(layers) if i not in MLA[name]],
        },
    }  # fmt: skip
    if name == "tiny_kimi_linear":
        return raw
    assert tuple(file["cfg/full_attn_layers_zero_based"]) == MLA[name]
    return raw | {
        "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "q_lora_rank": cfg["q_lora_rank"], "mla_use_output_gate": True, "num_shared_experts": cfg["shared_experts"],
        "routed_expert_hidden_size": cfg["latent"], "latent_moe_use_norm": True,
        "gate_lower_bound": cfg["gate_lower_bound"], "use_full_rank_gate": True,
        "attn_res_block_size": cfg["attn_res_block_size"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "model", "dcp"), [("tiny_kimi_linear", 1, 1), ("tiny_k3", 1, 1), ("tiny_k3", 2, 1), ("tiny_k3", 1, 2)]
)
def test_logits_and_states_match_the_golden_decoder(tmp_path, name, model, dcp):
    file, mesh = golden.load(name), mesh_of(model, dcp)
    save_file({k.removeprefix("w/"): v for k, v in file.items() if k.startswith("w/")}, tmp_path / "model.safetensors")
    config = KimiLinearConfig.from_dict(config_of(name, file))
    run = Runner(config, load(tmp_path, config, mesh, jnp.float32), mesh)
    tokens = file["tokens"]
    logits = run.run(run.batch([tokens], [0], pad_to=96))
    assert golden.rel_rmse(logits[:77], file["logits"]) <= 2e-5
    for at, layer in enumerate(config.kda_layers):
        assert golden.rel_rmse(run.caches.kda[at, 1], file[f"state/{layer}/recurrent"]) <= 2e-5
        conv = np.asarray(run.caches.conv[at, 1]).reshape(3, config.kda_heads, 3, config.kda_head_dim)
        want = file[f"state/{layer}/conv"].reshape(3, config.kda_heads, config.kda_head_dim, 3)
        assert golden.rel_rmse(conv.transpose(2, 1, 3, 0), want) <= 2e-5
    for at, layer in enumerate(config.mla_layers):
        # One token a stripe: with two ranks, even positions of a block come before the odd ones.
        pages = np.asarray(run.caches.mla[at, run.table[0]]).reshape(run.columns, dcp, -1, config.cache_width)
        rows = pages.swapaxes(1, 2).reshape(-1, config.cache_width)
        assert golden.rel_rmse(rows[:77], file[f"state/{layer}/latent_cache"]) <= 2e-5
        assert np.isnan(rows[77:]).all()
