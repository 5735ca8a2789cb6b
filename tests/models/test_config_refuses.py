"""Every malformed file of a checkpoint is refused with the field, the value and the fix, never a traceback."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hybrid_kv.errors import UserError
from hybrid_kv.models.checkpoint_io import load, load_config, random_checkpoint
from hybrid_kv.models.config import KimiLinearConfig
from tests.models.harness import mesh_of
from tests.models.test_checkpoint_io import SMALL

LINEAR = "linear_attn_config"
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
          "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts", "num_experts_per_token",
          "moe_intermediate_size")  # fmt: skip
POSITIVE = ("num_key_value_heads", "num_shared_experts", "moe_layer_freq", "model_max_length")
COUNTS = ("num_expert_group", "topk_group", "first_k_dense_replace", "eos_token_id")
FLOATS = ("routed_scaling_factor", "rms_norm_eps", "mla_lora_norm_eps", "gate_lower_bound")
NO_INT = ("abc", 64.5, 64.0, math.nan, math.inf, True, [8], {}, -2, 2**31)
DEEP = "[" * 100_000


def with_field(field: str, value: object) -> dict:
    """SMALL with one field changed; `linear_attn_config.x` names an inner one."""
    outer, _, inner = field.partition(".")
    return SMALL | {outer: SMALL[LINEAR] | {inner: value} if inner else value}


CASES = [
    *((field, value) for field in NEEDED for value in (*NO_INT, 0, None)),
    *((f"{LINEAR}.{field}", value) for field in ("num_heads", "head_dim", "short_conv_kernel_size")
      for value in (*NO_INT, 0, None)),
    *((field, value) for field in POSITIVE for value in (*NO_INT, 0)),
    *((field, value) for field in COUNTS for value in NO_INT if not (field == "eos_token_id" and value == [8])),
    *((field, value) for field in FLOATS for value in ("1", math.nan, math.inf, 10**400, True, [1.0], {})),
    *((field, -1.0) for field in ("rms_norm_eps", "mla_lora_norm_eps")),
    *(("moe_renormalize", value) for value in (1, 0.0, "true", [])),
    *((f"{LINEAR}.{field}", value) for field in ("kda_layers", "full_attn_layers")
      for value in (5, "1", None, {"1": 1}, [1, "a"], [True], [1.0], [None], [[1]], [-1])),
    *((field, value) for field in ("layer_types", "mlp_layer_types")
      for value in (5, False, "dense", {"a": 1}, [5], [["dense"]], [None], [{}])),
    *(("eos_token_id", value) for value in ([1, "a"], [True], [-1], [[1]])),
    *((LINEAR, value) for value in (5, "x", [1], None)),
    *((field, value) for field in ("model_type", "hidden_act", "mla_use_nope") for value in ([], {}, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), CASES)
def test_a_field_of_a_wrong_type_is_named(field: str, value: object):
    with pytest.raises(UserError) as error:
        KimiLinearConfig.from_dict(with_field(field, value))
    assert error.value.field == field
    assert "\n" not in str(error.value)


def test_null_is_the_default_where_there_is_one():
    fields = (*POSITIVE, *COUNTS, *FLOATS, "moe_renormalize", "layer_types", "mlp_layer_types")
    small = {name: value for name, value in SMALL.items() if name not in fields}
    assert KimiLinearConfig.from_dict(small | dict.fromkeys(fields)) == KimiLinearConfig.from_dict(small)


@pytest.mark.parametrize(("eos", "tokens"), [(2, (2,)), ([2, 0], (2, 0)), ([], ()), (None, ())])
def test_stop_tokens_are_one_a_list_or_none(eos, tokens):
    assert KimiLinearConfig.from_dict(SMALL | {"eos_token_id": eos}).eos_token_ids == tokens


def test_an_absurd_layer_count_is_refused_before_it_is_counted_out():
    with pytest.raises(UserError, match="exactly once"):
        KimiLinearConfig.from_dict(SMALL | {"num_hidden_layers": 2**31 - 1})


@pytest.mark.parametrize("content", [DEEP, '{"a":' * 100_000, "1" * 5000, "[1]", "null", "\ufeff{}", ""])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_that_is_no_json_object_is_named(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    config = KimiLinearConfig.from_dict(SMALL)
    with pytest.raises(UserError, match="checkpoint") as error:
        load_config(tmp_path) if name == "config.json" else load(tmp_path, config, mesh_of())
    assert name in str(error.value)


def test_a_value_about_as_deep_as_the_recursion_limit_is_refused(tmp_path):
    for depth in range(850, 1000):  # readable or not, depending on how deep the caller is
        value = "[" * depth + "]" * depth
        (tmp_path / "config.json").write_text(json.dumps(SMALL)[:-1] + f', "topk_group": {value}}}')
        with pytest.raises(UserError):
            load_config(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        {}, {"weight_map": None}, {"weight_map": ["model.safetensors"]}, {"weight_map": "model.safetensors"},
        {"weight_map": {"lm_head.weight": 5}}, {"weight_map": {"lm_head.weight": ["a"]}},
        {"weight_map": {"lm_head.weight": ""}}, {"weight_map": {"lm_head.weight": "a\0b"}},
        {"weight_map": {"lm_head.weight": "a" * 5000}}, {"weight_map": {}},
    ],
)  # fmt: skip
def test_an_index_that_does_not_map_names_to_files_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="checkpoint"):
        load(tmp_path, KimiLinearConfig.from_dict(SMALL), mesh_of())


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(np.int8, "I8"), (np.int64, "I64"), (np.uint8, "U8"), (np.bool_, "BOOL"), (ml_dtypes.bfloat16, None),
     (np.float16, None), (np.float64, None)],
)  # fmt: skip
def test_weights_have_to_be_floating_point(tmp_path, dtype, stored):
    config = random_checkpoint(tmp_path, SMALL, seed=1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    if stored is None:
        assert load(tmp_path, config, mesh_of())["head"].shape == (64, 16)
        return
    with pytest.raises(UserError, match="floating point") as error:
        load(tmp_path, config, mesh_of())
    assert (error.value.field, error.value.value) == ("lm_head.weight", stored)
