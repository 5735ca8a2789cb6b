"""Experts on TPU: one kernel for a step of few tokens, three for one of many."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.experts import plan
from pallas_kernels.experts.activation import Activation
from pallas_kernels.experts.packed import BLOCK, GROUP
from pallas_kernels.experts.tpu import rows
from pallas_kernels.experts.tpu.ffn import Work, ffn
from pallas_kernels.experts.tpu.tiles import (
    FEW,
    LANES,
    FfnTiles,
    RowTiles,
    ffn_tiles,
    form_of,
    padded,
    prefill_tiles,
    refusal,
)
from pallas_kernels.experts.weights import ExpertWeights, PackedExperts


def expert_ffn(
    x: Float[Array, "T D"],
    ids: Int32[Array, "T k"],
    weights: Float32[Array, "T k"],
    experts: ExpertWeights | PackedExperts,
    layer: Int32[Array, ""] | int,
    first: Int32[Array, ""] | int,
    *,
    activation: Activation,
    total: int | None = None,
    few: int = FEW,
    tiles: tuple[FfnTiles, RowTiles] | None = None,
    interpret: Any = False,
) -> Float[Array, "T D"]:
    """See `experts.api.expert_ffn`.

    Args:
      few: up to so many tokens every expert sees all of them.
      tiles: of a step of more tokens; None chooses.
      interpret: as of `pl.pallas_call`.

    Raises:
      ValueError: types or widths that the kernel does not take, or that do not fit into vector memory.
    """
    if why := refusal(x, experts):
        raise ValueError(why)
    form, tokens = form_of(experts), x.shape[0]
    chosen, weight = plan.shares(ids, weights, first, experts.local)
    if isinstance(experts, PackedExperts):
        x = _interleaved(x)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    if tokens <= few:
        missing = padded(tokens) - tokens
        share = jnp.pad(weight, ((0, 0), (0, missing)))[..., None]
        share = jnp.broadcast_to(share, (*share.shape[:2], LANES))
        active = plan.active(chosen)
        out = ffn(
            jnp.pad(x, ((0, missing), (0, 0))), share, form, Work(layer, active.used, active.expert),
            ffn_tiles(form, padded(tokens), fixed=True), activation, together=True, interpret=interpret,
        )  # fmt: skip
        return out[:tokens]
    most = min(ids.shape[1], experts.local)
    ffn_size, row_size = tiles or prefill_tiles(form, tokens, ids.shape[1], experts.local, total)
    order = plan.sort(chosen, weight, row_size.block, ffn_size.rows, most)
    gathered, share = rows.gather(x, order, row_size, interpret=interpret)
    work = Work(layer, order.tiles, order.tile_expert)
    out = ffn(gathered, share, form, work, ffn_size, activation, together=False, interpret=interpret)
    return rows.combine(out, tokens, order, row_size, interpret=interpret)


def _interleaved(x: Float[Array, "T D"]) -> jax.Array:
    """Columns in the order of `packed.interleaved`."""
    split = x.reshape(x.shape[0], x.shape[1] // GROUP, GROUP // BLOCK, BLOCK)
    return split.swapaxes(2, 3).reshape(x.shape)
