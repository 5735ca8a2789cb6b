"""Short causal convolution on Hopper: a program for 64 tokens of a row and 128 channels, one channel a thread.

A thread keeps the last W - 1 inputs of its channel in registers, loads the tokens to come a few ahead, and needs
nothing of other threads. What comes before the first token of a row is its history. Histories are read and saved
outside the kernel, as in the reference: W - 1 inputs for each row and save.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.conv1d.reference import keep_histories
from pallas_kernels.rows import RaggedRows, max_tiles, tiles
from pallas_kernels.slots import read_slots

# Channels of a program, one a thread of the warpgroup; tokens of a program; tokens that are loaded ahead.
CHANNELS, TOKENS, AHEAD = 128, 64, 4


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
    interpret: object = None,
) -> tuple[Float[Array, "T C"], Float[Array, "layers S W1 C"]]:
    """See `conv1d.api.causal_conv1d`."""
    if x.shape[1] % CHANNELS or weight.shape[0] < 2:
        raise ValueError(
            f"x: {x.shape[1]} channels, {weight.shape[0]} taps; the GPU kernel takes multiples of {CHANNELS} channels, "
            "one a thread, and at least 2 taps; use implementation='reference' for others"
        )
    most = max_tiles(x.shape[0], rows.length.shape[0], TOKENS, anchored=False)
    grid = tiles(rows, TOKENS, anchored=False, max_tiles=most)
    begins = grid.first == rows.offset[grid.row]
    numbers = jnp.stack([grid.row, grid.first, grid.high, begins.astype(jnp.int32)])
    history, conv_states = read_slots(conv_states, layer, jnp.where(rows.length > 0, read, 0))
    past = weight.shape[0] - 1

    def kernel(numbers, x, weight, history, out):
        tile, channels = jax.lax.axis_index("tile"), jax.lax.axis_index("channels")
        mine = pl.ds(channels * CHANNELS, CHANNELS)
        row, first, count, begins = (numbers[name, tile] for name in range(4))
        taps = [weight[nth, mine].astype(jnp.float32) for nth in range(past + 1)]

        def token(t):
            return x[jnp.clip(t, 0, x.shape[0] - 1), mine].astype(jnp.float32)

        def before(back):
            """The input `back` tokens before the tile: only the first tile of a row needs the history."""
            return jnp.where(begins != 0, history[row, past - back, mine].astype(jnp.float32), token(first - back))

        def one(t, carry):
            ago, ahead = carry
            new, *ahead = ahead
            ahead = (*ahead, token(first + jnp.minimum(t + AHEAD, count - 1)))
            y = taps[past] * new
            for back in range(1, past + 1):
                y += taps[past - back] * ago[back - 1]
            out[first + t, mine] = (y / (1.0 + jnp.exp(-y))).astype(out.dtype)
            return ((new, *ago[:-1]), ahead)

        @pl.when(count > 0)
        def _():
            ago = tuple(before(back) for back in range(1, past + 1))
            ahead = tuple(token(first + jnp.minimum(t, count - 1)) for t in range(AHEAD))
            jax.lax.fori_loop(0, count, one, (ago, ahead))

    out = jax.new_ref(jnp.zeros_like(x), memory_space=plgpu.GMEM)
    run_kernel = pl.kernel(
        kernel,
        out_type=(),
        mesh=plgpu.Mesh(grid=(most, x.shape[1] // CHANNELS), grid_names=("tile", "channels")),
        # Threads share nothing.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret or False,
    )
    with jax.named_scope("causal_conv1d"):
        run_kernel(numbers, x, weight, history, out)
    return jax.freeze(out), keep_histories(x, history, conv_states, layer, rows, write, emit_position, emit_slot)
