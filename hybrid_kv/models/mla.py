"""MLA mixer over the paged latent cache, absorbed form, with the cache striped over "dcp".

Query, key-up, value-up, output gate and output weights are split by heads over the tensor group; the
latent projection and the bottleneck of low-rank queries are replicated, and so is the cache over
"model". Ranks of one dcp group hold different heads and different tokens, so queries are gathered over
"dcp", each rank attends to its own tokens for all heads of the group, and the partial results return to
the ranks that own the heads.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_kv.models.axes import DCP
from hybrid_kv.models.batch import ModelBatch
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.execution import PLAIN, Execution
from hybrid_kv.models.linear import project, project_heads
from hybrid_kv.models.norms import rms_norm
from hybrid_kv.typing import Array, Bool, Float, Int32
from pallas_kernels.mla import context_parallel, mla_attention, mla_write
from pallas_kernels.mla.expanded import expansion_pays, mla_expanded
from pallas_kernels.rows import RaggedRows

_PREFILL_TILE = 64
# Implementations of the expanded form by that of the others.
_EXPANDED = {"tpu": "tpu", "gpu": "xla", None: None}


class MlaMixer(nnx.Module):
    """See the module. Weights are [out, in]; `kv_b` packs per head the key rows, then the value rows."""

    def __init__(self, config: KimiLinearConfig, params: dict[str, Array], how: Execution = PLAIN) -> None:
        self.config, self.kernels, self.workspace, self.exchange = config, how.kernels, how.workspace, how.exchange
        self.stream = how.stream
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
        most: int | None,
        interleave: int,
    ) -> tuple[Float[Array, "T D"], Float[Array, "layers B *page"]]:
        """Mixer output and the latent pool with this step's rows, of at most `most` tokens each (None: any)."""
        config, x = self.config, self.stream.gather(x)
        kv_b = self.kv_b[...].reshape(-1, config.nope_width + config.value_width, config.latent_width)
        q = self.queries(x).reshape(x.shape[0], kv_b.shape[0], config.nope_width + config.rope_width)
        where = Stripe(layer, jax.lax.axis_size(DCP), jax.lax.axis_index(DCP), interleave)
        # There is no GPU kernel for writes.
        writing = None if self.kernels == "gpu" else self.kernels
        cache = mla_write(
            cache, self.cache_rows(x), layer, batch.rows, batch.attention.table, implementation=writing, **where.tokens
        )
        if most is not None or self.workspace is None:
            o = self._absorbed(q, kv_b, cache, batch.rows, batch, where, most or _PREFILL_TILE)
        else:
            o = self._by_row(q, kv_b, cache, batch, where, self.workspace)
        # The next layer writes the pool: it must not be kept alive beyond these reads (see kernels' slots).
        o, cache = jax.lax.optimization_barrier((o, cache))
        o = o.reshape(x.shape[0], -1)
        if config.mla_output_gate:
            gate = jax.nn.sigmoid(project(x, self.gate[...]).astype(jnp.float32))
            o = (o.astype(jnp.float32) * gate).astype(x.dtype)
        return self.stream.reduce(project(o, self.out[...])), cache

    def _absorbed(
        self,
        q: Float[Array, "T N F"],
        kv_b: Float[Array, "N G L"],
        cache: Float[Array, "layers B *page"],
        rows: RaggedRows,
        batch: ModelBatch,
        where: "Stripe",
        query_tile: int,
    ) -> Float[Array, "T N V"]:
        """Attention of the own heads to all tokens, with queries that travel."""
        nope = self.config.nope_width

        def attend(latent: Array, rope: Array) -> tuple[Array, Array]:
            return mla_attention(
                latent, rope, cache, where.layer, rows, batch.attention.table, scale=self.config.softmax_scale,
                query_tile=query_tile, implementation=self.kernels, **where.tokens,
            )  # fmt: skip

        latent = project_heads(q[..., :nope], kv_b[:, :nope])
        out, _ = context_parallel(attend, latent, q[..., nope:], DCP, exchange=self.exchange)
        return project_heads(out, jnp.swapaxes(kv_b[:, nope:], 1, 2))

    def _by_row(
        self,
        q: Float[Array, "T N F"],
        kv_b: Float[Array, "N G L"],
        cache: Float[Array, "layers B *page"],
        batch: ModelBatch,
        where: "Stripe",
        workspace: int,
    ) -> Float[Array, "T N V"]:
        """Each row in the form that takes fewer multiplications: absorbed where few tokens share a context, else
        expanded, where it is the context that travels. A form that no row wants costs nothing."""
        rows, config, nope = batch.rows, self.config, self.config.nope_width
        few = (rows.length > 0) & ~_expands(rows, config)
        apart = rows._replace(length=jnp.where(few, rows.length, 0))
        many = rows._replace(length=jnp.where(few, 0, rows.length))
        leading = min(rows.offset.shape[0], q.shape[0])

        def none() -> Array:
            return jnp.zeros((*q.shape[:2], config.value_width), q.dtype)

        def decoding() -> Array:
            o = self._absorbed(q[:leading], kv_b, cache, apart, batch, where, 1)
            return jnp.pad(o, ((0, q.shape[0] - leading), (0, 0), (0, 0)))

        def mixed() -> Array:
            return self._absorbed(q, kv_b, cache, apart, batch, where, _PREFILL_TILE)

        # Rows that decode come first, so the queries of such rows alone are a short piece.
        first = jnp.all(~few | ((rows.length == 1) & (rows.offset < leading)))
        absorbed = jax.lax.switch(jnp.where(jnp.any(few), jnp.where(first, 1, 2), 0), (none, decoding, mixed))
        expanded, _ = mla_expanded(
            q[..., :nope], q[..., nope:], kv_b[:, :nope], kv_b[:, nope:], cache, where.layer, many,
            batch.attention.table, scale=config.softmax_scale, workspace=workspace,
            axis=DCP if where.shards > 1 else None, implementation=_EXPANDED[self.kernels], **where.tokens,
        )  # fmt: skip
        return absorbed + expanded


class Stripe(NamedTuple):
    """Layer of the pool, and which tokens of a block this rank holds."""

    layer: Array
    shards: int
    rank: Array
    interleave: int

    @property
    def tokens(self) -> dict[str, Any]:
        """As the kernels take it."""
        return {"shards": self.shards, "rank": self.rank, "interleave": self.interleave}


def _expands(rows: RaggedRows, config: KimiLinearConfig) -> Bool[Array, "R"]:
    """Rows whose expanded form takes fewer multiplications; in fp32, since pairs exceed int32."""
    new, context = rows.length.astype(jnp.float32), rows.start.astype(jnp.float32)
    sizes = {"latent": config.latent_width, "nope": config.nope_width, "value": config.value_width}
    return expansion_pays(new, context, **sizes)
