"""The table of the published models: every tensor name of their files, their sizes, and how fast it is made."""

import json
import math
import time
from collections import Counter

import jax
import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.models.checkpoint_io import load
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.parameters import check_mesh, inventory, partition_specs
from hybrid_kv.models.published import named
from hybrid_kv.planning.published import kimi_k3, kimi_linear
from hybrid_kv.runtime.describe import cache_shape
from tests.models.harness import mesh_of

NORMS = {"input_layernorm", "post_attention_layernorm"}
SITES = {"self_attention_res_norm", "self_attention_res_proj", "mlp_res_norm", "mlp_res_proj"}
KDA = {"q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "f_a_proj", "f_b_proj", "b_proj", "o_norm",
       "o_proj"}  # fmt: skip
MLA = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
GATED = {"gate_proj", "up_proj", "down_proj"}


def config_of(name: str) -> KimiLinearConfig:
    return KimiLinearConfig.from_dict(named(name))


def shapes(config: KimiLinearConfig) -> dict[str, tuple[int, ...]]:
    return {name: shape for entry in inventory(config).values() for name, shape in entry.source.tensors().items()}


def expected(layers: int, mla: set[int], experts: int, k3: bool) -> set[str]:
    """Names as the files have them; layers from zero."""
    prefix = "language_model." if k3 else ""
    top = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    if k3:
        top |= {"model.output_attn_res_norm.weight", "model.output_attn_res_proj.weight"}
    names = {prefix + name for name in top}
    for i in range(layers):
        inside = {f"{x}.weight" for x in NORMS | (SITES if k3 else set())}
        if i in mla:
            own = MLA | ({"q_a_proj", "q_a_layernorm", "q_b_proj", "g_proj"} if k3 else {"q_proj"})
        else:
            own = KDA | ({"g_proj"} if k3 else {"g_a_proj", "g_b_proj"})
            inside |= {"self_attn.A_log", "self_attn.dt_bias"}
        inside |= {f"self_attn.{x}.weight" for x in own}
        if i == 0:
            inside |= {f"mlp.{x}.weight" for x in GATED}
        else:
            moe = {"gate.weight", "gate.e_score_correction_bias"} | {f"shared_experts.{x}.weight" for x in GATED}
            if k3:
                moe |= {f"routed_expert_{x}.weight" for x in ("down_proj", "norm", "up_proj")}
            endings = ("weight_packed", "weight_scale") if k3 else ("weight",)
            moe |= {f"experts.{e}.{w}.{end}" for e in range(experts) for w in ("w1", "w2", "w3") for end in endings}
            inside |= {f"block_sparse_moe.{x}" for x in moe}
        names |= {f"{prefix}model.layers.{i}.{x}" for x in inside}
    return names


def test_names_of_k3_are_those_of_its_text_files_and_are_made_in_seconds():
    begin = time.perf_counter()
    stored = shapes(config_of("kimi-k3"))
    assert time.perf_counter() - begin < 20  # about one second on an idle machine
    assert len(stored) == 497_052
    assert stored.keys() == expected(93, {*range(3, 92, 4), 92}, 896, k3=True)
    expert = {n: s for n, s in stored.items() if ".layers.5.block_sparse_moe.experts.700." in n}
    assert sum(math.prod(shape) for shape in expert.values()) == 17_547_264
    moe = "language_model.model.layers.92.block_sparse_moe."
    assert stored[f"{moe}experts.895.w2.weight_packed"] == (3584, 1536)
    assert stored[f"{moe}experts.0.w1.weight_scale"] == (3072, 112)
    assert stored[f"{moe}shared_experts.gate_proj.weight"] == (6144, 7168)
    assert stored["language_model.model.layers.92.self_attn.q_b_proj.weight"] == (18432, 1536)
    assert stored["language_model.model.layers.0.self_attn.g_proj.weight"] == (12288, 7168)
    assert stored["language_model.model.output_attn_res_proj.weight"] == (1, 7168)


def test_names_of_kimi_linear_are_those_of_its_files():
    stored = shapes(config_of("kimi-linear-48b"))
    assert stored.keys() == expected(27, {3, 7, 11, 15, 19, 23, 26}, 256, k3=False)


@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3"])
def test_every_tensor_belongs_to_one_parameter(name):
    counts = Counter(tensor for entry in inventory(config_of(name)).values() for tensor in entry.source.tensors())
    assert set(counts.values()) == {1}


class Accepted(Exception):
    """The loader has checked all tensors and is about to read the first."""


@pytest.mark.parametrize(
    ("name", "mla", "files"), [
        ("kimi-linear-48b", {3, 7, 11, 15, 19, 23, 26}, 20), ("kimi-k3", {*range(3, 92, 4), 92}, 96),
    ],
)  # fmt: skip
def test_the_loader_accepts_files_of_the_published_inventory(tmp_path, name, mla, files):
    """Headers as published over files that are nothing but holes: every name, shape, type and offset is checked."""
    config = config_of(name)
    stored = shapes(config)
    names = sorted(expected(config.layers, mla, config.experts, k3=name == "kimi-k3"))
    weight_map = {}
    for number in range(files):
        file, header, end = f"model-{number:05}.safetensors", {}, 0
        for tensor in names[number::files]:
            packed = tensor.endswith(("weight_packed", "weight_scale"))
            begin, end = end, end + math.prod(stored[tensor]) * (1 if packed else 2)
            header[tensor] = {
                "dtype": "U8" if packed else "BF16", "shape": stored[tensor], "data_offsets": [begin, end],
            }  # fmt: skip
        text = json.dumps(header).encode()
        with (tmp_path / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
        weight_map |= dict.fromkeys(header, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def accept(done: int, total: int) -> None:
        assert done == 0 and total > 2 * sum(math.prod(entry.shape) for entry in inventory(config).values())
        raise Accepted

    with pytest.raises(Accepted):
        load(tmp_path, config, mesh_of(2, 4), progress=accept)


@pytest.mark.parametrize(
    ("name", "billions", "outside_experts"), [("kimi-linear-48b", 49.12, None), ("kimi-k3", 2779.5, 56.74)]
)
def test_parameters_add_up_to_the_published_size(name, billions, outside_experts):
    table = inventory(config_of(name))
    sizes = {path: math.prod(entry.shape) for path, entry in table.items()}
    assert round(sum(sizes.values()) / 1e9, 2 if billions < 100 else 1) == billions
    if outside_experts:
        outside = sum(size for path, size in sizes.items() if not path.startswith("moe.expert_"))
        assert round(outside / 1e9, 2) == outside_experts


@pytest.mark.parametrize(("name", "layers"), [("kimi-linear-48b", kimi_linear), ("kimi-k3", kimi_k3)])
def test_the_planner_knows_the_same_cache_layers(name, layers):
    assert sorted(cache_shape(config_of(name), "bfloat16").layers(), key=lambda layer: layer.index) == list(layers())


def test_k3_divides_over_32_devices_and_its_experts_over_more():
    config = config_of("kimi-k3")
    check_mesh(config, {"data": 1, "model": 8, "dcp": 4})
    with pytest.raises(UserError, match="num_heads"):
        check_mesh(config, {"data": 1, "model": 16, "dcp": 4})


def test_packed_tensors_lie_whole_on_the_rank_of_their_expert():
    specs = partition_specs(config_of("tiny-k3"))
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight_packed"
    assert specs.checkpoint[name] == jax.P()
    assert specs.parameters["moe.expert_gate"] == jax.P(None, ("model", "dcp"))
