"""Row writes of the MLA cache in plain XLA: scatters, masked by ownership."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.mla import stripe
from pallas_kernels.mla.pages import LANES, TAIL, Pages
from pallas_kernels.rows import RaggedRows, tokens


def stored(new: Float[Array, "..."], dtype: jnp.dtype, cache_scale: Float[Array, ""] | float | None) -> Array:
    """Values as the pool holds them: divided by the scale, clipped where the type is narrow.

    Raises:
      ValueError: a type that is no float.
    """
    if cache_scale is not None:
        new = new.astype(jnp.float32) / cache_scale
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"cache: got a pool of {jnp.dtype(dtype)}; rows are stored as floats")
    if jnp.dtype(dtype).itemsize == 1:
        most = float(jnp.finfo(dtype).max)
        new = jnp.clip(new, -most, most)
    return new.astype(dtype)


def mla_write(
    cache: Float[Array, "layers B *page"],
    new: Float[Array, "T LP"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    table: Int32[Array, "R C"],
    *,
    form: Pages,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    cache_scale: Float[Array, ""] | float | None,
) -> Float[Array, "layers B *page"]:
    """See `mla.api.mla_write`. form: of the pages."""
    blocks = cache.shape[1]
    token = tokens(rows, new.shape[0])
    at = stripe.home(token.position, form.rows, shards, interleave)
    block = table[token.row, jnp.minimum(at.column, table.shape[1] - 1)]
    own = token.valid & (at.rank == rank) & (at.column < table.shape[1]) & (block > 0) & (block < blocks)
    target = jnp.where(own, block, blocks)
    values = stored(new, cache.dtype, cache_scale)
    if not form.planes:
        return cache.at[layer, target, at.row].set(values, mode="drop")
    n, planes = form.section, form.latent // LANES
    row, first = at.row % n, at.row // n * (form.shape[0] // form.sections)
    latent = values[:, : form.latent].reshape(-1, planes, LANES)
    rows_of_planes = (first + row)[:, None] + n * jnp.arange(planes, dtype=jnp.int32)
    cache = cache.at[layer, target[:, None], rows_of_planes].set(latent, mode="drop")
    half, tail = row // (n // 2), first + n * planes + row % (n // 2)
    lanes = half[:, None] * TAIL + jnp.arange(TAIL, dtype=jnp.int32)
    return cache.at[layer, target[:, None], tail[:, None], lanes].set(values[:, form.latent :], mode="drop")
