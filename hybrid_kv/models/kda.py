"""KDA mixer: projections, short convolution, gated delta rule, gated norm, output projection.

Heads are split over the axes of the tensor group that the configuration names (`kda_axes`), so a rank sees its own
heads in every weight and in both pools; bottlenecks of low-rank gates are replicated. Ranks that hold the same heads
compute the same, and nothing is summed over them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_kv.models.batch import ModelBatch, RecurrentInputs
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.execution import PLAIN, Execution
from hybrid_kv.models.linear import project
from hybrid_kv.models.norms import gated_rms_norm
from hybrid_kv.typing import Array, Float, Int32
from pallas_kernels.conv1d import causal_conv1d
from pallas_kernels.kda import kda_commit, kda_decode, kda_prefill, kda_verify
from pallas_kernels.kda.records import Commit, Records
from pallas_kernels.rows import RaggedRows


def decode_emission(recurrent: RecurrentInputs, start: Int32[Array, "R"]) -> Int32[Array, "R"]:
    """Slot that the state after a row's only token also goes to; 0 for none."""
    wanted = recurrent.emit_position == start[:, None] + 1
    return jnp.max(jnp.where(wanted, recurrent.emit_slot, 0), axis=1, initial=0)


class Pending(NamedTuple):
    """What a verify step leaves behind until it is known how many tokens stand: records of the states, and the inputs
    of the convolution."""

    records: Records
    inputs: Float[Array, "T channels"]


def reached_saves(
    recurrent: RecurrentInputs, start: Int32[Array, "R"], accepted: Int32[Array, "R"]
) -> tuple[Int32[Array, "R E"], Int32[Array, "R E"]]:
    """Of each row the saves that its accepted tokens reach, those first: after how many of them, and slots; else 0."""
    after = recurrent.emit_position - start[:, None]
    reached = (after >= 1) & (after <= accepted[:, None]) & (recurrent.emit_slot > 0)
    order = jnp.argsort(~reached, axis=1, stable=True)
    after, slot = (
        jnp.take_along_axis(jnp.where(reached, values, 0), order, 1) for values in (after, recurrent.emit_slot)
    )
    return after, slot


