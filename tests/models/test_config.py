"""A configuration is read from both layouts, and refused where it asks for something else."""

import json

import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.models.config import KimiLinearConfig
from tests.models.harness import CHECKPOINT


def raw(**changes) -> dict:
    return json.loads((CHECKPOINT / "config.json").read_text()) | changes


def published() -> dict:
    """Fields of the published 48B configuration."""
    mla = [4, 8, 12, 16, 20, 24, 27]
    return {
        "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "vocab_size": 163840,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None, "num_experts": 256,
        "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
        "moe_renormalize": True, "routed_scaling_factor": 2.446, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 0, "eos_token_id": 163586, "tie_word_embeddings": False,
        "linear_attn_config": {
            "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": mla,
            "kda_layers": [i for i in range(1, 28) if i not in mla],
        },
    }  # fmt: skip


def test_layer_kinds_come_from_the_lists_and_not_from_a_modulus():
    config = KimiLinearConfig.from_dict(published())
    assert config.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert config.layer_kinds[-3:] == ("mla", "kda", "mla") or config.layer_kinds[-4:] == ("mla", "kda", "kda", "mla")
    assert len(config.kda_layers) == 20 and config.dense_layers == (0,)
    assert config.softmax_scale == 192**-0.5 and config.cache_width == 576


def test_the_saved_layout_is_read_too():
    config = KimiLinearConfig.from_dict(raw())
    assert config.mla_layers == (3, 6) and config.experts == 8 and config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "kimi_k3"), ("hidden_act", "situ"), ("moe_router_activation_func", "softmax"),
        ("mla_use_nope", False), ("rope_scaling", {"type": "yarn"}), ("q_lora_rank", 1536), ("attention_bias", True),
        ("tie_word_embeddings", True), ("num_key_value_heads", 2), ("num_expert_group", 3), ("topk_group", 2),
        ("num_experts_per_token", 9), ("gate_lower_bound", -6.0), ("layer_types", ["sliding_attention"] * 7),
        ("mlp_layer_types", ["sparse"] * 7), ("hidden_size", None), ("quantization_config", {"bits": 4}),
    ],
)  # fmt: skip
def test_values_the_code_does_not_honour_are_named(field, value):
    with pytest.raises(UserError, match=field):
        KimiLinearConfig.from_dict(raw(**{field: value}))


@pytest.mark.parametrize("mla", [[4], [4, 5, 7], [4, 8], [0, 4]])
def test_lists_that_do_not_partition_the_layers_are_refused(mla):
    linear = raw()["linear_attn_config"] | {"full_attn_layers": mla}
    with pytest.raises(UserError, match="exactly once"):
        KimiLinearConfig.from_dict(raw(linear_attn_config=linear))
