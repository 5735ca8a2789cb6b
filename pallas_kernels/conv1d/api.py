"""Short causal convolution: signature and contract."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.conv1d import reference
from pallas_kernels.dispatch import Implementations, choose, on_hopper
from pallas_kernels.rows import RaggedRows

_CONV: Implementations = {
    "reference": reference.causal_conv1d,
    "tpu": "pallas_kernels.conv1d.tpu:causal_conv1d",
    "gpu": "pallas_kernels.conv1d.gpu:causal_conv1d",
}


def causal_conv1d(
    x: Float[Array, "T C"],
    weight: Float[Array, "W C"],
    conv_states: Float[Array, "layers S W1 C"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    read: Int32[Array, "R"],
    write: Int32[Array, "R"],
    emit_position: Int32[Array, "R E"],
    emit_slot: Int32[Array, "R E"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T C"], Float[Array, "layers S W1 C"]]:
    """SiLU of a depthwise causal convolution over ragged rows, history by slot.

    A slot holds the last W - 1 pre-convolution inputs, oldest first; zeros stand for inputs
    before the sequence. Slot rules are those of `kda.api`: slot 0 is never read and never
    written, and with no row or no token nothing is launched.

    Args:
      x: raw inputs, before the convolution.
      weight: one row per tap; the last row multiplies the newest token.
      conv_states: pool of histories [layers, S, W - 1, C]; donate it under jit.
      layer: which layer of the pool, may be traced.
      read, write: [R] slots of the history before the row and after its last token.
      emit_position, emit_slot: [R, E] further saves, at absolute token counts as in
        `kda_prefill`.

    Returns:
      Output [T, C] in the dtype of x (fp32 accumulation, zeros on slack tokens) and the pool.
    """

    def fits(form: str) -> bool:
        if form == "tpu":
            from pallas_kernels.conv1d import tpu

            return not tpu.refusal(x, weight, conv_states)
        return form != "gpu" or (x.shape[1] % 128 == 0 and weight.shape[0] > 1 and on_hopper())

    run = choose("causal_conv1d", implementation, _CONV, fits)
    if 0 in (x.shape[0], read.shape[0]):
        return jnp.zeros_like(x), conv_states
    return run(x, weight, conv_states, layer, rows, read, write, emit_position, emit_slot)
