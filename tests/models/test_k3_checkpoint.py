"""A checkpoint of K3 as published: experts unpacked exactly, padded A_log, no vision parts, clear refusals."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hybrid_kv.errors import UserError
from hybrid_kv.models.checkpoint_io import load, load_config
from hybrid_kv.models.make_tiny import main, make_tiny
from hybrid_kv.models.parameters import inventory
from pallas_kernels.experts.mxfp4 import unpack_host
from tests.models.harness import mesh_of

LAYER = "language_model.model.layers.2."
EXPERT = LAYER + "block_sparse_moe.experts.5.w2"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("k3")
    make_tiny(path, "tiny-k3", seed=3)
    return path


@pytest.fixture
def changed(written, tmp_path):
    """The same checkpoint after a change of its tensors."""

    def change(**tensors: np.ndarray):
        (tmp_path / "config.json").write_text((written / "config.json").read_text())
        stored = load_file(written / "model.safetensors") | {name.replace("__", "."): x for name, x in tensors.items()}
        save_file({name: x for name, x in stored.items() if x is not None}, tmp_path / "model.safetensors")
        return load(tmp_path, load_config(tmp_path), mesh_of(), jnp.float32)

    return change


def test_every_device_unpacks_the_experts_it_holds_exactly(written):
    config, stored = load_config(written), load_file(written / "model.safetensors")
    whole = load(written, config, mesh_of(), jnp.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        split = load(written, config, mesh_of(2, 4), dtype)
        assert split["moe.expert_down"].dtype == dtype
        assert split["moe.expert_down"].addressable_shards[0].data.shape == (6, 2, 32, 32)
        for path in ("moe.expert_gate", "moe.expert_up", "moe.expert_down"):
            np.testing.assert_array_equal(split[path].astype(jnp.float32), whole[path])
    want = unpack_host(stored[EXPERT + ".weight_packed"], stored[EXPERT + ".weight_scale"])
    np.testing.assert_array_equal(whole["moe.expert_down"][1, 5], want)
    assert len(np.unique(np.abs(want))) > 8
    for path, entry in inventory(config).items():
        assert whole[path].shape == entry.shape


def test_a_log_loses_the_zeros_behind_its_heads(written):
    stored = load_file(written / "model.safetensors")[LAYER + "self_attn.A_log"]
    assert stored.shape == (11,) and not stored[8:].any()
    np.testing.assert_array_equal(load(written, load_config(written), mesh_of(2, 2))["kda.a_log"][2], stored[:8])


def test_vision_tensors_are_passed_over_and_others_are_not(changed):
    image = np.zeros((2, 3), np.float32)
    changed(vision_tower__encoder__x=image, mm_projector__proj__0__weight=image)
    with pytest.raises(UserError, match=r"extra: \['audio_tower.x', 'language_model.vision_tower.x'\]"):
        changed(audio_tower__x=image, language_model__vision_tower__x=image)


@pytest.mark.parametrize(
    ("ending", "tensor", "match"),
    [
        (".weight_packed", np.zeros((32, 16), np.int8), "must be bytes, U8"),
        (".weight_scale", np.zeros((32, 1), np.float32), "must be bytes, U8"),
        (".weight_packed", np.zeros((32, 32), np.uint8), r"shape \[32, 16\]"),
        (".weight_scale", None, "missing"),
        (".weight", np.zeros((32, 32), np.float32), "extra"),
    ],
)
def test_other_forms_of_an_expert_are_refused_by_name(changed, ending, tensor, match):
    with pytest.raises(UserError, match=match) as error:
        changed(**{EXPERT + ending: tensor})
    assert EXPERT + ending in str(error.value)


def test_bytes_are_no_weights_elsewhere(changed):
    with pytest.raises(UserError, match="floating point"):
        changed(**{LAYER + "self_attn.o_norm.weight": np.zeros(16, np.uint8)})


def test_a_seed_makes_the_same_files_again(written, tmp_path, capsys):
    assert main([str(tmp_path / "again"), "--seed", "3"]) == 0
    assert "tiny-k3, seed 3, 7 layers, 760 tensors" in capsys.readouterr().out
    again = tmp_path / "again"
    assert (again / "model.safetensors").read_bytes() == (written / "model.safetensors").read_bytes()
    assert json.loads((again / "config.json").read_text())["model_type"] == "kimi_k3"
    make_tiny(tmp_path / "other", "tiny-k3", seed=4, shards=2)
    one, two = load_file(again / "model.safetensors"), {}
    for file in (tmp_path / "other").glob("*.safetensors"):
        two |= load_file(file)
    assert one.keys() == two.keys() and any((one[name] != two[name]).any() for name in one)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(["--model", "kimi-k3"], "model"), (["--seed", "-1"], "seed"), (["--shards", "0"], "shards")],
)
def test_what_cannot_be_made_exits_with_2_and_the_field(tmp_path, capsys, arguments, field):
    assert main([str(tmp_path / "x"), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {field}: got ")
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 2
    assert "path" in capsys.readouterr().err
