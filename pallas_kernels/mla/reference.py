"""Absorbed latent attention over pages in plain XLA, with online softmax.

    s_tj = scale (q_latent_t . c_j + q_rope_t . k_pe_j)        p_j <= p_t
    o_t  = sum_j softmax(s)_tj c_j          lse_t = log sum_j exp s_tj

Query tiles (each inside one row) are processed a batch at a time; for each batch a loop visits groups
of block-table columns, as many as its furthest query needs. Live at a time: the keys of one
group for one batch, and the batch's scores against them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float, Int32

from pallas_kernels.mla import stripe
from pallas_kernels.mla.pages import pages_of
from pallas_kernels.mla.visible import Visible
from pallas_kernels.rows import RaggedRows, max_tiles, tiles, tokens

# Local rows of one group of pages, and query tokens of one batch of tiles.
_KEYS = 256
_QUERIES = 64


class _Softmax(NamedTuple):
    """Online softmax: running maximum, and the unnormalised output with the sum of weights behind column L."""

    top: Float[Array, "b n q"]
    out: Float[Array, "b n q L1"]


def _ones(latent: int) -> int:
    """Columns of ones beside the latent: up to a multiple of 16, where CPU products keep one order of sums."""
    return 16 + -latent % 16


def _accumulate(acc: _Softmax, score: Float[Array, "b n q k"], value: Float[Array, "b k L"]) -> _Softmax:
    """Add keys; masked scores are -inf.

    Columns of ones make the sum of weights one more output: the same rounding above and below the fraction bar,
    and no reduction whose order depends on the shape.
    """
    top = jnp.maximum(acc.top, jnp.max(score, axis=-1))
    # Before the first visible key the maximum is -inf, and -inf - -inf must not become NaN.
    anchor = jnp.where(jnp.isneginf(top), 0.0, top)
    p = jnp.exp(score - anchor[..., None])
    fade = jnp.exp(acc.top - anchor)
    value = jnp.pad(value, ((0, 0), (0, 0), (0, _ones(value.shape[-1]))), constant_values=1.0)
    # Turned before the product: CPU products keep one order of sums if both factors are summed over their last axis.
    value = jax.lax.optimization_barrier(jnp.swapaxes(value, 1, 2))
    added = jnp.einsum("bnqk,blk->bnql", p, value, precision=Precision.HIGHEST)
    return _Softmax(top, acc.out * fade[..., None] + added)


def mla_attention(
    q_latent: Float[Array, "T N L"],
    q_rope: Float[Array, "T N P"],
    cache: Float[Array, "layers B ..."],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    table: Int32[Array, "R C"],
    *,
    scale: float,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    query_tile: int,
    visible: Visible,
    cache_scale: Float[Array, ""] | float | None,
) -> tuple[Float[Array, "T N L"], Float[Array, "T N"]]:
    """See `mla.api.mla_attention`."""
    count, heads, latent = q_latent.shape
    if heads * query_tile == 1:
        query_tile = 2  # a product of one row sums in another order than one of many
    form = pages_of(cache, latent, q_rope.shape[-1])
    per_rank = form.rows
    stripe.check(per_rank, shards, interleave)
    block = per_rank * shards
    token = tokens(rows, count)

    most = max_tiles(count, table.shape[0], query_tile, anchored=False)
    batch = max(2, min(_QUERIES // query_tile, most))  # a batch of one sums in another order than one of many
    batches = -(-most // batch)
    grid = tiles(rows, query_tile, anchored=False, max_tiles=batches * batch)

    columns = min(max(1, _KEYS // per_rank), table.shape[1])
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % columns)))
    in_group = (
        jnp.arange(columns, dtype=jnp.int32)[:, None] * block
        + stripe.position_in_block(jnp.arange(per_rank, dtype=jnp.int32), rank, shards, interleave)
    ).ravel()
    keys = columns * per_rank

    factor = jnp.asarray(scale, jnp.float32) * (1.0 if cache_scale is None else cache_scale)
    # In fp32, and on the query: a multiplication of scores may be contracted with what follows, which moves bits.
    q = jnp.concatenate([q_latent, q_rope], axis=-1).astype(jnp.float32) * factor
    slot = jnp.arange(query_tile, dtype=jnp.int32)

    def one_batch(i, carry):
        out, lse = carry
        at = i * batch + jnp.arange(batch, dtype=jnp.int32)
        inside = slot < grid.high[at][:, None]
        index = jnp.clip(grid.first[at][:, None] + slot, 0, count - 1)
        query = jnp.where(inside[..., None, None], q[index], 0)
        query = jnp.moveaxis(query, 2, 1)
        own = grid.position[at][:, None] + slot
        last = own if visible.causal else (rows.start + rows.length)[grid.row[at]][:, None] - 1
        seen = jnp.where(inside, last, -1)
        furthest = jnp.max(seen, axis=1)
        pages = table[grid.row[at]]
        first: Any = 0
        if visible.window is not None:
            nearest = jnp.maximum(own - visible.window + 1, 0)
            first = jnp.min(jnp.where(inside, nearest, jnp.iinfo(jnp.int32).max)) // (columns * block)

        def one_group(j, acc):
            ids = jax.lax.dynamic_slice_in_dim(pages, j * columns, columns, axis=1)
            position = j * (columns * block) + in_group
            live = (position[None, :] <= furthest[:, None]) & jnp.repeat(ids != 0, per_rank, axis=1)
            if visible.window is not None:  # blocks before every window may have been given away
                live &= position[None, :] >= jnp.min(nearest, axis=1)[:, None]
            # Rows never written may hold NaN, and 0 * NaN would reach the output.
            key = form.split(cache[layer, ids]).reshape(batch, keys, form.width)
            key = jnp.where(live[..., None], key.astype(query.dtype), 0)
            score = jnp.einsum(
                "bnqd,bkd->bnqk", query, key, precision=Precision.HIGHEST, preferred_element_type=jnp.float32
            )
            score = visible.capped(score)
            mask = live[:, None, :] & (position[None, None, :] <= seen[:, :, None])
            if visible.window is not None:
                mask &= position[None, None, :] >= nearest[:, :, None]
            score = jnp.where(mask[:, None], score, -jnp.inf)
            return _accumulate(acc, score, key[..., :latent].astype(jnp.float32))

        shape = (batch, heads, query_tile)
        acc = _Softmax(
            jnp.full(shape, -jnp.inf, jnp.float32),
            jnp.zeros((*shape, latent + _ones(latent)), jnp.float32),
        )
        visits = jnp.minimum((jnp.max(furthest) + columns * block) // (columns * block), pages.shape[1] // columns)
        acc = jax.lax.fori_loop(first, visits, one_group, acc)
        total = acc.out[..., latent]
        safe = jnp.where(total > 0, total, 1.0)
        normed = acc.out[..., :latent] / safe[..., None]
        if cache_scale is not None:
            normed *= cache_scale
        log_sum = jnp.where(total > 0, acc.top + jnp.log(safe), -jnp.inf)
        return (
            jax.lax.dynamic_update_slice_in_dim(out, normed.astype(out.dtype), i * batch, axis=0),
            jax.lax.dynamic_update_slice_in_dim(lse, log_sum, i * batch, axis=0),
        )

    tiled = (batches * batch, heads, query_tile)
    carry = (
        jnp.zeros((*tiled, latent), q_latent.dtype),
        jnp.full(tiled, -jnp.inf, jnp.float32),
    )
    out, lse = jax.lax.fori_loop(0, (grid.used + batch - 1) // batch, one_batch, carry)
    home = grid.base[token.row] + token.within // query_tile
    within = token.within % query_tile
    valid = token.valid[:, None]
    return (
        jnp.where(valid[..., None], out[home, :, within], 0),
        jnp.where(valid, lse[home, :, within], -jnp.inf),
    )
