"""Configuration of Kimi Linear, read from a Hugging Face config.json and checked field by field."""

from collections.abc import Mapping
from dataclasses import dataclass

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
                raise UserError(name, raw[name], f"this model code runs only {' or '.join(map(repr, allowed))}")
        linear = _need(raw, "linear_attn_config")
        if not isinstance(linear, Mapping):
            raise UserError("linear_attn_config", linear, "must be an object with kda_layers and full_attn_layers")
        count = _need(raw, "num_hidden_layers")
        heads = _need(raw, "num_attention_heads")
        if raw.get("num_key_value_heads", heads) != heads:
            raise UserError(
                "num_key_value_heads", raw["num_key_value_heads"], f"must equal num_attention_heads {heads}"
            )
        eos = raw.get("eos_token_id")
        return cls(
            vocab_size=_need(raw, "vocab_size"),
            hidden_size=_need(raw, "hidden_size"),
            dense_width=_need(raw, "intermediate_size"),
            layer_kinds=_layer_kinds(raw, linear, count),
            ffn_kinds=_ffn_kinds(raw, count),
            kda_heads=_need(linear, "num_heads", "linear_attn_config."),
            kda_head_dim=_need(linear, "head_dim", "linear_attn_config."),
            conv_width=_need(linear, "short_conv_kernel_size", "linear_attn_config."),
            mla_heads=heads,
            latent_width=_need(raw, "kv_lora_rank"),
            nope_width=_need(raw, "qk_nope_head_dim"),
            rope_width=_need(raw, "qk_rope_head_dim"),
            value_width=_need(raw, "v_head_dim"),
            experts=_need(raw, "num_experts"),
            experts_per_token=_need(raw, "num_experts_per_token"),
            shared_experts=raw.get("num_shared_experts", 1),
            expert_width=_need(raw, "moe_intermediate_size"),
            expert_groups=raw.get("num_expert_group", 1) or 1,
            expert_groups_kept=raw.get("topk_group", 1) or 1,
            renormalize=raw.get("moe_renormalize", True),
            routed_scaling_factor=float(raw.get("routed_scaling_factor", 1.0)),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-5),
            mla_lora_norm_eps=raw.get("mla_lora_norm_eps", 1e-6),
            gate_lower_bound=linear.get("gate_lower_bound", raw.get("gate_lower_bound")),
            context_length=raw.get("model_max_length", 1_048_576),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )


def _need(raw: Mapping, name: str, prefix: str = ""):
    if raw.get(name) is None:
        raise UserError(prefix + name, raw.get(name), "the model configuration must give this field")
    return raw[name]


def _layer_kinds(raw: Mapping, linear: Mapping, count: int) -> tuple[str, ...]:
    """Kinds from the two one-based lists, which must partition the layers."""
    kda = _need(linear, "kda_layers", "linear_attn_config.")
    mla = _need(linear, "full_attn_layers", "linear_attn_config.")
    if sorted([*kda, *mla]) != list(range(1, count + 1)):
        raise UserError(
            "linear_attn_config", {"kda_layers": kda, "full_attn_layers": mla},
            f"the two one-based lists must name each of the layers 1..{count} exactly once",
        )  # fmt: skip
    kinds = tuple("mla" if i + 1 in mla else "kda" for i in range(count))
    named = {"linear_attention": "kda", "full_attention": "mla"}
    for i, name in enumerate(raw.get("layer_types") or []):
        if i >= count or named.get(name) != kinds[i]:
            raise UserError("layer_types", name, f"entry {i} is unknown or contradicts linear_attn_config")
    return kinds


def _ffn_kinds(raw: Mapping, count: int) -> tuple[str, ...]:
    """Dense for the first layers and off the MoE frequency, as stated; a per-layer list must agree."""
    first = raw.get("first_k_dense_replace", 0)
    every = raw.get("moe_layer_freq", 1)
    kinds = tuple("moe" if i >= first and i % every == 0 else "dense" for i in range(count))
    named = {"dense": "dense", "sparse": "moe"}
    for i, name in enumerate(raw.get("mlp_layer_types") or []):
        if i >= count or named.get(name) != kinds[i]:
            raise UserError("mlp_layer_types", name, f"entry {i} is unknown or contradicts first_k_dense_replace")
    return kinds
