"""Short causal convolution in plain XLA.

    y_t = SiLU( sum_j w_j x_{t - W + 1 + j} )        j = 0 .. W - 1

Inputs before the row come from its history slot, zeros before the sequence.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.rows import RaggedRows, tokens
from pallas_kernels.saves import saves
from pallas_kernels.slots import read_slots, write_slots


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
) -> tuple[Float[Array, "T C"], Float[Array, "layers S W1 C"]]:
    """See `conv1d.api.causal_conv1d`."""
    count, past = x.shape[0], weight.shape[0] - 1
    valid = tokens(rows, count).valid[:, None]
    present = rows.length > 0
    history, conv_states = read_slots(conv_states, layer, jnp.where(present, read, 0))
    x = jnp.where(valid, x, jnp.zeros_like(x))
    xf, w, h = (a.astype(jnp.float32) for a in (x, weight, history))

    # The input `back` tokens ago: from the packed axis, or from the history for the first tokens of a row. One
    # sum in one order for every token, so a sequence gives the same bits however it is cut into rows.
    y = w[past] * xf
    for back in range(1, past + 1):
        ago = jnp.pad(xf, ((back, 0), (0, 0)))[:count]
        for i in range(back):
            at = jnp.where(i < rows.length, rows.offset + i, count)
            ago = ago.at[at].set(h[:, past + i - back], mode="drop")
        y += w[past - back] * ago

    conv_states = keep_histories(x, history, conv_states, layer, rows, write, emit_position, emit_slot)
    return jnp.where(valid, jax.nn.silu(y), 0.0).astype(x.dtype), conv_states


def keep_histories(
    x: Float[Array, "T C"],
    history: Float[Array, "R W1 C"],
    conv_states: Float[Array, "layers S W1 C"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    write: Int32[Array, "R"],
    emit_position: Int32[Array, "R E"],
    emit_slot: Int32[Array, "R E"],
) -> Float[Array, "layers S W1 C"]:
    """The pool with the last inputs before every save of a step; `history` is what the rows began with."""
    count, past = x.shape[0], history.shape[1]
    wanted = saves(rows, write, emit_position, emit_slot)
    # Row-relative index of each input to keep; negative ones lie in the history.
    ago = jnp.arange(past, dtype=jnp.int32)[None, :] - past
    index = (wanted.position - rows.start[wanted.row])[:, None] + ago
    new = x[jnp.clip(rows.offset[wanted.row][:, None] + index, 0, count - 1)]
    old = history[wanted.row[:, None], jnp.clip(past + index, 0, past - 1)]
    kept = jnp.where((index < 0)[..., None], old.astype(x.dtype), new)
    return write_slots(conv_states, layer, wanted.slot, kept)