class KdaMixer(nnx.Module):
    """See the module. Weights are [out, in]; `qkv` packs the outputs as (head, {q, k, v}, channel)."""

    def __init__(self, config: KimiLinearConfig, params: dict[str, Array], how: Execution = PLAIN) -> None:
        self.config, self.kernels, self.stream = config, how.kernels, how.stream
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
        x = self.stream.gather(x)
        rows, slots = batch.rows, batch.recurrent
        mixed, conv_states = self._convolved(project(x, self.qkv[...]), conv_states, layer, rows, slots)
        token = self._token(x, mixed)
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
        return self._projected(x, o), states, conv_states

    def verify(
        self,
        x: Float[Array, "T D"],
        states: Float[Array, "layers S H K V"],
        conv_states: Float[Array, "layers S W1 *channels"],
        layer: Int32[Array, ""],
        batch: ModelBatch,
        *,
        most: int,
    ) -> tuple[Float[Array, "T D"], Pending]:
        """Mixer output of rows of at most `most` tokens, and what `commit` needs; the pools are only read."""
        x = self.stream.gather(x)
        rows, slots = batch.rows, batch.recurrent
        inputs = project(x, self.qkv[...])
        reading = slots._replace(write=jnp.zeros_like(slots.write), emit_slot=jnp.zeros_like(slots.emit_slot))
        mixed, _ = self._convolved(inputs, conv_states, layer, rows, reading)
        o, records = kda_verify(
            *self._token(x, mixed), states, layer, rows, slots.read, most=most,
            lower_bound=self.config.gate_lower_bound, implementation=self.kernels,
        )  # fmt: skip
        return self._projected(x, o), Pending(records, inputs)

    def commit(
        self,
        pending: Pending,
        states: Float[Array, "layers S H K V"],
        conv_states: Float[Array, "layers S W1 *channels"],
        layer: Int32[Array, ""],
        batch: ModelBatch,
        accepted: Int32[Array, "R"],
    ) -> tuple[Float[Array, "layers S H K V"], Float[Array, "layers S W1 *channels"]]:
        """The pools after the first `accepted` tokens of each row, with the saves that those reach."""
        slots = batch.recurrent
        after, slot = reached_saves(slots, batch.rows.start, accepted)
        gate = self.a_log[...], self.dt_bias[...].reshape(self.a_log.shape[0], -1)

        def commit(which: Commit, states: Array) -> Array:
            return kda_commit(
                pending.records, *gate, states, layer, which, lower_bound=self.config.gate_lower_bound,
                implementation=self.kernels,
            )  # fmt: skip

        def save(i: Int32[Array, ""], states: Array) -> Array:
            none = jnp.zeros_like(accepted)
            return commit(Commit(after[:, i], slots.read, slot[:, i], none, none), states)

        # A commit makes one save. Further ones, which a row hardly ever has, come before the state they start from.
        if slot.shape[1] > 1:
            states = jax.lax.fori_loop(1, jnp.max(jnp.sum(slot > 0, axis=1)), save, states)
        states = commit(Commit(accepted, slots.read, slots.write, after[:, 0], slot[:, 0]), states)
        saves = slots._replace(emit_position=batch.rows.start[:, None] + after, emit_slot=slot)
        rows = batch.rows._replace(length=accepted)
        _, conv_states = self._convolved(pending.inputs, conv_states, layer, rows, saves)
        return states, conv_states

    def _convolved(
        self,
        inputs: Float[Array, "T channels"],
        conv_states: Float[Array, "layers S W1 *channels"],
        layer: Int32[Array, ""],
        rows: RaggedRows,
        slots: RecurrentInputs,
    ) -> tuple[Float[Array, "T H 3 K"], Float[Array, "layers S W1 *channels"]]:
        """q, k and v of each head, and the convolution pool."""
        # Held in columns of 128 channels, the pool is reshaped here and back in the kernel, which costs nothing.
        histories = conv_states.reshape(*conv_states.shape[:3], -1)
        mixed, histories = causal_conv1d(
            inputs, self.conv[...].T, histories, layer, rows, slots.read, slots.write, slots.emit_position,
            slots.emit_slot, implementation=self.kernels,
        )  # fmt: skip
        width = self.config.kda_head_dim
        return mixed.reshape(inputs.shape[0], -1, 3, width), histories.reshape(conv_states.shape)

    def _token(
        self, x: Float[Array, "T D"], mixed: Float[Array, "T H 3 K"]
    ) -> tuple[Array, Array, Array, Array, Array, Array, Array]:
        """What a kernel takes of each token, and the parameters of the gate."""
        q, k, v = mixed[:, :, 0], mixed[:, :, 1], mixed[:, :, 2]
        raw_gate = project(project(x, self.f_a[...]), self.f_b[...]).reshape(q.shape)
        dt_bias = self.dt_bias[...].reshape(q.shape[1:])
        return q, k, v, raw_gate, project(x, self.beta[...]), self.a_log[...], dt_bias

    def _projected(self, x: Float[Array, "T D"], o: Float[Array, "T H V"]) -> Float[Array, "held D"]:
        """Output gate, norm and output projection, of the tokens of the stream that this rank holds."""
        axes = self.config.kda_axes
        if not axes:  # nothing to sum: of what is equal on all ranks only these tokens go on
            x, o = self.stream.own(x), self.stream.own(o)
        y = gated_rms_norm(o, self._output_gate(x).reshape(o.shape), self.o_norm[...], self.config.rms_norm_eps)
        y = project(y.astype(x.dtype).reshape(x.shape[0], -1), self.out[...])
        return self.stream.reduce(y, axes) if axes else y

    def _output_gate(self, x: Float[Array, "T D"]) -> Float[Array, "T HK"]:
        if self.config.full_rank_gate:
            return project(x, self.g[...])
        return project(project(x, self.g_a[...]), self.g_b[...])
