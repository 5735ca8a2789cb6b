"""Row writes of the MLA cache in plain XLA: one scatter, masked by ownership."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.mla import stripe
from pallas_kernels.rows import RaggedRows, tokens


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
) -> Float[Array, "layers B rows_per_rank LP"]:
    """See `mla.api.mla_write`."""
    blocks, per_rank = cache.shape[1:3]
    stripe.check(per_rank, shards, interleave)
    token = tokens(rows, new.shape[0])
    at = stripe.home(token.position, per_rank, shards, interleave)
    block = table[token.row, jnp.minimum(at.column, table.shape[1] - 1)]
    own = token.valid & (at.rank == rank) & (at.column < table.shape[1]) & (block != 0)
    return cache.at[layer, jnp.where(own, block, blocks), at.row].set(new.astype(cache.dtype), mode="drop")
