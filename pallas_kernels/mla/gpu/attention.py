"""Absorbed latent attention on Hopper: the context of each block of query rows in stretches, merged in XLA."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels.mla.gpu.stretch import LATENT, attend
from pallas_kernels.mla.gpu.work import KEYS, QUERIES, stretches, work
from pallas_kernels.mla.merge import merge_lse
from pallas_kernels.mla.pages import LANES, TAIL, Pages, pages_of
from pallas_kernels.mla.visible import Visible
from pallas_kernels.rows import RaggedRows


def fits(form: Pages, dtype: DTypeLike, query: DTypeLike) -> bool:
    """Whether the kernel takes queries of a type over such pages."""
    return form.planes and form.latent == LATENT and form.section % KEYS == 0 and dtype == query == jnp.bfloat16


def _check(q_latent: jax.Array, q_rope: jax.Array, cache: jax.Array, form: Pages) -> None:
    types = {"q_latent": q_latent.dtype, "q_rope": q_rope.dtype, "cache": cache.dtype}
    for name, dtype in types.items():
        if dtype != jnp.bfloat16:
            raise ValueError(f"{name}: got {dtype}; the GPU kernel takes bfloat16; use implementation='reference'")
    if not form.planes or form.latent != LATENT or form.section % KEYS:
        raise ValueError(
            f"cache: got {'planes' if form.planes else 'rows'} of {form.rows} x ({form.latent} + {form.position}); the "
            f"GPU kernel takes pages in planes with a multiple of {KEYS} rows of {LATENT} + {TAIL}; use "
            "implementation='reference'"
        )


def _query_rows(q: Float[Array, "T N D"]) -> Float[Array, "TN D"]:
    """One head of one token a row; a block of them at least."""
    rows = q.reshape(-1, q.shape[-1])
    return jnp.pad(rows, ((0, max(QUERIES - rows.shape[0], 0)), (0, 0)))


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
    interpret: object = None,
) -> tuple[Float[Array, "T N L"], Float[Array, "T N"]]:
    """See `mla.api.mla_attention`. Blocks are of query rows, so `query_tile` is not needed.

    Raises:
      ValueError: anything but bf16, pages not in planes of a multiple of 64 rows of 512 + 64.
    """
    count, heads, latent = q_latent.shape
    form = pages_of(cache, latent, q_rope.shape[-1])
    _check(q_latent, q_rope, cache, form)
    total = count * heads
    table, page = form.section_table(table), form.section
    cache = cache.reshape(cache.shape[0], cache.shape[1] * form.sections, -1, LANES)
    jobs = work(rows, count, heads, page, table.shape[1], shards, rank, interleave, visible)
    parts = stretches(total, table.shape[0], table.shape[1] * page // KEYS)
    factor = scale * (1.0 if cache_scale is None else cache_scale)
    out, lse = attend(
        _query_rows(q_latent), _query_rows(q_rope), cache, layer, table, jobs, parts, heads, page, factor, shards, rank,
        interleave, visible, interpret,
    )  # fmt: skip

    def home(each: jax.Array) -> jax.Array:
        """Results of query rows, from those of blocks."""
        return each[:, jobs.block, jobs.slot].reshape(parts, count, heads, *each.shape[3:])

    seen = jobs.valid & (jobs.first < jobs.past)[jobs.block]
    lse = jnp.where(seen.reshape(count, heads), home(lse), -jnp.inf)
    if parts > 1:
        out, lse = merge_lse(home(out), lse)
    else:
        out, lse = jnp.where(jnp.isneginf(lse[0])[..., None], 0, home(out)[0]), lse[0]
    return (out if cache_scale is None else out * cache_scale).astype(q_latent.dtype), lse
