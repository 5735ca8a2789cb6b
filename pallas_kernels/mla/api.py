"""MLA row writes, latent attention and the merge of partial results: signatures and contracts.

Axes: T packed tokens, R rows, N heads, L latent width, P width of the position key, B blocks, C columns of a
block table.

A cache row is [normed latent (L) | position key (P)]; `pages` has the two forms in which a page of them may lie. The
token axis is striped over `shards` ranks in pieces of `interleave` tokens: a block holds rows_per_rank * shards tokens,
of which each rank keeps rows_per_rank (`stripe`). Block ids in the table are global, equal on every rank; block 0 is
the null block.

A pool of 8-bit floats has one scale: it holds rows / cache_scale, clipped to what the type can hold.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementations, choose, on_hopper
from pallas_kernels.mla import merge, reference, stripe, write
from pallas_kernels.mla.checks import check_index, check_pool, check_table
from pallas_kernels.mla.pages import LANES, Pages, pages_of
from pallas_kernels.mla.visible import visible
from pallas_kernels.rows import RaggedRows

_WRITE: Implementations = {"reference": write.mla_write, "tpu": "pallas_kernels.mla.tpu.write:mla_write"}
_ATTENTION: Implementations = {
    "reference": reference.mla_attention,
    "tpu": "pallas_kernels.mla.tpu.attention:mla_attention",
    "gpu": "pallas_kernels.mla.gpu:mla_attention",
}
_MERGE: Implementations = {"reference": merge.merge_lse}


def _written(form: Pages) -> Callable[[str], bool]:
    """Whether an implementation writes such pages."""
    return lambda name: name != "tpu" or (form.planes and form.section % 16 == 0)


def _read(form: Pages, dtype: Any, query: Any) -> Callable[[str], bool]:
    """Whether an implementation attends with queries of a type to such pages."""

    def fits(name: str) -> bool:
        # Asked on the platform of the kernel alone, where its module can be imported.
        if name == "tpu":
            return importlib.import_module("pallas_kernels.mla.tpu.tiles").fits(form, dtype)
        if name == "gpu":
            return on_hopper() and importlib.import_module("pallas_kernels.mla.gpu").fits(form, dtype, query)
        return True

    return fits


def mla_write(
    cache: Float[Array, "layers B *page"],
    new: Float[Array, "T LP"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    table: Int32[Array, "R C"],
    *,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    cache_scale: Float[Array, ""] | float | None = None,
    implementation: str | None = None,
) -> Float[Array, "layers B *page"]:
    """Store the rows of this step that `rank` owns.

    Rows of other ranks, slack tokens, null blocks and positions beyond the table write nothing. A block that is
    written belongs to one row of the step. Ids of blocks outside the pool write nothing.

    Args:
      cache: this rank's pool, pages of either form; donate it under jit.
      new: cache rows of the packed tokens.
      rank: index of this rank among the shards, may be traced.
      cache_scale: of an 8-bit pool; None for 1.

    Raises:
      ValueError: an interleave that does not divide the rows of a page, pages that do not fit the rows, a table of
        other rows, a layer or rank that does not exist.
    """
    check_pool(cache)
    form = pages_of(cache, *_widths(new.shape[-1]))
    stripe.check(form.rows, shards, interleave)
    check_table(rows, table)
    check_index("layer", layer, cache.shape[0])
    check_index("rank", rank, shards)
    if not new.shape[0] or not table.size:
        return cache
    run = choose("mla_write", implementation, _WRITE, _written(form))
    return run(
        cache, new, layer, rows, table, form=form, shards=shards, rank=rank, interleave=interleave,
        cache_scale=cache_scale,
    )  # fmt: skip


def _widths(width: int) -> tuple[int, int]:
    """L and P where only their sum is known: all that asks for them are planes, whose tail is half a lane tile."""
    position = min(LANES // 2, width)
    return width - position, position


def mla_attention(
    q_latent: Float[Array, "T N L"],
    q_rope: Float[Array, "T N P"],
    cache: Float[Array, "layers B *page"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    table: Int32[Array, "R C"],
    *,
    scale: float,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    query_tile: int,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    cache_scale: Float[Array, ""] | float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N L"], Float[Array, "T N"]]:
    """Attention of absorbed queries to the cache rows that live on this rank.

    The token at global position p sees global positions <= p, itself included: write its row first. Rows never
    written may hold NaN. Positions beyond the table and null blocks are not seen. Rows of one token, of a few
    and of many mix in one call.

    Args:
      q_latent, q_rope: absorbed query, split at the latent width.
      cache: this rank's pool, pages of either form.
      layer, rank: may be traced.
      scale: softmax scale (nope width + position width) ** -0.5.
      query_tile: most tokens of any row where that is few (1 for decoding, drafts + 1 for verifying), else 64. Rows may
        be longer; this only chooses how they are cut.
      causal: False lets every token see all positions of its row (up to start + length), as a block of drafts does.
      window: see only the last so many positions up to the own one; None for all.
      soft_cap: c of s -> c tanh(s / c) on scaled scores; None for none.
      cache_scale: of an 8-bit pool; None for 1.

    Returns:
      Normalised output [T, N, L] in the dtype of q_latent and the natural-log sum of
      exponentials [T, N] fp32. A token without keys on this rank, and slack: output 0, LSE -inf.

    Raises:
      ValueError: an interleave that does not divide the rows of a page, pages that do not fit the query, a table of
        other rows, a layer or rank that does not exist, a query tile, window or cap below what has a meaning.
    """
    check_pool(cache)
    form = pages_of(cache, q_latent.shape[-1], q_rope.shape[-1])
    stripe.check(form.rows, shards, interleave)
    if query_tile < 1:
        raise ValueError(f"query_tile: got {query_tile}; give the most tokens of a row, at least 1")
    if q_rope.shape[:2] != q_latent.shape[:2]:
        raise ValueError(f"q_rope: got {list(q_rope.shape)} beside q_latent {list(q_latent.shape)}; T and N must agree")
    check_table(rows, table)
    check_index("layer", layer, cache.shape[0])
    check_index("rank", rank, shards)
    sees = visible(causal, window, soft_cap)
    if not q_latent.size or not table.size:
        return jnp.zeros_like(q_latent), jnp.full(q_latent.shape[:2], -jnp.inf, jnp.float32)
    run = choose("mla_attention", implementation, _ATTENTION, _read(form, cache.dtype, q_latent.dtype))
    return run(
        q_latent, q_rope, cache, layer, rows, table, scale=scale, shards=shards, rank=rank,
        interleave=interleave, query_tile=query_tile, visible=sees,
        cache_scale=cache_scale,
    )  # fmt: skip


def merge_lse(
    outs: Float[Array, "M T N L"],
    lses: Float[Array, "M T N"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N L"], Float[Array, "T N"]]:
    """Merge M partial attentions over disjoint keys.

    An empty source has LSE -inf and is ignored whatever its output holds; if all are empty the
    result is 0 with LSE -inf. One partial and one accumulator are live at a time.

    Raises:
      ValueError: no sources, or LSEs that do not belong to the outputs.
    """
    if lses.shape != outs.shape[:-1] or not outs.shape[0]:
        raise ValueError(
            f"lses: got {list(lses.shape)} for outputs {list(outs.shape)}; give [M, T, N] with M at least 1"
        )
    return choose("merge_lse", implementation, _MERGE)(outs, lses)
