"""KDA mixer: projections, short convolution, gated delta rule, gated norm, output projection.

Heads are split over the tensor group, so a rank sees its own heads in every weight and in both pools;
bottlenecks of low-rank gates are replicated.
"""

import jax.numpy as jnp
from flax import nnx

from hybrid_kv.models.axes import tensor_sum
from hybrid_kv.models.batch import ModelBatch, RecurrentInputs
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.execution import PLAIN, Execution
from hybrid_kv.models.linear import project
from hybrid_kv.models.norms import gated_rms_norm
from hybrid_kv.typing import Array, Float, Int32
from pallas_kernels.conv1d import causal_conv1d
from pallas_kernels.kda import kda_decode, kda_prefill


def decode_emission(recurrent: RecurrentInputs, start: Int32[Array, "R"]) -> Int32[Array, "R"]:
    """Slot that the state after a row's only token also goes to; 0 for none."""
    wanted = recurrent.emit_position == start[:, None] + 1
    return jnp.max(jnp.where(wanted, recurrent.emit_slot, 0), axis=1, initial=0)


class KdaMixer(nnx.Module):
    """See the module. Weights are [out, in]; `qkv` packs the outputs as (head, {q, k, v}, channel)."""

    def __init__(self, config: KimiLinearConfig, params: dict[str, Array], how: Execution = PLAIN) -> None:
        self.config, self.kernels = config, how.kernels
        self.qkv = nnx.Param(params["qkv"])
        self.conv = nnx.Param(params["conv"])
        self.f_a = nnx.Param(params["f_a"])
        self.f_b = nnx.Param(params["f_b"])
        if config.full_rank_gate:
            self.g = nnx.Param(params["g"])
        else:
            self.g_a = nnx.Param(params["g_a"])
            self.g_b = nnx.Param(params["g_b"])
        self.beta = nnx.Param(params["beta"])
        self.a_log = nnx.Param(params["a_log"])
        self.dt_bias = nnx.Param(params["dt_bias"])
        self.o_norm = nnx.Param(params["o_norm"])
        self.out = nnx.Param(params["out"])

    def __call__(
        self,
        x: Float[Array, "T D"],
        states: Float[Array, "layers S H K V"],
        conv_states: Float[Array, "layers S W1 *channels"],
        layer: Int32[Array, ""],
        batch: ModelBatch,
        *,
        decode_only: bool,
    ) -> tuple[Float[Array, "T D"], Float[Array, "layers S H K V"], Float[Array, "layers S W1 *channels"]]:
        """Mixer output, recurrent pool, convolution pool."""
        rows, slots = batch.rows, batch.recurrent
        width = self.config.kda_head_dim
        heads = self.a_log.shape[0]
        # Held in columns of 128 channels, the pool is reshaped here and back in the kernel, which costs nothing.
        histories = conv_states.reshape(*conv_states.shape[:3], -1)
        mixed, histories = causal_conv1d(
            project(x, self.qkv[...]), self.conv[...].T, histories, layer, rows, slots.read, slots.write,
            slots.emit_position, slots.emit_slot, implementation=self.kernels,
        )  # fmt: skip
        conv_states = histories.reshape(conv_states.shape)
        mixed = mixed.reshape(x.shape[0], heads, 3, width)
        q, k, v = mixed[:, :, 0], mixed[:, :, 1], mixed[:, :, 2]
        raw_gate = project(project(x, self.f_a[...]), self.f_b[...]).reshape(q.shape)
        raw_beta = project(x, self.beta[...])
        token = (q, k, v, raw_gate, raw_beta, self.a_log[...], self.dt_bias[...].reshape(heads, width))
        bound = self.config.gate_lower_bound
        if decode_only:
            o, states = kda_decode(
                *token, states, layer, rows.length > 0, slots.read, slots.write,
                decode_emission(slots, rows.start), lower_bound=bound, implementation=self.kernels,
            )  # fmt: skip
        else:
            o, states = kda_prefill(
                *token, states, layer, rows, slots.read, slots.write, slots.emit_position, slots.emit_slot,
                lower_bound=bound, implementation=self.kernels,
            )  # fmt: skip
        y = gated_rms_norm(o, self._output_gate(x).reshape(q.shape), self.o_norm[...], self.config.rms_norm_eps).astype(
            x.dtype
        )
        return tensor_sum(project(y.reshape(x.shape[0], -1), self.out[...])), states, conv_states

    def _output_gate(self, x: Float[Array, "T D"]) -> Float[Array, "T HK"]:
        if self.config.full_rank_gate:
            return project(x, self.g[...])
        return project(project(x, self.g_a[...]), self.g_b[...])
