"""Kimi Linear and the text model of Kimi K3: embedding, layers of (mixer, feed-forward), head.

The forward pass runs inside one `shard_map` over mesh axes ("data", "model", "dcp") with
`check_vma=False`: modules see local shards and call collectives themselves. The residual stream is
replicated over the tensor group ("model", "dcp"), or split over it by tokens (`stream`).

    h = embed[token]
    h += mixer(RMSNorm(h))        h += ffn(RMSNorm(h))        for each layer
    logits = lm_head RMSNorm(h)

K3 reads and adds to the stream as `residual` says; its other differences are options of the modules.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybrid_kv.models.axes import tensor_rank
from hybrid_kv.models.batch import Caches, ModelBatch
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.execution import PLAIN, Execution
from hybrid_kv.models.ffn import DenseFfn, MoeFfn, expert_weights
from hybrid_kv.models.kda import KdaMixer, Pending
from hybrid_kv.models.linear import project
from hybrid_kv.models.mla import MlaMixer
from hybrid_kv.models.norms import RmsNorm, rms_norm
from hybrid_kv.models.residual import Stream, residual
from hybrid_kv.typing import Array, Float, Int32
from pallas_kernels.kda.records import Records


def _when(flag: Array, body: Callable, carry: tuple, on_tpu: bool) -> tuple:
    """body(carry) if flag else carry, but for TPU as a loop of at most one pass.

    XLA updates what a loop carries in place, whereas on CPU and GPU `lax.cond` copied a whole pool in every layer.
    """
    if on_tpu:
        return jax.lax.cond(flag, body, lambda x: x, carry)
    return jax.lax.fori_loop(0, flag.astype(jnp.int32), lambda _, x: body(x), carry)


M = TypeVar("M", bound=nnx.Module)


def _layer(stacked: M, index: Int32[Array, ""]) -> M:
    """The module of one layer out of a module whose parameters are stacked over layers."""
    graph, state = nnx.split(stacked)
    return nnx.merge(graph, jax.tree.map(lambda x: x[index], state))


class KimiLinear(nnx.Module):
    """The whole model.

    Parameters of equal kind are stacked over layers and one scan over the layers picks from each stack,
    so every kind of layer is compiled once.

    Args:
      config: shapes and constants.
      params: arrays by parameter path (`parameters.inventory`), global or local shards.
      how: which kernels run, and in which form.
    """

    def __init__(self, config: KimiLinearConfig, params: Mapping[str, Array], how: Execution = PLAIN) -> None:
        def group(name: str) -> dict[str, Array]:
            return {path.split(".")[1]: x for path, x in params.items() if path.startswith(name + ".")}

        self.config, self.on_tpu, self.layout = config, how.on_tpu, how.stream
        self.embed = nnx.Param(params["embed"])
        self.mixer_norm = nnx.Param(params["mixer_norm"])
        self.ffn_norm = nnx.Param(params["ffn_norm"])
        self.norm = RmsNorm(params["norm"], config.rms_norm_eps)
        self.head = nnx.Param(params["head"])
        self.residual = residual(config, group("residual"))
        if config.kda_layers:
            self.kda = KdaMixer(config, group("kda"), how)
        if config.mla_layers:
            self.mla = MlaMixer(config, group("mla"), how)
        if config.dense_layers:
            self.dense = DenseFfn(config, group("dense"), how)
        if config.moe_layers:
            self.moe = MoeFfn(config, group("moe"), how)
            self.experts = nnx.data(expert_weights(config, group("moe")))

    def __call__(
        self, batch: ModelBatch, caches: Caches, *, decode_only: bool, interleave: int = 1
    ) -> tuple[Float[Array, "Q local"], Caches]:
        """One step.

        Args:
          batch: packed tokens and where their state lives; equal on the whole tensor group.
          caches: this rank's shard of the pools.
          decode_only: every row has at most one token, row r's at packed index r (T == R).
          interleave: tokens of a stripe of the MLA cache.

        Returns:
          fp32 logits of the tokens in `logits_index` over this rank's part of the vocabulary (parts lie in the order of
          ranks, "model" outermost), and the caches.
        """
        logits, _, caches = self.with_margins(batch, caches, decode_only=decode_only, interleave=interleave)
        return logits, caches

    def with_margins(
        self, batch: ModelBatch, caches: Caches, *, decode_only: bool, interleave: int = 1
    ) -> tuple[Float[Array, "Q local"], Float[Array, "Q"], Caches]:
        """As a call, with the smallest expert selection margin of each wanted token over all layers."""
        stream, margin, caches, _ = self._layers(batch, caches, 1 if decode_only else None, interleave, None)
        wanted = jnp.clip(batch.logits_index, 0, batch.tokens.shape[0] - 1)
        return self._logits(stream, wanted), margin[wanted], caches

    def verify(
        self, batch: ModelBatch, caches: Caches, *, most: int, interleave: int = 1
    ) -> tuple[Float[Array, "T local"], Caches, Pending | None]:
        """A step of rows that carry drafts behind their first token, whose states wait for `commit`.

        Args:
          most: tokens of a row at most, 1 + drafts; static.

        Returns:
          Logits of all tokens, as of a call; the caches with rows of all tokens in the latent pool, where those of
          rejected drafts will be written again; and what `commit` needs.
        """
        stream, _, caches, pending = self._layers(batch, caches, most, interleave, self._nothing_pending(batch, most))
        return self._logits(stream, jnp.arange(batch.tokens.shape[0])), caches, pending

    def commit(self, batch: ModelBatch, caches: Caches, pending: Pending | None, accepted: Int32[Array, "R"]) -> Caches:
        """States after the first `accepted` tokens of each row of a `verify` step."""
        if not self.config.kda_layers:
            return caches

        def layer(at, carry):
            mine = jax.tree.map(lambda x: x[at], pending)
            states, conv = carry
            return _layer(self.kda, at).commit(mine, states, conv, at, batch, accepted)

        states, conv = jax.lax.fori_loop(0, len(self.config.kda_layers), layer, (caches.kda, caches.conv))
        return caches._replace(kda=states, conv=conv)

    def _nothing_pending(self, batch: ModelBatch, most: int) -> Pending | None:
        """Room for what all KDA layers leave behind in a verify step."""
        if not self.config.kda_layers:
            return None
        layers, heads = self.kda.a_log.shape
        width, dtype = self.config.kda_head_dim, self.embed.dtype
        rows = (layers, batch.rows.offset.shape[0], most, heads, width)
        records = Records(jnp.zeros(rows, jnp.float32), jnp.zeros(rows, dtype), jnp.zeros(rows, dtype))
        return Pending(records, jnp.zeros((layers, batch.tokens.shape[0], 3 * heads * width), dtype))

    def _logits(self, stream: Stream, wanted: Int32[Array, "Q"]) -> Float[Array, "Q local"]:
        def read(at: Int32[Array, "Q"]) -> Float[Array, "Q D"]:
            return self.norm(self.residual.before_head(Stream(stream.total[at], stream.bank[:, at])))

        h = self.layout.pick(read, wanted, stream.total.shape[0])
        return project(h, self.head[...]).astype(jnp.float32)

    def _embed(self, tokens: Int32[Array, "T"]) -> Float[Array, "held D"]:
        """Rows of the vocabulary-split table; an id outside the vocabulary gives zeros."""
        table = self.embed[...]
        local = tokens - tensor_rank() * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        return self.layout.reduce(jnp.where(mine[:, None], table[jnp.where(mine, local, 0)], 0))

    def _layers(
        self, batch: ModelBatch, caches: Caches, most: int | None, interleave: int, pending: Pending | None
    ) -> tuple[Stream, Float[Array, "T"], Caches, Pending | None]:
        """All layers. most: tokens of a row at most, None for any. pending: room for a verify step, else None."""
        config = self.config
        kinds = {
            "kda": config.kda_layers, "mla": config.mla_layers,
            "dense": config.dense_layers, "moe": config.moe_layers,
        }  # fmt: skip
        has = {kind: jnp.asarray([i in which for i in range(config.layers)]) for kind, which in kinds.items()}
        # Place of each layer in the stacks and pools of its kind.
        place = {
            kind: jnp.asarray(np.cumsum([i in which for i in range(config.layers)]) - 1, jnp.int32)
            for kind, which in kinds.items()
        }

        def layer(i, carry):
            stream, margin, caches, pending = carry
            x = rms_norm(self.residual.before_mixer(stream, i), self.mixer_norm[...][i], config.rms_norm_eps)

            @jax.named_scope("kda")
            def kda(carry):
                at, mixer = place["kda"][i], _layer(self.kda, place["kda"][i])
                _, states, conv, pending = carry
                if pending is None or most is None:
                    return *mixer(x, states, conv, at, batch, decode_only=most == 1), None
                y, found = mixer.verify(x, states, conv, at, batch, most=most)
                return y, states, conv, jax.tree.map(lambda all, new: all.at[at].set(new), pending, found)

            @jax.named_scope("mla")
            def mla(carry):
                at = place["mla"][i]
                return _layer(self.mla, at)(x, carry[1], at, batch, most=most, interleave=interleave)

            y = jnp.zeros_like(x)
            mla_pool, kda_pool, conv_pool = caches
            if config.kda_layers:
                y, kda_pool, conv_pool, pending = _when(
                    has["kda"][i], kda, (y, kda_pool, conv_pool, pending), self.on_tpu
                )
            if config.mla_layers:
                y, mla_pool = _when(has["mla"][i], mla, (y, mla_pool), self.on_tpu)
            stream = self.residual.after_mixer(stream, y, i)

            x = rms_norm(self.residual.before_ffn(stream, i), self.ffn_norm[...][i], config.rms_norm_eps)
            y = jnp.zeros_like(x)
            if config.dense_layers:

                @jax.named_scope("dense")
                def dense(_):
                    return (_layer(self.dense, place["dense"][i])(x),)

                (y,) = _when(has["dense"][i], dense, (y,), self.on_tpu)
            if config.moe_layers:

                @jax.named_scope("moe")
                def moe(carry):
                    at = place["moe"][i]
                    out, gap = _layer(self.moe, at)(x, self.experts, at)
                    return out, jnp.minimum(carry[1], gap)

                y, margin = _when(has["moe"][i], moe, (y, margin), self.on_tpu)
            return self.residual.after_ffn(stream, y), margin, Caches(mla_pool, kda_pool, conv_pool), pending

        stream = self.residual.start(self._embed(batch.tokens))
        start = (stream, jnp.full(batch.tokens.shape[0], jnp.inf, jnp.float32), caches, pending)
        return jax.lax.fori_loop(0, config.layers, layer, start)
