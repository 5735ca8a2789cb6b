"""MLA row writes, latent attention and the merge of partial results: signatures and contracts.

Axes: T packed tokens, R rows, N heads, L latent width, P position width, B blocks, C columns of a
block table.

A cache row is [normed latent (L) | position key (P)]. The token axis is striped over `shards`
ranks in pieces of `interleave` tokens: a block holds rows_per_rank * shards tokens, of which each
rank keeps rows_per_rank (`stripe`). Block ids in the table are global, equal on every rank;
block 0 is the null block.
"""

from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import choose
from pallas_kernels.mla import merge, reference, write
from pallas_kernels.rows import RaggedRows

_WRITE = {"reference": write.mla_write}
_ATTENTION = {"reference": reference.mla_attention}
_MERGE = {"reference": merge.merge_lse}


def mla_write(
    cache: Float[Array, "layers B rows_per_rank LP"],
    new: Float[Array, "T LP"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    table: Int32[Array, "R C"],
    *,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    implementation: str | None = None,
) -> Float[Array, "layers B rows_per_rank LP"]:
    """Store the rows of this step that `rank` owns.

    Rows of other ranks, slack tokens, null blocks and positions beyond the table write nothing.

    Args:
      cache: this rank's pool; donate it under jit.
      new: cache rows of the packed tokens.
      rank: index of this rank among the shards, may be traced.
    """
    run = choose("mla_write", implementation, _WRITE)
    return run(cache, new, layer, rows, table, shards=shards, rank=rank, interleave=interleave)


def mla_attention(
    q_latent: Float[Array, "T N L"],
    q_rope: Float[Array, "T N P"],
    cache: Float[Array, "layers B rows_per_rank LP"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    table: Int32[Array, "R C"],
    *,
    scale: float,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    query_tile: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N L"], Float[Array, "T N"]]:
    """Causal attention of absorbed queries to the rows that live on this rank.

    The token at global position p sees global positions <= p, itself included: write its row
    first. Rows never written may hold NaN. Positions beyond the table are not seen.

    Args:
      q_latent, q_rope: absorbed query, split at the latent width.
      scale: softmax scale (nope width + position width) ** -0.5.
      query_tile: tokens of a query tile: 1 when every row has one token, else 64.

    Returns:
      Normalised output [T, N, L] in the dtype of q_latent and the natural-log sum of
      exponentials [T, N] fp32. A token without keys on this rank, and slack: output 0, LSE -inf.
    """
    run = choose("mla_attention", implementation, _ATTENTION)
    return run(
        q_latent, q_rope, cache, layer, rows, table, scale=scale, shards=shards, rank=rank,
        interleave=interleave, query_tile=query_tile,
    )  # fmt: skip


def merge_lse(
    outs: Float[Array, "M T N L"],
    lses: Float[Array, "M T N"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N L"], Float[Array, "T N"]]:
    """Merge M partial attentions over disjoint keys.

    An empty source has LSE -inf and is ignored whatever its output holds; if all are empty the
    result is 0 with LSE -inf.
    """
    return choose("merge_lse", implementation, _MERGE)(outs, lses)
