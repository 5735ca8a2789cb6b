"""What flows between layers: a plain residual stream, or a running sum with a bank of finished blocks.

Both forms have three kinds of site, before the mixer, before the feed-forward and before the head. The plain stream
is read as it is. The attention residual mixes its sources for every token, the finished blocks B_j and the sum P:

    logit_j = < RMSNorm(s_j), proj >  in fp32        mix = sum_j softmax(logit)_j s_j

With blocks of b layers, layer i sees ceil(i / b) blocks before its mixer and floor(i / b) + 1 after it. Where i is a
multiple of b, the sum moves into the bank and starts again from the mixer's output; block 0 is the embedding. Every
source of a token is local to it, so nothing is exchanged. P is rounded to the activation dtype after every addition.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.typing import Array, Float, Int32
from pallas_kernels.sums import steady_sum


class Stream(NamedTuple):
    """Running sum, and the bank of finished blocks: those not finished yet are zeros, a plain stream has none."""

    total: Float[Array, "T D"]
    bank: Float[Array, "B T D"]


class PlainResidual(nnx.Module):
    """x = total; total += y."""

    def start(self, embedded: Float[Array, "T D"]) -> Stream:
        """The stream before the first layer."""
        return Stream(embedded, jnp.zeros((0, *embedded.shape), embedded.dtype))

    def before_mixer(self, stream: Stream, layer: Int32[Array, ""]) -> Float[Array, "T D"]:
        """What the mixer's norm reads."""
        return stream.total

    def after_mixer(self, stream: Stream, y: Float[Array, "T D"], layer: Int32[Array, ""]) -> Stream:
        """The stream with the mixer's output."""
        return stream._replace(total=stream.total + y)

    def before_ffn(self, stream: Stream, layer: Int32[Array, ""]) -> Float[Array, "T D"]:
        """What the feed-forward's norm reads."""
        return stream.total

    def after_ffn(self, stream: Stream, y: Float[Array, "T D"]) -> Stream:
        """The stream with the feed-forward's output."""
        return stream._replace(total=stream.total + y)

    def before_head(self, stream: Stream) -> Float[Array, "T D"]:
        """What the last norm reads."""
        return stream.total


class AttentionResidual(PlainResidual):
    """Sites with a norm weight [D] and a row [1, D] each; those of the layers are stacked."""

    def __init__(self, config: KimiLinearConfig, params: dict[str, Array]) -> None:
        self.config = config
        self.mixer_norm = nnx.Param(params["mixer_norm"])
        self.mixer_proj = nnx.Param(params["mixer_proj"])
        self.ffn_norm = nnx.Param(params["ffn_norm"])
        self.ffn_proj = nnx.Param(params["ffn_proj"])
        self.head_norm = nnx.Param(params["head_norm"])
        self.head_proj = nnx.Param(params["head_proj"])

    def start(self, embedded: Float[Array, "T D"]) -> Stream:
        return Stream(embedded, jnp.zeros((self.config.residual_blocks, *embedded.shape), embedded.dtype))

    def before_mixer(self, stream: Stream, layer: Int32[Array, ""]) -> Float[Array, "T D"]:
        seen = (layer + self.config.residual_block - 1) // self.config.residual_block
        return self._mix(stream, seen, self.mixer_norm[...][layer], self.mixer_proj[...][layer])

    def after_mixer(self, stream: Stream, y: Float[Array, "T D"], layer: Int32[Array, ""]) -> Stream:
        block, inside = layer // self.config.residual_block, layer % self.config.residual_block
        total, bank = stream
        entry = jnp.where(inside == 0, total, bank[block])
        return Stream(jnp.where(inside == 0, y, total + y), bank.at[block].set(entry))

    def before_ffn(self, stream: Stream, layer: Int32[Array, ""]) -> Float[Array, "T D"]:
        seen = layer // self.config.residual_block + 1
        return self._mix(stream, seen, self.ffn_norm[...][layer], self.ffn_proj[...][layer])

    def before_head(self, stream: Stream) -> Float[Array, "T D"]:
        return self._mix(stream, jnp.int32(len(stream.bank)), self.head_norm[...], self.head_proj[...])

    def _mix(
        self, stream: Stream, seen: Int32[Array, ""], norm: Float[Array, "D"], proj: Float[Array, "1 D"]
    ) -> Float[Array, "T D"]:
        return attention_mix(stream, seen, norm, proj[0], self.config.rms_norm_eps)


def attention_mix(
    stream: Stream, seen: Int32[Array, ""], norm: Float[Array, "D"], proj: Float[Array, "D"], eps: float
) -> Float[Array, "T D"]:
    """Softmax mix of the first `seen` blocks of the bank and the running sum; all in fp32, rounded once."""
    row = norm.astype(jnp.float32) * proj.astype(jnp.float32)

    def scores(sources: Float[Array, "... D"]) -> Float[Array, "... 1"]:
        scale = jax.lax.rsqrt(steady_sum(sources * sources) / sources.shape[-1] + eps)
        return steady_sum(sources * scale * row)

    # The bank is large and is not copied: it and the sum meet only as weights and as mixes.
    bank, total = stream.bank.astype(jnp.float32), stream.total.astype(jnp.float32)
    visible = jnp.arange(len(bank))[:, None, None] < seen
    logits = jnp.concatenate([jnp.where(visible, scores(bank), -jnp.inf), scores(total)[None]])
    weights = jnp.exp(logits - jnp.max(logits, axis=0))
    weights = weights / steady_sum(weights, axis=0)
    mix = steady_sum(weights[:-1] * bank, axis=0)[0] + weights[-1] * total
    return mix.astype(stream.total.dtype)


def residual(config: KimiLinearConfig, params: dict[str, Array]) -> PlainResidual:
    """The form a configuration asks for."""
    return AttentionResidual(config, params) if config.residual_block else PlainResidual()
