"""The nested configuration of K3: what differs from Kimi Linear is read, anything else is refused by its full name."""

import copy

import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.published import NAMES, named

QUANT, GROUP = "quantization_config", "quantization_config.config_groups.group_0"


def changed(path: str, value: object) -> dict:
    """tiny-k3 with one field set, its place given with dots."""
    raw = copy.deepcopy(named("tiny-k3"))
    *outer, last = path.split(".")
    inner = raw
    for name in outer:
        inner = inner[name]
    inner[last] = value
    return raw


def test_every_difference_of_k3_is_read():
    c = KimiLinearConfig.from_dict(named("kimi-k3"))
    assert (len(c.kda_layers), len(c.mla_layers), c.mla_layers[-2:]) == (69, 24, (91, 92))
    assert c.dense_layers == (0,) and c.layers == 93 and c.kda_heads == c.mla_heads == 96
    assert (c.gate_lower_bound, c.full_rank_gate, c.query_rank, c.mla_output_gate) == (-5.0, True, 1536, True)
    assert (c.situ_beta, c.situ_linear_beta) == (4.0, 25.0)
    assert (c.routed_width, c.expert_input_width, c.latent_norm, c.packed_experts) == (3584, 3584, True, True)
    assert (c.residual_block, c.residual_blocks) == (12, 8)
    assert c.shared_experts == 2 and c.routed_scaling_factor == 1.0
    assert c.tensor_prefix == "language_model." and c.media_tokens == (("media_placeholder_token_id", 163605),)


def test_kimi_linear_has_none_of_them():
    c = KimiLinearConfig.from_dict(named("kimi-linear-48b"))
    assert (c.gate_lower_bound, c.full_rank_gate, c.query_rank, c.mla_output_gate) == (None, False, 0, False)
    assert (c.situ_beta, c.routed_width, c.expert_input_width, c.packed_experts) == (None, 0, 2304, False)
    assert (c.residual_blocks, c.tensor_prefix, c.media_tokens) == (0, "", ())


def test_a_text_configuration_alone_is_read_with_plain_tensor_names():
    raw = named("kimi-k3")
    alone = KimiLinearConfig.from_dict(raw["text_config"] | {"image_token_id": 7})
    assert alone.tensor_prefix == "" and alone.media_tokens == (("image_token_id", 7),) and alone.residual_blocks == 8


def test_the_linear_factor_may_have_no_bound():
    c = KimiLinearConfig.from_dict(changed("text_config.activation_situ_linear_beta", None))
    assert c.situ_beta == 4.0 and c.situ_linear_beta is None


def test_the_gate_fields_may_stand_beside_the_linear_attention():
    raw = named("tiny-k3")
    for field in ("gate_lower_bound", "use_full_rank_gate"):
        raw["text_config"][field] = raw["text_config"]["linear_attn_config"].pop(field)
    assert KimiLinearConfig.from_dict(raw) == KimiLinearConfig.from_dict(named("tiny-k3"))


def test_stop_tokens_of_the_wrapper_are_the_text_models():
    raw = named("tiny-k3") | {"eos_token_id": [3, 4]}
    del raw["text_config"]["eos_token_id"]
    assert KimiLinearConfig.from_dict(raw).eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config", None), ("text_config", [1]), ("text_config.hidden_act", "gelu"),
        ("text_config.activation_situ_beta", None), ("text_config.activation_situ_beta", 0),
        ("text_config.activation_situ_linear_beta", -1.0), ("text_config.activation_situ_linear_beta", "25"),
        ("text_config.attn_res_block_size", -1), ("text_config.attn_res_block_size", 2.5),
        ("text_config.routed_expert_hidden_size", "32"), ("text_config.latent_moe_use_norm", 1),
        ("text_config.q_lora_rank", True), ("text_config.mla_use_output_gate", "yes"),
        ("text_config.linear_attn_config.use_full_rank_gate", 1),
        ("text_config.num_nextn_predict_layers", 1), ("text_config.tie_word_embeddings", True),
        ("text_config.hidden_size", None), ("text_config.model_type", "kimi_k2"),
        ("text_config.routed_expert_hidden_size", 48), ("text_config.moe_intermediate_size", 40),
        ("media_placeholder_token_id", "x"), ("quantization_config", {"quant_method": "fp8"}),
        (f"text_config.{QUANT}", "mxfp4"),
        (f"text_config.{QUANT}.quant_method", "fp8"), (f"text_config.{QUANT}.format", "nvfp4-pack-quantized"),
        (f"text_config.{QUANT}.format", None), (f"text_config.{QUANT}.kv_cache_scheme", {"num_bits": 8}),
        (f"text_config.{QUANT}.config_groups", {}), (f"text_config.{GROUP}", {"targets": ["Linear"]}),
        (f"text_config.{GROUP}.input_activations", {"num_bits": 8}), (f"text_config.{GROUP}.weights.num_bits", 8),
        (f"text_config.{GROUP}.weights.group_size", 16), (f"text_config.{GROUP}.weights.type", "int"),
        (f"text_config.{GROUP}.weights.symmetric", 1),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_its_full_name(path, value):
    with pytest.raises(UserError) as error:
        KimiLinearConfig.from_dict(changed(path, value))
    assert error.value.field == path and "\n" not in str(error.value)


def test_an_unknown_model_is_refused_with_the_names_there_are():
    with pytest.raises(UserError, match="tiny-k3"):
        named("../config")
    for name in NAMES:
        KimiLinearConfig.from_dict(named(name))
