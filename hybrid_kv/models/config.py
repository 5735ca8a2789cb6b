"""Configuration of Kimi Linear, read from a Hugging Face config.json and checked field by field."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_kv.errors import UserError

# Values that the forward pass does not honour if they are anything else. A field that is absent
# passes: both the published and the transformers-saved configuration leave some of these out.
_ONLY = {
    "model_type": ("kimi_linear",),
    "hidden_act": ("silu",),
    "moe_router_activation_func": ("sigmoid",),
    "mla_use_nope": (True,),
    "rope_scaling": (None,),
    "attention_bias": (False,),
    "q_lora_rank": (None, 0),
    "tie_word_embeddings": (False,),
    "num_nextn_predict_layers": (None, 0),
    "quantization_config": (None,),
    "use_full_rank_gate": (None, False),
    "mla_use_output_gate": (None, False),
    "routed_expert_hidden_size": (None,),
    "attn_res_block_size": (None, 0),
}

_LINEAR = "linear_attn_config."
_MAX = 3.4e38  # what fp32 holds


@dataclass(frozen=True)
class KimiLinearConfig:
    """Shapes and constants of a Kimi Linear model. Widths are values per token or per head.

    Attributes:
      layer_kinds: "kda" or "mla" for each layer, from the two lists of the configuration.
      ffn_kinds: "dense" or "moe" for each layer.
      gate_lower_bound: None for the softplus gate, else the bound of the sigmoid gate.
      mla_lora_norm_eps: eps of the norm of the latent, not that of the other norms.
      biased_expert_weights: take expert weights from the biased scores; off everywhere it matters.
      context_length: most tokens of a sequence the model was made for.
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

    @classmethod
    def from_dict(cls, raw: Mapping) -> "KimiLinearConfig":
        """Read a config.json dictionary, published or saved by transformers.

        Raises:
          UserError: a field is missing, or has a value the model code would not honour.
        """
        for name, allowed in _ONLY.items():
            if name in raw and raw[name] not in allowed:
                raise _refusal(name, raw[name], f"this model code runs only {' or '.join(map(repr, allowed))}")
        linear = _given(raw, "linear_attn_config")
        if not isinstance(linear, Mapping):
            raise _refusal("linear_attn_config", linear, "must be an object with kda_layers and full_attn_layers")
        count = _int(raw, "num_hidden_layers")
        heads = _int(raw, "num_attention_heads")
        groups = _int(raw, "num_key_value_heads", default=heads)
        if groups != heads:
            raise UserError("num_key_value_heads", groups, f"must equal num_attention_heads {heads}")
        return cls(
            vocab_size=_int(raw, "vocab_size"),
            hidden_size=_int(raw, "hidden_size"),
            dense_width=_int(raw, "intermediate_size"),
            layer_kinds=_layer_kinds(raw, linear, count),
            ffn_kinds=_ffn_kinds(raw, count),
            kda_heads=_int(linear, "num_heads", prefix=_LINEAR),
            kda_head_dim=_int(linear, "head_dim", prefix=_LINEAR),
            conv_width=_int(linear, "short_conv_kernel_size", low=2, prefix=_LINEAR),
            mla_heads=heads,
            latent_width=_int(raw, "kv_lora_rank"),
            nope_width=_int(raw, "qk_nope_head_dim"),
            rope_width=_int(raw, "qk_rope_head_dim"),
            value_width=_int(raw, "v_head_dim"),
            experts=_int(raw, "num_experts"),
            experts_per_token=_int(raw, "num_experts_per_token"),
            shared_experts=_int(raw, "num_shared_experts", default=1),
            expert_width=_int(raw, "moe_intermediate_size"),
            # 0 turns grouping off, as null does.
            expert_groups=_int(raw, "num_expert_group", low=0, default=1) or 1,
            expert_groups_kept=_int(raw, "topk_group", low=0, default=1) or 1,
            renormalize=_bool(raw, "moe_renormalize", default=True),
            routed_scaling_factor=_float(raw, "routed_scaling_factor", default=1.0),
            rms_norm_eps=_float(raw, "rms_norm_eps", low=0.0, default=1e-5),
            mla_lora_norm_eps=_float(raw, "mla_lora_norm_eps", low=0.0, default=1e-6),
            gate_lower_bound=_gate_lower_bound(raw, linear),
            context_length=_int(raw, "model_max_length", default=1_048_576),
            eos_token_ids=_eos_token_ids(raw),
        )


def _refusal(name: str, value: Any, fix: str) -> UserError:
    """Lists and objects are shown shortened: a file may hold long or deep ones."""
    return UserError(name, reprlib.repr(value) if isinstance(value, list | dict) else value, fix)


