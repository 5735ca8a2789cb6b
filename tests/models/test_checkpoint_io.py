"""Checkpoints: both name variants, shards, strict names and shapes, clear refusals, sharded placement."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hybrid_kv.errors import UserError
from hybrid_kv.models.checkpoint_io import load, load_config, random_checkpoint
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.parameters import check_mesh, inventory, partition_specs
from tests.models.harness import CHECKPOINT, Runner, mesh_of

SMALL = {
    "model_type": "kimi_linear", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1,
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 4, "short_conv_kernel_size": 4, "full_attn_layers": [2], "kda_layers": [1],
    },
}  # fmt: skip


@pytest.fixture
def small(tmp_path):
    return random_checkpoint(tmp_path, SMALL, seed=1), tmp_path


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_every_device_holds_its_part_and_parts_make_the_whole(small):
    config, path = small
    whole = load(path, config, mesh_of(), jnp.float32)
    split = load(path, config, mesh_of(2, 2), jnp.float32)
    stored = load_file(path / "model.safetensors")
    for name, entry in inventory(config).items():
        np.testing.assert_array_equal(whole[name], split[name])
        assert split[name].sharding.spec == entry.spec
    assert split["kda.qkv"].addressable_shards[0].data.shape == (1, 12, 16)
    q = stored["model.layers.0.self_attn.q_proj.weight"].reshape(4, 4, 16)
    packed = np.asarray(whole["kda.qkv"]).reshape(4, 3, 4, 16)
    np.testing.assert_array_equal(packed[:, 0], q)


def test_files_with_an_index_give_the_same_parameters(small, tmp_path_factory):
    config, path = small
    other = tmp_path_factory.mktemp("sharded")
    random_checkpoint(other, SMALL, seed=1, shards=3)
    one, many = load(path, config, mesh_of(), jnp.float32), load(other, config, mesh_of(), jnp.float32)
    for name in one:
        np.testing.assert_array_equal(one[name], many[name])
    next(other.glob("*-00002-*")).unlink()
    with pytest.raises(UserError, match="no such file"):
        load(other, config, mesh_of())


def test_a_tensor_that_stands_in_two_files_is_refused(small, tmp_path_factory):
    path = tmp_path_factory.mktemp("twice")
    config = random_checkpoint(path, SMALL, seed=1, shards=2)
    one, other = sorted(path.glob("*.safetensors"))
    name, value = next(iter(load_file(one).items()))
    save_file(load_file(other) | {name: value + 1}, other)
    with pytest.raises(UserError, match=f"{other.name}.*{name} stands twice, also in {one.name}"):
        load(path, config, mesh_of())


def test_dtype_is_cast_on_load_and_gates_stay_fp32(small):
    config, path = small
    params = load(path, config, mesh_of(), jnp.bfloat16)
    assert params["kda.qkv"].dtype == jnp.bfloat16 and params["kda.a_log"].dtype == jnp.float32


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1), (7,), (1, 1, 6, 1)])
def test_a_log_is_narrowed_from_any_stored_form(small, shape):
    config, path = small
    values = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32)
    rewrite(path, lambda t: t.update({"model.layers.0.self_attn.A_log": values.reshape(shape)}))
    np.testing.assert_array_equal(load(path, config, mesh_of(2, 2))["kda.a_log"], [[1, 2, 3, 4]])


def test_missing_and_extra_names_are_all_listed(small):
    config, path = small

    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.kv_b_proj.weight"]
        tensors["model.layers.9.extra"] = np.zeros(1, np.float32)

    rewrite(path, change)
    with pytest.raises(UserError) as error:
        load(path, config, mesh_of())
    for name in ("model.norm.weight", "model.layers.1.self_attn.kv_b_proj.weight", "model.layers.9.extra"):
        assert name in str(error.value)


def test_a_wrong_shape_is_named(small):
    config, path = small
    rewrite(path, lambda t: t.update({"lm_head.weight": np.zeros((63, 16), np.float32)}))
    with pytest.raises(UserError, match=r"lm_head.weight: got \[63, 16\]"):
        load(path, config, mesh_of())


@pytest.mark.parametrize("size", [0, 4, 1000])
def test_a_truncated_file_is_refused(small, size):
    config, path = small
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:size])
    with pytest.raises(UserError, match="truncated"):
        load(path, config, mesh_of())


def test_missing_or_broken_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json"):
        load_config(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path, KimiLinearConfig.from_dict(SMALL), mesh_of())


@pytest.mark.parametrize(("model", "dcp"), [(8, 1), (1, 8), (3, 1)])
def test_a_mesh_that_does_not_divide_the_model_is_refused(small, model, dcp):
    with pytest.raises(UserError, match="multiple of model"):
        load(small[1], small[0], mesh_of(model, dcp))


def test_specs_cover_every_parameter_and_every_tensor():
    config = load_config(CHECKPOINT)
    specs = partition_specs(config)
    table = inventory(config)
    assert specs.parameters.keys() == table.keys()
    assert specs.checkpoint.keys() == {n for e in table.values() for n in e.source.tensors()}
    tensor = ("model", "dcp")
    assert specs.parameters["kda.qkv"] == jax.P(None, tensor)
    assert specs.checkpoint["model.layers.0.self_attn.q_proj.weight"] == jax.P(tensor)
    assert specs.checkpoint["model.layers.0.self_attn.o_proj.weight"] == jax.P(None, tensor)
    assert specs.checkpoint["model.layers.1.block_sparse_moe.experts.3.w1.weight"] == jax.P()
    check_mesh(config, {"data": 1, "model": 2, "dcp": 4})


def test_real_head_widths_run_and_cut_prefill_equals_whole(tmp_path):
    """Heads of 128, latent 512 + 64, 16 experts: the widths of the published model."""
    config = random_checkpoint(tmp_path, json.loads(json.dumps(SMALL)) | {
        "hidden_size": 64, "num_attention_heads": 8, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 16, "num_experts_per_token": 4,
        "linear_attn_config": SMALL["linear_attn_config"] | {"num_heads": 8, "head_dim": 128},
    }, seed=2)  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 64, 90)
    run = Runner(config, load(tmp_path, config, mesh_of(2, 2), jnp.float32), mesh_of(2, 2))
    whole = run.run(run.batch([tokens], [0], pad_to=96))
    run.run(run.batch([tokens[:50]], [0], pad_to=96))
    rest = run.run(run.batch([tokens[50:]], [50], pad_to=96))
    assert np.isfinite(whole).all()
    np.testing.assert_allclose(rest[:40], whole[50:90], atol=2e-4)
