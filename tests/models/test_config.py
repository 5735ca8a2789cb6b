"""A configuration is read from both layouts, and refused where it asks for something else."""

import json

import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.published import named
from tests.models.harness import CHECKPOINT


def raw(**changes) -> dict:
    return json.loads((CHECKPOINT / "config.json").read_text()) | changes


def test_layer_kinds_come_from_the_lists_and_not_from_a_modulus():
    config = KimiLinearConfig.from_dict(named("kimi-linear-48b"))
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
        ("model_type", "kimi_k25"), ("hidden_act", "gelu"), ("moe_router_activation_func", "softmax"),
        ("mla_use_nope", False), ("rope_scaling", {"type": "yarn"}), ("topk_method", "greedy"),
        ("attention_bias", True),
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
