"""MLA mixer over the paged latent cache, absorbed form, with the cache striped over "dcp".

Query, key-up, value-up, output gate and output weights are split by heads over the tensor group; the
latent projection and the bottleneck of low-rank queries are replicated, and so is the cache over
"model". Ranks of one dcp group hold different heads and different tokens, so queries are gathered over
"dcp", each rank attends to its own tokens for all heads of the group, and the partial results return to
the ranks that own the heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_kv.models.axes import DCP, tensor_sum
from hybrid_kv.models.batch import ModelBatch
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.linear import project, project_heads
from hybrid_kv.models.norms import rms_norm
from hybrid_kv.typing import Array, Float, Int32
from pallas_kernels.mla import context_parallel, mla_attention, mla_write

_PREFILL_TILE = 64


class MlaMixer(nnx.Module):
    """See the module. Weights are [out, in]; `kv_b` packs per head the key rows, then the value rows."""

    def __init__(self, config: KimiLinearConfig, params: dict[str, Array], kernels: str | None = None) -> None:
        self.config, self.kernels = config, kernels
        if config.query_rank:
            self.q_a = nnx.Param(params["q_a"])
            self.q_a_norm = nnx.Param(params["q_a_norm"])
            self.q_b = nnx.Param(params["q_b"])
        else:
            self.q = nnx.Param(params["q"])
        if config.mla_output_gate:
            self.gate = nnx.Param(params["gate"])
        self.kv_a = nnx.Param(params["kv_a"])
        self.kv_a_norm = nnx.Param(params["kv_a_norm"])
        self.kv_b = nnx.Param(params["kv_b"])
        self.out = nnx.Param(params["out"])

    def cache_rows(self, x: Float[Array, "T D"]) -> Float[Array, "T LP"]:
        """[RMSNorm(latent) | position key] of each token."""
        latent = self.config.latent_width
        row = project(x, self.kv_a[...])
        normed = rms_norm(row[:, :latent], self.kv_a_norm[...], self.config.mla_lora_norm_eps)
        return jnp.concatenate([normed, row[:, latent:]], axis=1)

    def queries(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        """Queries of the own heads, each [nope | position], straight or through a normed bottleneck."""
        if not self.config.query_rank:
            return project(x, self.q[...])
        narrow = rms_norm(project(x, self.q_a[...]), self.q_a_norm[...], self.config.mla_lora_norm_eps)
        return project(narrow, self.q_b[...])

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: Float[Array, "layers B *page"],
        layer: Int32[Array, ""],
        batch: ModelBatch,
        *,
        decode_only: bool,
        interleave: int,
    ) -> tuple[Float[Array, "T D"], Float[Array, "layers B *page"]]:
        """Mixer output and the latent pool with this step's rows."""
        config = self.config
        nope, value = config.nope_width, config.value_width
        kv_b = self.kv_b[...].reshape(-1, nope + value, config.latent_width)
        q = self.queries(x).reshape(x.shape[0], kv_b.shape[0], nope + config.rope_width)
        q_latent = project_heads(q[..., :nope], kv_b[:, :nope])
        place: tuple[Any, ...] = (layer, batch.rows, batch.attention.table)
        stripe: dict[str, Any] = {
            "shards": jax.lax.axis_size(DCP),
            "rank": jax.lax.axis_index(DCP),
            "interleave": interleave,
        }
        stripe["implementation"] = self.kernels
        # Pallas has no GPU kernel for writes.
        written = stripe | {"implementation": None if self.kernels == "gpu" else self.kernels}
        cache = mla_write(cache, self.cache_rows(x), *place, **written)
        attend = {"scale": config.softmax_scale, "query_tile": 1 if decode_only else _PREFILL_TILE, **stripe}
        out, _ = context_parallel(
            lambda latent, rope: mla_attention(latent, rope, cache, *place, **attend), q_latent, q[..., nope:], DCP
        )
        # The next layer writes the pool: it must not be kept alive beyond these reads (see kernels' slots).
        out, cache = jax.lax.optimization_barrier((out, cache))
        o = project_heads(out, jnp.swapaxes(kv_b[:, nope:], 1, 2)).reshape(x.shape[0], -1)
        if config.mla_output_gate:
            gate = jax.nn.sigmoid(project(x, self.gate[...]).astype(jnp.float32))
            o = (o.astype(jnp.float32) * gate).astype(x.dtype)
        return tensor_sum(project(o, self.out[...])), cache
