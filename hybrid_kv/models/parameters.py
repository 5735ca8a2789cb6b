"""The parameters of Kimi Linear as one table: path, shape, dtype, split over the mesh, source.

Everything else derives from it: what the loader reads, what the modules hold, which shardings the
runtime uses. Linear weights keep the checkpoint's [out, in]; parameters of one kind of layer are stacked
on a leading axis in layer order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hybrid_kv.errors import UserError
from hybrid_kv.models.axes import DCP, MODEL, TENSOR, PartitionSpec
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.sources import HeadPacked, HeadVector, Shape, Source, Stack, Whole


@dataclass(frozen=True)
class Parameter:
    """One entry of the table.

    Attributes:
      shape: global shape.
      spec: mesh axes that split each axis.
      source: where its values are in a checkpoint.
      full_precision: kept in fp32 whatever the model's dtype (gates, convolution, router).
    """

    shape: Shape
    spec: PartitionSpec
    source: Source
    full_precision: bool = False


class PartitionSpecs(NamedTuple):
    """Splits by our parameter path, and by checkpoint tensor name (in the tensor's own axes)."""

    parameters: Mapping[str, PartitionSpec]
    checkpoint: Mapping[str, PartitionSpec]


def inventory(config: KimiLinearConfig) -> dict[str, Parameter]:
    """All parameters by path, such as "embed" or "kda.qkv"."""
    d, vocab = config.hidden_size, config.vocab_size
    table = {
        "embed": Parameter((vocab, d), PartitionSpec(TENSOR), Whole("model.embed_tokens.weight", (vocab, d))),
        "head": Parameter((vocab, d), PartitionSpec(TENSOR), Whole("lm_head.weight", (vocab, d))),
        "norm": Parameter((d,), PartitionSpec(), Whole("model.norm.weight", (d,))),
    }
    every = tuple(range(config.layers))
    table |= _linear("", every, "", {
        "mixer_norm": ("input_layernorm", (d,), None),
        "ffn_norm": ("post_attention_layernorm", (d,), None),
    })  # fmt: skip
    return table | _kda(config) | _mla(config) | _dense(config) | _moe(config)


def _name(layer: int, rest: str) -> str:
    return f"model.layers.{layer}.{rest}"


def _linear(
    prefix: str, layers: tuple[int, ...], module: str, entries: Mapping[str, tuple[str, Shape, int | None]]
) -> dict[str, Parameter]:
    """Plain `.weight` tensors stacked over `layers`: path -> (tensor, shape, axis split by tensor group)."""
    table = {}
    for path, (tensor, shape, split) in entries.items():
        spec = PartitionSpec(*(TENSOR if axis - 1 == split else None for axis in range(len(shape) + 1)))
        parts = tuple(Whole(_name(i, f"{module}{tensor}.weight"), shape) for i in layers)
        if layers:
            table[prefix + path] = Parameter((len(layers), *shape), spec, Stack(parts))
    return table


def _kda(config: KimiLinearConfig) -> dict[str, Parameter]:
    layers, d = config.kda_layers, config.hidden_size
    heads, width, taps = config.kda_heads, config.kda_head_dim, config.conv_width
    wide, n = heads * width, len(config.kda_layers)
    if not layers:
        return {}

    def packed(kind: str, shape: Shape) -> Stack:
        def name(layer: int, x: str) -> str:
            return _name(layer, f"self_attn.{x}_{kind}.weight")

        return Stack(tuple(HeadPacked((name(i, "q"), name(i, "k"), name(i, "v")), shape, width) for i in layers))

    by_head = PartitionSpec(None, TENSOR)
    a_log = Stack(tuple(HeadVector(_name(i, "self_attn.A_log"), heads) for i in layers))
    dt_bias = Stack(tuple(Whole(_name(i, "self_attn.dt_bias"), (wide,)) for i in layers))
    return {
        "kda.qkv": Parameter((n, 3 * wide, d), by_head, packed("proj", (wide, d))),
        "kda.conv": Parameter((n, 3 * wide, taps), by_head, packed("conv1d", (wide, 1, taps)), True),
        "kda.a_log": Parameter((n, heads), by_head, a_log, True),
        "kda.dt_bias": Parameter((n, wide), by_head, dt_bias, True),
    } | _linear("kda.", layers, "self_attn.", {
        "f_a": ("f_a_proj", (width, d), None),
        "f_b": ("f_b_proj", (wide, width), 0),
        "g_a": ("g_a_proj", (width, d), None),
        "g_b": ("g_b_proj", (wide, width), 0),
        "beta": ("b_proj", (heads, d), 0),
        "o_norm": ("o_norm", (width,), None),
        "out": ("o_proj", (d, wide), 1),
    })  # fmt: skip


def _mla(config: KimiLinearConfig) -> dict[str, Parameter]:
    d, heads, latent = config.hidden_size, config.mla_heads, config.latent_width
    nope, value = config.nope_width, config.value_width
    return _linear("mla.", config.mla_layers, "self_attn.", {
        "q": ("q_proj", (heads * (nope + config.rope_width), d), 0),
        "kv_a": ("kv_a_proj_with_mqa", (config.cache_width, d), None),
        "kv_a_norm": ("kv_a_layernorm", (latent,), None),
        "kv_b": ("kv_b_proj", (heads * (nope + value), latent), 0),
        "out": ("o_proj", (d, heads * value), 1),
    })  # fmt: skip


def _dense(config: KimiLinearConfig) -> dict[str, Parameter]:
    return _linear("dense.", config.dense_layers, "mlp.", _gated("", config.hidden_size, config.dense_width))


def _gated(prefix: str, d: int, width: int) -> dict[str, tuple[str, Shape, int | None]]:
    return {
        prefix + "gate": ("gate_proj", (width, d), 0),
        prefix + "up": ("up_proj", (width, d), 0),
        prefix + "down": ("down_proj", (d, width), 1),
    }


def _moe(config: KimiLinearConfig) -> dict[str, Parameter]:
    layers, d, count = config.moe_layers, config.hidden_size, config.experts
    n, width = len(layers), config.expert_width
    if not layers:
        return {}

    def experts(tensor: str, shape: Shape) -> Parameter:
        each = tuple(
            Stack(tuple(Whole(_name(i, f"block_sparse_moe.experts.{e}.{tensor}.weight"), shape) for e in range(count)))
            for i in layers
        )
        return Parameter((n, count, *shape), PartitionSpec(None, TENSOR), Stack(each))

    gate = "block_sparse_moe.gate."
    router = Stack(tuple(Whole(_name(i, gate + "weight"), (count, d)) for i in layers))
    bias = Stack(tuple(Whole(_name(i, gate + "e_score_correction_bias"), (count,)) for i in layers))
    shared = _gated("shared_", d, config.shared_experts * width)
    return {
        "moe.router": Parameter((n, count, d), PartitionSpec(), router, True),
        "moe.bias": Parameter((n, count), PartitionSpec(), bias, True),
        "moe.expert_gate": experts("w1", (width, d)),
        "moe.expert_up": experts("w3", (width, d)),
        "moe.expert_down": experts("w2", (d, width)),
    } | _linear("moe.", layers, "block_sparse_moe.shared_experts.", shared)


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
    """Refuse a mesh whose tensor group does not divide the heads, experts, vocabulary or widths.

    Raises:
      UserError: an axis is missing, or a size is not divisible by model * dcp.
    """
    for axis in TENSOR:
        if axis not in mesh_shape:
            raise UserError("mesh", dict(mesh_shape), f"name its axes data, {MODEL} and {DCP}")
    ranks = mesh_shape[MODEL] * mesh_shape[DCP]
    sizes = {
        "linear_attn_config.num_heads": config.kda_heads,
        "num_attention_heads": config.mla_heads,
        "vocab_size": config.vocab_size,
        "num_experts": config.experts,
        "intermediate_size": config.dense_width,
        "moe_intermediate_size * num_shared_experts": config.expert_width * config.shared_experts,
    }
    for field, size in sizes.items():
        if size % ranks:
            raise UserError(field, size, f"must be a multiple of model * dcp = {ranks}; choose a smaller mesh")