def _given(raw: Mapping, name: str, default: Any = None, prefix: str = "") -> Any:
    """The field, or the default where it is absent or null; a field without a default must be there."""
    value = raw.get(name)
    if value is None and default is None:
        raise UserError(prefix + name, None, "the model configuration must give this field")
    return default if value is None else value


def _is_int(value: Any, low: int) -> bool:
    """JSON true and 1.0 are not integers here; 2**31 and above would not fit the arrays."""
    return type(value) is int and low <= value < 2**31


def _int(raw: Mapping, name: str, low: int = 1, default: int | None = None, prefix: str = "") -> int:
    value = _given(raw, name, default, prefix)
    if not _is_int(value, low):
        raise _refusal(prefix + name, value, f"must be an integer, at least {low} and below 2**31")
    return value


def _float(raw: Mapping, name: str, low: float = -_MAX, default: float | None = None, prefix: str = "") -> float:
    value = _given(raw, name, default, prefix)
    # The comparison is false for NaN, and exact for integers that no float can hold.
    if type(value) not in (int, float) or not low <= value <= _MAX:
        raise _refusal(prefix + name, value, "must be a finite number" + (f", at least {low}" if low > -_MAX else ""))
    return float(value)


def _bool(raw: Mapping, name: str, default: bool) -> bool:
    value = _given(raw, name, default)
    if not isinstance(value, bool):
        raise _refusal(name, value, "must be true or false")
    return value


def _ints(raw: Mapping, name: str, low: int, prefix: str = "") -> list[int]:
    value = _given(raw, name, prefix=prefix)
    if not isinstance(value, list) or not all(_is_int(entry, low) for entry in value):
        raise _refusal(prefix + name, value, f"must be a list of integers, each at least {low} and below 2**31")
    return value


def _gate_lower_bound(raw: Mapping, linear: Mapping) -> float | None:
    """None for the softplus gate; the field of the linear attention goes before that of the model."""
    where, prefix = (linear, _LINEAR) if "gate_lower_bound" in linear else (raw, "")
    return None if where.get("gate_lower_bound") is None else _float(where, "gate_lower_bound", prefix=prefix)


def _eos_token_ids(raw: Mapping) -> tuple[int, ...]:
    """One token, a list of them, or null for none."""
    if raw.get("eos_token_id") is None:
        return ()
    if isinstance(raw["eos_token_id"], list):
        return tuple(_ints(raw, "eos_token_id", low=0))
    return (_int(raw, "eos_token_id", low=0),)


def _layer_kinds(raw: Mapping, linear: Mapping, count: int) -> tuple[str, ...]:
    """Kinds from the two one-based lists, which must partition the layers."""
    kda = _ints(linear, "kda_layers", low=0, prefix=_LINEAR)
    mla = _ints(linear, "full_attn_layers", low=0, prefix=_LINEAR)
    # The lengths go first: the range of an absurd count would not fit the memory.
    if len(kda) + len(mla) != count or sorted([*kda, *mla]) != list(range(1, count + 1)):
        raise _refusal(
            "linear_attn_config", {"kda_layers": kda, "full_attn_layers": mla},
            f"the two one-based lists must name each of the layers 1..{count} exactly once",
        )  # fmt: skip
    kinds = tuple("mla" if i + 1 in mla else "kda" for i in range(count))
    _check_stated(raw, "layer_types", {"linear_attention": "kda", "full_attention": "mla"}, kinds, "linear_attn_config")
    return kinds


def _ffn_kinds(raw: Mapping, count: int) -> tuple[str, ...]:
    """Dense for the first layers and off the MoE frequency, as stated; a per-layer list must agree."""
    first = _int(raw, "first_k_dense_replace", low=0, default=0)
    every = _int(raw, "moe_layer_freq", default=1)
    kinds = tuple("moe" if i >= first and i % every == 0 else "dense" for i in range(count))
    _check_stated(raw, "mlp_layer_types", {"dense": "dense", "sparse": "moe"}, kinds, "first_k_dense_replace")
    return kinds


def _check_stated(raw: Mapping, field: str, named: Mapping, kinds: tuple[str, ...], source: str) -> None:
    """The optional list of layer names says what the other fields, `source`, say already."""
    stated = [] if raw.get(field) is None else raw[field]
    if not isinstance(stated, list):
        raise _refusal(field, stated, "must be a list of layer names, or null")
    for i, name in enumerate(stated):
        if i >= len(kinds) or not isinstance(name, str) or named.get(name) != kinds[i]:
            raise _refusal(field, name, f"entry {i} is unknown or contradicts {source}")
