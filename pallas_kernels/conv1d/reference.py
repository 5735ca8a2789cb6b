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
    token = tokens(rows, count)
    present = rows.length > 0
    history, conv_states = read_slots(conv_states, layer, jnp.where(present, read, 0))
    x = jnp.where(token.valid[:, None], x, jnp.zeros_like(x))
    xf, w, h = (a.astype(jnp.float32) for a in (x, weight, history))

    # Taps inside the row: the packed axis shifted by `back` tokens.
    y = w[past] * xf
    for back in range(1, past + 1):
        shifted = jnp.pad(xf, ((back, 0), (0, 0)))[:count]
        y += w[past - back] * jnp.where((token.within >= back)[:, None], shifted, 0.0)
    # Taps before the row: only its first W - 1 tokens have any.
    for i in range(past):
        before = sum(w[past - back] * h[:, past + i - back] for back in range(i + 1, past + 1))
        at = jnp.where(i < rows.length, rows.offset + i, count)
        y = y.at[at].add(before, mode="drop")

    wanted = saves(rows, write, emit_position, emit_slot)
    # Row-relative index of each input to keep; negative ones lie in the history.
    ago = jnp.arange(past, dtype=jnp.int32)[None, :] - past
    index = (wanted.position - rows.start[wanted.row])[:, None] + ago
    new = x[jnp.clip(rows.offset[wanted.row][:, None] + index, 0, count - 1)]
    old = history[wanted.row[:, None], jnp.clip(past + index, 0, past - 1)]
    kept = jnp.where((index < 0)[..., None], old.astype(x.dtype), new)
    conv_states = write_slots(conv_states, layer, wanted.slot, kept)
    return jnp.where(token.valid[:, None], jax.nn.silu(y), 0.0).astype(x.dtype), conv_states
