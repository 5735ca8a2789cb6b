"""The parameters of the Kimi models as one table: path, shape, dtype, split over the mesh, source.

Everything else derives from it: what the loader reads, what the modules hold, which shardings the
runtime uses. Linear weights keep the checkpoint's [out, in]; parameters of one kind of layer are stacked
on a leading axis in layer order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hybrid_kv.errors import UserError
from hybrid_kv.models.axes import DCP, MODEL, TENSOR, PartitionSpec
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.sources import Experts, HeadPacked, HeadVector, PackedExperts, Shape, Source, Stack, Whole
from pallas_kernels.experts.packed import scale_rows

FP32 = "float32"


@dataclass(frozen=True)
class Parameter:
    """One entry of the table.

    Attributes:
      shape: global shape.
      spec: mesh axes that split each axis.
      source: where its values are in a checkpoint.
      dtype: of its own, whatever the model's: fp32 for gates, convolution and router, int32 for packed words.
    """

    shape: Shape
    spec: PartitionSpec
    source: Source
    dtype: str | None = None


class PartitionSpecs(NamedTuple):
    """Splits by our parameter path, and by checkpoint tensor name (in the tensor's own axes)."""

    parameters: Mapping[str, PartitionSpec]
    checkpoint: Mapping[str, PartitionSpec]


def inventory(config: KimiLinearConfig) -> dict[str, Parameter]:
    """All parameters by path, such as "embed" or "kda.qkv"."""
    d, vocab, prefix = config.hidden_size, config.vocab_size, config.tensor_prefix
    table = {
        "embed": Parameter((vocab, d), PartitionSpec(TENSOR), Whole(f"{prefix}model.embed_tokens.weight", (vocab, d))),
        "head": Parameter((vocab, d), PartitionSpec(TENSOR), Whole(f"{prefix}lm_head.weight", (vocab, d))),
        "norm": Parameter((d,), PartitionSpec(), Whole(f"{prefix}model.norm.weight", (d,))),
    }
    table |= _linear(config, "", tuple(range(config.layers)), "", {
        "mixer_norm": ("input_layernorm", (d,), None),
        "ffn_norm": ("post_attention_layernorm", (d,), None),
    })  # fmt: skip
    return table | _residual(config) | _kda(config) | _mla(config) | _dense(config) | _moe(config)


def _name(config: KimiLinearConfig, layer: int | str, rest: str) -> str:
    return f"{config.tensor_prefix}model.layers.{layer}.{rest}"


# path -> (tensor, shape, axis that is split)
_Entries = dict[str, tuple[str, Shape, int | None]]


def _linear(
    config: KimiLinearConfig,
    prefix: str,
    layers: tuple[int, ...],
    module: str,
    entries: _Entries,
    over: tuple[str, ...] = TENSOR,
) -> dict[str, Parameter]:
    """Plain `.weight` tensors stacked over `layers`, split over the mesh axes `over`."""
    table = {}
    for path, (tensor, shape, split) in entries.items():
        spec = PartitionSpec(*((over or None) if axis - 1 == split else None for axis in range(len(shape) + 1)))
        parts = tuple(Whole(_name(config, i, f"{module}{tensor}.weight"), shape) for i in layers)
        if layers:
            table[prefix + path] = Parameter((len(layers), *shape), spec, Stack(parts))
    return table


def _residual(config: KimiLinearConfig) -> dict[str, Parameter]:
    """Norm and single-row projection of every site of the attention residual."""
    if not config.residual_block:
        return {}
    d, model = config.hidden_size, f"{config.tensor_prefix}model."
    return _linear(config, "residual.", tuple(range(config.layers)), "", {
        "mixer_norm": ("self_attention_res_norm", (d,), None),
        "mixer_proj": ("self_attention_res_proj", (1, d), None),
        "ffn_norm": ("mlp_res_norm", (d,), None),
        "ffn_proj": ("mlp_res_proj", (1, d), None),
    }) | {
        "residual.head_norm": Parameter((d,), PartitionSpec(), Whole(f"{model}output_attn_res_norm.weight", (d,))),
        "residual.head_proj": Parameter((1, d), PartitionSpec(), Whole(f"{model}output_attn_res_proj.weight", (1, d))),
    }  # fmt: skip


def _kda(config: KimiLinearConfig) -> dict[str, Parameter]:
    layers, d = config.kda_layers, config.hidden_size
    heads, width, taps = config.kda_heads, config.kda_head_dim, config.conv_width
    wide, n = heads * width, len(config.kda_layers)
    if not layers:
        return {}

    def packed(kind: str, shape: Shape) -> Stack:
        def name(layer: int, x: str) -> str:
            return _name(config, layer, f"self_attn.{x}_{kind}.weight")

        return Stack(tuple(HeadPacked((name(i, "q"), name(i, "k"), name(i, "v")), shape, width) for i in layers))

    def vectors(rest: str, shape: Shape) -> Stack:
        return Stack(tuple(Whole(_name(config, i, rest), shape) for i in layers))

    by_head = PartitionSpec(None, config.kda_axes or None)
    a_log = Stack(tuple(HeadVector(_name(config, i, "self_attn.A_log"), heads) for i in layers))
    low_rank: _Entries = {"g_a": ("g_a_proj", (width, d), None), "g_b": ("g_b_proj", (wide, width), 0)}
    full_rank: _Entries = {"g": ("g_proj", (wide, d), 0)}
    return {
        "kda.qkv": Parameter((n, 3 * wide, d), by_head, packed("proj", (wide, d))),
        "kda.conv": Parameter((n, 3 * wide, taps), by_head, packed("conv1d", (wide, 1, taps)), FP32),
        "kda.a_log": Parameter((n, heads), by_head, a_log, FP32),
        "kda.dt_bias": Parameter((n, wide), by_head, vectors("self_attn.dt_bias", (wide,)), FP32),
        "kda.o_norm": Parameter((n, width), PartitionSpec(), vectors("self_attn.o_norm.weight", (width,)), FP32),
    } | _linear(config, "kda.", layers, "self_attn.", {
        "f_a": ("f_a_proj", (width, d), None),
        "f_b": ("f_b_proj", (wide, width), 0),
        "beta": ("b_proj", (heads, d), 0),
        "out": ("o_proj", (d, wide), 1),
        **(full_rank if config.full_rank_gate else low_rank),
    }, config.kda_axes)  # fmt: skip


def _mla(config: KimiLinearConfig) -> dict[str, Parameter]:
    d, heads, latent, rank = config.hidden_size, config.mla_heads, config.latent_width, config.query_rank
    nope, value = config.nope_width, config.value_width
    queries = heads * (nope + config.rope_width)
    low_rank: _Entries = {
        "q_a": ("q_a_proj", (rank, d), None),
        "q_a_norm": ("q_a_layernorm", (rank,), None),
        "q_b": ("q_b_proj", (queries, rank), 0),
    }
    gate: _Entries = {"gate": ("g_proj", (heads * value, d), 0)}
    return _linear(config, "mla.", config.mla_layers, "self_attn.", {
        **(low_rank if rank else {"q": ("q_proj", (queries, d), 0)}),
        "kv_a": ("kv_a_proj_with_mqa", (config.cache_width, d), None),
        "kv_a_norm": ("kv_a_layernorm", (latent,), None),
        "kv_b": ("kv_b_proj", (heads * (nope + value), latent), 0),
        **(gate if config.mla_output_gate else {}),
        "out": ("o_proj", (d, heads * value), 1),
    })  # fmt: skip


def _dense(config: KimiLinearConfig) -> dict[str, Parameter]:
    return _linear(config, "dense.", config.dense_layers, "mlp.", _gated("", config.hidden_size, config.dense_width))


def _gated(prefix: str, d: int, width: int) -> _Entries:
    return {
        prefix + "gate": ("gate_proj", (width, d), 0),
        prefix + "up": ("up_proj", (width, d), 0),
        prefix + "down": ("down_proj", (d, width), 1),
    }


def _moe(config: KimiLinearConfig) -> dict[str, Parameter]:
    layers, d, count = config.moe_layers, config.hidden_size, config.experts
    n, width, routed = len(layers), config.expert_width, config.expert_input_width
    if not layers:
        return {}

    def experts(path: str, tensor: str, shape: tuple[int, int]) -> dict[str, Parameter]:
        name = _name(config, "{layer}", f"block_sparse_moe.experts.{{expert}}.{tensor}")
        source = Experts(name, layers, count, shape, config.packed_experts)
        spec = PartitionSpec(None, config.expert_axes)
        if config.expert_form == "plain":
            return {path: Parameter((n, count, *shape), spec, source)}
        native = config.expert_form == "native"
        outputs, inputs = shape
        parts = {"codes": (inputs // 8, "int32"), "scales": (scale_rows(inputs), "int32"), "factors": (1, FP32)}
        return {
            f"{path}_{part}": Parameter(
                (n, count, height, outputs), spec, PackedExperts(source, part, tensor != "w2", native), dtype
            )
            for part, (height, dtype) in parts.items()
        }

    gate = "block_sparse_moe.gate."
    router = Stack(tuple(Whole(_name(config, i, gate + "weight"), (count, d)) for i in layers))
    bias = Stack(tuple(Whole(_name(config, i, gate + "e_score_correction_bias"), (count,)) for i in layers))
    latent: _Entries = {
        "latent_down": ("routed_expert_down_proj", (routed, d), 0),
        "latent_up": ("routed_expert_up_proj", (d, routed), 1),
        **({"latent_norm": ("routed_expert_norm", (routed,), 0)} if config.latent_norm else {}),
    }
    shared = _gated("shared_", d, config.shared_experts * width)
    return {
        "moe.router": Parameter((n, count, d), PartitionSpec(), router, FP32),
        "moe.bias": Parameter((n, count), PartitionSpec(), bias, FP32),
        **experts("moe.expert_gate", "w1", (width, routed)),
        **experts("moe.expert_up", "w3", (width, routed)),
        **experts("moe.expert_down", "w2", (routed, width)),
    } | _linear(config, "moe.", layers, "block_sparse_moe.shared_experts.", shared) | _linear(
        config, "moe.", layers, "block_sparse_moe.", latent if config.routed_width else {}
    )  # fmt: skip


def partition_specs(config: KimiLinearConfig) -> PartitionSpecs:
    """How every parameter is split, as data."""
    table = inventory(config)
    checkpoint = {}
    for path, entry in table.items():
        for name, shape in entry.source.tensors().items():
            # Stacking axes (layers, experts) are not axes of a tensor; an expert lives whole on its rank.
            stacked = len(entry.shape) - len(shape) if path != "kda.conv" else 1
            checkpoint[name] = PartitionSpec(*entry.spec[stacked:])
    return PartitionSpecs({path: entry.spec for path, entry in table.items()}, checkpoint)


def check_mesh(config: KimiLinearConfig, mesh_shape: Mapping[str, int]) -> None:
    """Refuse a mesh whose tensor group does not divide the heads of MLA, vocabulary or widths, whose `kda_axes` do not
    divide the heads of KDA, or whose `expert_axes` the experts.

    Raises:
      UserError: an axis is missing, or a size is not divisible by the devices that share it.
    """
    for axis in {*TENSOR, *config.expert_axes}:
        if axis not in mesh_shape:
            raise UserError("mesh", dict(mesh_shape), f"name its axes data, {MODEL} and {DCP}")
    # (size, axes that split it, what else there is to do than to choose a smaller mesh)
    sizes = {
        "linear_attn_config.num_heads": (config.kda_heads, config.kda_axes, ", or spread KDA over fewer axes"),
        "num_attention_heads": (config.mla_heads, TENSOR, ""),
        "vocab_size": (config.vocab_size, TENSOR, ""),
        "routed_expert_hidden_size": (config.routed_width, TENSOR, ""),
        "intermediate_size": (config.dense_width, TENSOR, ""),
        "moe_intermediate_size * num_shared_experts": (config.expert_width * config.shared_experts, TENSOR, ""),
        "num_experts": (config.experts, config.expert_axes, ""),
    }
    for field, (size, axes, otherwise) in sizes.items():
        ranks = math.prod(mesh_shape[axis] for axis in axes)
        if size % ranks:
            fix = f"must be a multiple of {' * '.join(axes)} = {ranks}; choose a smaller mesh{otherwise}"
            raise UserError(field, size, fix)
