"""Configuration of the Kimi family (Kimi Linear and the text model of Kimi K3), read and checked field by field."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybrid_kv.errors import UserError
from hybrid_kv.models.axes import DATA, MODEL, TENSOR
from hybrid_kv.models.fields import boolean, given, integer, integers, number, refusal
from hybrid_kv.models.quantization import packed_experts
from hybrid_kv.models.wrapper import Text, inside_text, text_of

# Values that the forward pass does not honour if they are anything else. A field that is absent
# passes: both the published and the transformers-saved configuration leave some of these out.
_ONLY = {
    "model_type": ("kimi_linear",),
    "hidden_act": ("silu", "situ"),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": (None, "noaux_tc"),
    "mla_use_nope": (True,),
    "rope_scaling": (None,),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "num_nextn_predict_layers": (None, 0),
}

_LINEAR = "linear_attn_config."
EXPERT_FORMS = ("plain", "packed", "native")
EXPERT_SPREADS = {"tensor": TENSOR, "mesh": (DATA, *TENSOR)}
KDA_SPREADS: dict[str, tuple[str, ...]] = {"tensor": TENSOR, "model": (MODEL,), "replicated": ()}
_GROUP = 32  # columns of a packed weight that share a scale


def experts_over(devices: str) -> tuple[str, ...]:
    """The `expert_axes` for experts over the "tensor" group, or over the whole "mesh". Raises UserError otherwise."""
    if devices not in EXPERT_SPREADS:
        raise UserError("experts", devices, f"use one of {', '.join(EXPERT_SPREADS)}")
    return EXPERT_SPREADS[devices]


def kda_over(devices: str) -> tuple[str, ...]:
    """The `kda_axes` for KDA heads over the "tensor" group, over "model" alone, or "replicated" on all devices of the
    group. Raises UserError otherwise."""
    if devices not in KDA_SPREADS:
        raise UserError("kda", devices, f"use one of {', '.join(KDA_SPREADS)}")
    return KDA_SPREADS[devices]


@dataclass(frozen=True)
class KimiLinearConfig:
    """Shapes and constants of a Kimi Linear or Kimi K3 text model. Widths are values per token or per head.

    Fields with a default are where the two differ, and the default is Kimi Linear's.

    Attributes:
      layer_kinds: "kda" or "mla" for each layer, from the two lists of the configuration.
      ffn_kinds: "dense" or "moe" for each layer.
      gate_lower_bound: None for the softplus gate of KDA, else the bound of the sigmoid gate.
      full_rank_gate: the output gate of KDA is one matrix, not two through a bottleneck.
      query_rank: width of the normed bottleneck of MLA queries; 0 for one matrix.
      mla_output_gate: outputs of MLA are gated by a sigmoid of the layer's input.
      situ_beta, situ_linear_beta: bounds of the SiTU activation; None is SiLU, and no bound of the linear factor.
      routed_width: width routed experts work in, between a projection down and one up; 0 for the hidden size.
      latent_norm: norm of their sum before the projection up.
      residual_block: layers of a block of the attention residual; 0 for the plain residual stream.
      packed_experts: routed experts are stored in MXFP4.
      mla_lora_norm_eps: eps of the norms of latents and of bottlenecks of queries, not that of the other norms.
      biased_expert_weights: take expert weights from the biased scores; off everywhere it matters.
      context_length: most tokens of a sequence the model was made for.
      media_tokens: (field, token id) of tokens that stand for media, which a text model refuses.
      tensor_prefix: what checkpoint names begin with.
      expert_axes: mesh axes that split the routed experts: the tensor group, or the data axis before it. A choice of
        whoever runs the model, not of its configuration.
      kda_axes: mesh axes that split the heads of KDA, and with them its weights, states and histories: the tensor
        group, "model" alone, or none. As free a choice.
      expert_form: how routed experts lie on the device: "plain" as numbers of the model's dtype, "packed" in MXFP4
        words for the TPU kernel, "native" in those for tpu7x. As free a choice.
    """

    vocab_size: int
    hidden_size: int
    dense_width: int
    layer_kinds: tuple[str, ...]
    ffn_kinds: tuple[str, ...]
    kda_heads: int
    kda_head_dim: int
    conv_width: int
    mla_heads: int
    latent_width: int
    nope_width: int
    rope_width: int
    value_width: int
    experts: int
    experts_per_token: int
    shared_experts: int
    expert_width: int
    expert_groups: int
    expert_groups_kept: int
    renormalize: bool
    routed_scaling_factor: float
    rms_norm_eps: float = 1e-5
    mla_lora_norm_eps: float = 1e-6
    gate_lower_bound: float | None = None
    biased_expert_weights: bool = False
    context_length: int = 1_048_576
    eos_token_ids: tuple[int, ...] = ()
    full_rank_gate: bool = False
    query_rank: int = 0
    mla_output_gate: bool = False
    situ_beta: float | None = None
    situ_linear_beta: float | None = None
    routed_width: int = 0
    latent_norm: bool = False
    residual_block: int = 0
    packed_experts: bool = False
    media_tokens: tuple[tuple[str, int], ...] = ()
    tensor_prefix: str = ""
    expert_axes: tuple[str, ...] = TENSOR
    kda_axes: tuple[str, ...] = TENSOR
    expert_form: str = "plain"

    def __post_init__(self) -> None:
        if len(self.layer_kinds) != len(self.ffn_kinds) or not self.layer_kinds:
            raise UserError("layer_kinds", self.layer_kinds, "give as many mixers as feed-forward kinds, at least one")
        for name in ("vocab_size", "hidden_size", "kda_heads", "kda_head_dim", "mla_heads", "latent_width",
                     "nope_width", "rope_width", "value_width", "experts", "experts_per_token", "shared_experts",
                     "expert_width", "dense_width"):  # fmt: skip
            if getattr(self, name) < 1:
                raise UserError(name, getattr(self, name), "must be at least 1")
        if self.conv_width < 2:
            raise UserError("short_conv_kernel_size", self.conv_width, "must be at least 2")
        if self.experts % self.expert_groups:
            raise UserError("num_expert_group", self.expert_groups, f"must divide num_experts = {self.experts}")
        if not 1 <= self.expert_groups_kept <= self.expert_groups:
            raise UserError("topk_group", self.expert_groups_kept, f"must be in 1..{self.expert_groups}")
        reachable = self.experts // self.expert_groups * self.expert_groups_kept
        if self.experts_per_token > reachable:
            raise UserError("num_experts_per_token", self.experts_per_token, f"at most {reachable} experts remain")
        if self.gate_lower_bound is not None and not -5.0 <= self.gate_lower_bound < 0.0:
            raise UserError("gate_lower_bound", self.gate_lower_bound, "must be in [-5, 0) or null")
        for name, beta in (
            ("activation_situ_beta", self.situ_beta), ("activation_situ_linear_beta", self.situ_linear_beta),
        ):  # fmt: skip
            if beta is not None and not beta > 0:
                raise UserError(name, beta, "must be more than 0")
        if self.packed_experts:
            for name, width in (
                ("routed_expert_hidden_size" if self.routed_width else "hidden_size", self.expert_input_width),
                ("moe_intermediate_size", self.expert_width),
            ):  # fmt: skip
                if width % _GROUP:
                    raise UserError(name, width, f"packed experts need a multiple of {_GROUP}")
        if self.expert_axes not in EXPERT_SPREADS.values():
            raise UserError("expert_axes", self.expert_axes, f"use {TENSOR} or {(DATA, *TENSOR)}")
        if self.kda_axes not in KDA_SPREADS.values():
            raise UserError("kda_axes", self.kda_axes, f"use one of {', '.join(map(str, KDA_SPREADS.values()))}")
        if self.expert_form not in EXPERT_FORMS:
            raise UserError("expert_form", self.expert_form, f"use one of {', '.join(EXPERT_FORMS)}")
        if self.expert_form != "plain":
            if not self.packed_experts:
                raise UserError("expert_form", self.expert_form, "experts are not stored in MXFP4: use plain")
            for name, width in (("expert_input_width", self.expert_input_width), ("expert_width", self.expert_width)):
                if width % 128:
                    raise UserError(name, width, "packed on the device it must be a multiple of 128: use plain")

    @property
    def layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Zero-based layers whose mixer is KDA, in order; their place in it indexes the state pools."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """Zero-based layers whose mixer is MLA, in order; their place in it indexes the latent pool."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "mla")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.ffn_kinds) if kind == "dense")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.ffn_kinds) if kind == "moe")

    @property
    def cache_width(self) -> int:
        """Values of one MLA cache row: latent, then position key."""
        return self.latent_width + self.rope_width

    @property
    def conv_channels(self) -> int:
        """Channels of the packed convolution, ordered (head, {q, k, v}, channel)."""
        return self.kda_heads * 3 * self.kda_head_dim

    @property
    def softmax_scale(self) -> float:
        return (self.nope_width + self.rope_width) ** -0.5

    @property
    def expert_input_width(self) -> int:
        """Width that routed experts read and write."""
        return self.routed_width or self.hidden_size

    @property
    def residual_blocks(self) -> int:
        """Finished blocks that the last layer leaves in the bank of the attention residual."""
        return -(-self.layers // self.residual_block) if self.residual_block else 0

    @classmethod
    def from_dict(cls, raw: Mapping) -> "KimiLinearConfig":
        """Read a config.json dictionary, published or saved by transformers, with or without a multimodal wrapper.

        Raises:
          UserError: a field is missing, or has a value the model code would not honour.
        """
        text = text_of(raw)
        if text.fields is raw:
            return cls._from_text(text)
        try:
            return cls._from_text(text)
        except UserError as error:
            raise inside_text(error) from None

    @classmethod
    def _from_text(cls, text: Text) -> "KimiLinearConfig":
        raw = text.fields
        for name, allowed in _ONLY.items():
            if name in raw and raw[name] not in allowed:
                raise refusal(name, raw[name], f"this model code runs only {' or '.join(map(repr, allowed))}")
        linear = given(raw, "linear_attn_config")
        if not isinstance(linear, Mapping):
            raise refusal("linear_attn_config", linear, "must be an object with kda_layers and full_attn_layers")
        count = integer(raw, "num_hidden_layers")
        heads = integer(raw, "num_attention_heads")
        groups = integer(raw, "num_key_value_heads", default=heads)
        if groups != heads:
            raise UserError("num_key_value_heads", groups, f"must equal num_attention_heads {heads}")
        return cls(
            vocab_size=integer(raw, "vocab_size"),
            hidden_size=integer(raw, "hidden_size"),
            dense_width=integer(raw, "intermediate_size"),
            layer_kinds=_layer_kinds(raw, linear, count),
            ffn_kinds=_ffn_kinds(raw, count),
            kda_heads=integer(linear, "num_heads", prefix=_LINEAR),
            kda_head_dim=integer(linear, "head_dim", prefix=_LINEAR),
            conv_width=integer(linear, "short_conv_kernel_size", low=2, prefix=_LINEAR),
            mla_heads=heads,
            latent_width=integer(raw, "kv_lora_rank"),
            nope_width=integer(raw, "qk_nope_head_dim"),
            rope_width=integer(raw, "qk_rope_head_dim"),
            value_width=integer(raw, "v_head_dim"),
            experts=integer(raw, "num_experts"),
            experts_per_token=integer(raw, "num_experts_per_token"),
            shared_experts=integer(raw, "num_shared_experts", default=1),
            expert_width=integer(raw, "moe_intermediate_size"),
            # 0 turns grouping off, as null does.
            expert_groups=integer(raw, "num_expert_group", low=0, default=1) or 1,
            expert_groups_kept=integer(raw, "topk_group", low=0, default=1) or 1,
            renormalize=boolean(raw, "moe_renormalize", default=True),
            routed_scaling_factor=number(raw, "routed_scaling_factor", default=1.0),
            rms_norm_eps=number(raw, "rms_norm_eps", low=0.0, default=1e-5),
            mla_lora_norm_eps=number(raw, "mla_lora_norm_eps", low=0.0, default=1e-6),
            gate_lower_bound=_gate_lower_bound(raw, linear),
            context_length=integer(raw, "model_max_length", default=1_048_576),
            eos_token_ids=_eos_token_ids(raw),
            full_rank_gate=_full_rank_gate(raw, linear),
            query_rank=integer(raw, "q_lora_rank", low=0, default=0),
            mla_output_gate=boolean(raw, "mla_use_output_gate", default=False),
            routed_width=integer(raw, "routed_expert_hidden_size", low=0, default=0),
            latent_norm=boolean(raw, "latent_moe_use_norm", default=False),
            residual_block=integer(raw, "attn_res_block_size", low=0, default=0),
            packed_experts=packed_experts(raw),
            media_tokens=text.media_tokens,
            tensor_prefix=text.tensor_prefix,
            situ_beta=number(raw, "activation_situ_beta") if raw.get("hidden_act") == "situ" else None,
            situ_linear_beta=_linear_beta(raw),
        )


def _gate_lower_bound(raw: Mapping, linear: Mapping) -> float | None:
    """None for the softplus gate; the field of the linear attention goes before that of the model."""
    where, prefix = (linear, _LINEAR) if "gate_lower_bound" in linear else (raw, "")
    return None if where.get("gate_lower_bound") is None else number(where, "gate_lower_bound", prefix=prefix)


def _full_rank_gate(raw: Mapping, linear: Mapping) -> bool:
    """As for the bound of the gate."""
    where, prefix = (linear, _LINEAR) if "use_full_rank_gate" in linear else (raw, "")
    return boolean(where, "use_full_rank_gate", default=False, prefix=prefix)


def _linear_beta(raw: Mapping) -> float | None:
    """None for SiLU, and where the linear factor of SiTU has no bound."""
    name = "activation_situ_linear_beta"
    return None if raw.get("hidden_act") != "situ" or raw.get(name) is None else number(raw, name)


def _eos_token_ids(raw: Mapping) -> tuple[int, ...]:
    """One token, a list of them, or null for none."""
    if raw.get("eos_token_id") is None:
        return ()
    if isinstance(raw["eos_token_id"], list):
        return tuple(integers(raw, "eos_token_id", low=0))
    return (integer(raw, "eos_token_id", low=0),)


def _layer_kinds(raw: Mapping, linear: Mapping, count: int) -> tuple[str, ...]:
    """Kinds from the two one-based lists, which must partition the layers."""
    kda = integers(linear, "kda_layers", low=0, prefix=_LINEAR)
    mla = integers(linear, "full_attn_layers", low=0, prefix=_LINEAR)
    # The lengths go first: the range of an absurd count would not fit the memory.
    if len(kda) + len(mla) != count or sorted([*kda, *mla]) != list(range(1, count + 1)):
        raise refusal(
            "linear_attn_config", {"kda_layers": kda, "full_attn_layers": mla},
            f"the two one-based lists must name each of the layers 1..{count} exactly once",
        )  # fmt: skip
    kinds = tuple("mla" if i + 1 in mla else "kda" for i in range(count))
    _check_stated(raw, "layer_types", {"linear_attention": "kda", "full_attention": "mla"}, kinds, "linear_attn_config")
    return kinds


def _ffn_kinds(raw: Mapping, count: int) -> tuple[str, ...]:
    """Dense for the first layers and off the MoE frequency, as stated; a per-layer list must agree."""
    first = integer(raw, "first_k_dense_replace", low=0, default=0)
    every = integer(raw, "moe_layer_freq", default=1)
    kinds = tuple("moe" if i >= first and i % every == 0 else "dense" for i in range(count))
    _check_stated(raw, "mlp_layer_types", {"dense": "dense", "sparse": "moe"}, kinds, "first_k_dense_replace")
    return kinds


def _check_stated(raw: Mapping, field: str, named: Mapping, kinds: tuple[str, ...], source: str) -> None:
    """The optional list of layer names says what the other fields, `source`, say already."""
    stated = [] if raw.get(field) is None else raw[field]
    if not isinstance(stated, list):
        raise refusal(field, stated, "must be a list of layer names, or null")
    for i, name in enumerate(stated):
        if i >= len(kinds) or not isinstance(name, str) or named.get(name) != kinds[i]:
            raise refusal(field, name, f"entry {i} is unknown or contradicts {source}")
