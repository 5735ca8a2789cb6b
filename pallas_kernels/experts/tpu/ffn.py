"""The feed-forward layers of experts, one kernel for decode and prefill.

The grid goes over tiles, each an expert and `rows` rows of tokens, and inside over blocks of the expert's width.
A step makes a block of the hidden layer of all rows and adds its share of the output to fp32 sums:

    sums += (weight * act(x gate_f^T, x up_f^T)) down_f^T

so the weights of an expert go through vector memory once a tile, in blocks that the pipeline fetches ahead. The stacks
of all layers go in whole; layer and expert are scalars of the block index. Only tiles in use are steps of the grid.

Decode: every tile has the same rows, all tokens of the step, with weight 0 for those that chose other experts, and the
sums go on over all tiles. Prefill: the rows of a tile are those of its expert alone (`rows`), and so are the sums.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.experts.activation import Activation
from pallas_kernels.experts.tpu.forms import Form
from pallas_kernels.experts.tpu.tiles import LANES, VMEM_BYTES, FfnTiles


class Work(NamedTuple):
    """What the tiles of a call are.

    Attributes:
      layer: [1] of the stacks.
      used: [1] tiles in use, at least 1.
      expert: [M] of each tile, among the local ones.
    """

    layer: Int32[Array, "1"]
    used: Int32[Array, "1"]
    expert: Int32[Array, "M"]


def _kernel(
    layer: Any, used: Any, expert: Any, x: Any, share: Any, *refs: Any, form: Form, width: int, activation: Activation,
    together: bool,
) -> None:  # fmt: skip
    weights, (out, sums, *scratch) = refs[: len(form.arrays)], refs[len(form.arrays) :]
    tile, block, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1
    begins = (block == 0) & (tile == 0) if together else block == 0
    ends = (block == last) & (tile == used[0] - 1) if together else block == last

    @pl.when(begins)
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    def some_columns(part: Any, carry: Any) -> Any:
        # Unpacking stands beside the products: their operations are others, and the compiler overlaps them.
        found = form.part(weights, scratch, part)
        weight = share[:, :1]
        gate, up = form.gate_up(x[...], found)
        # Selected, so that an overflow in an expert that a token did not choose stays outside.
        hidden = jnp.where(weight != 0, weight * activation(gate, up), 0.0)
        sums[...] += form.down(hidden.astype(x.dtype), found)
        return carry

    parts = form.parts(width)
    if parts == 1:
        some_columns(0, None)
    else:
        jax.lax.fori_loop(0, parts, some_columns, None)

    @pl.when(ends)
    def _() -> None:
        out[...] = sums[...].astype(out.dtype)


def ffn(
    x: Float[Array, "rows D"],
    share: Float32[Array, "..."],
    form: Form,
    work: Work,
    tiles: FfnTiles,
    activation: Activation,
    *,
    together: bool,
    interpret: Any = False,
) -> Float[Array, "rows D"]:
    """Outputs of the experts, weighted.

    Args:
      x: rows of all tiles, one behind the other, or of the only one if `together`. Else it is overwritten.
      share: [rows, 128] weight of each row, in all lanes; with `together` [E, rows, 128] by expert.
      together: all tiles have the same rows, and the sums go on over all tiles.

    Returns:
      Rows like x. Without `together` rows of tiles not in use mean nothing.
    """
    hidden, rows, scalars = x.shape[1], tiles.rows, len(work)
    at = (lambda t, f, *_: (0, 0)) if together else (lambda t, f, *_: (t, 0))
    shared = pl.BlockSpec((None, rows, LANES), lambda t, f, layer, used, expert: (expert[t], 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, form=form, width=tiles.width, activation=activation, together=together),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=(work.used[0], form.width // tiles.width),
            in_specs=[
                pl.BlockSpec((rows, hidden), at), shared if together else pl.BlockSpec((rows, LANES), at),
                *form.specs(tiles.width),
            ],
            out_specs=pl.BlockSpec((rows, hidden), at),
            scratch_shapes=[pltpu.VMEM((rows, hidden), jnp.float32), *form.scratch(tiles.width)],
        ),
        input_output_aliases={} if together else {scalars: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="experts_ffn",
    )(*work, x, share, *form.arrays)  # fmt: skip
