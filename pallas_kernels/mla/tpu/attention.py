"""Latent attention on a TPU: one kernel for rows of any length, launched once for each class of rows."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.mla.pages import LANES, pages_of
from pallas_kernels.mla.stripe import rows_before
from pallas_kernels.mla.tpu.blocks import blocks_of, period, positions
from pallas_kernels.mla.tpu.kernel import kernel
from pallas_kernels.mla.tpu.plan import plan, units_of
from pallas_kernels.mla.tpu.state import BUFFERS, Lanes, Shape
from pallas_kernels.mla.tpu.tiles import SCALAR_BYTES, Tiles, choose_tiles, fits, vmem_bytes
from pallas_kernels.mla.visible import Visible
from pallas_kernels.rows import RaggedRows, max_tiles

# Columns of the block table in scalar memory for each lane, twice.
_WINDOW = 1024
# Tokens of a unit of long rows, and rows of its products: more make code too long and gain nothing.
_QUERIES, _MOST_ROWS = 16, 512


def _keep(piece: int, itemsize: int) -> Int32[Array, "pack twice_words 128"]:
    """Bits of rows to keep, where a 32-bit word holds `pack` neighbouring rows.

    In entry i, as many words as a piece of a page has are kept, then comes one whose first i rows are, then none.
    """
    pack, words = 4 // itemsize, piece * itemsize // 4
    place, more = np.arange(2 * words), np.arange(pack)
    first = ((np.int64(1) << 8 * itemsize * more) - 1)[:, None]
    bits = np.where(place < words, 0xFFFFFFFF, np.where(place == words, first, 0)).astype(np.uint32).view(np.int32)
    return jnp.asarray(np.broadcast_to(bits[..., None], (*bits.shape, LANES)))


def _finite_behind(
    ids: Int32[Array, "R C"], rows: RaggedRows, end: Int32[Array, "R"], page: int
) -> tuple[Int32[Array, "R C"], Bool[Array, ""]]:
    """Block tables with a page that is written throughout behind the end of each row; without such a page, unchanged.

    So what is copied from behind the end is finite and need not be wiped. Returns also whether there is one.

    Args:
      end: cache rows that this rank has of each row.
    """
    column = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    full = (ids > 0) & ((column + 1) * page <= end[:, None]) & (rows.length > 0)[:, None]
    page_id = ids.ravel()[jnp.argmax(full.ravel())]
    some = jnp.any(full)
    return jnp.where(some & (column * page >= end[:, None]), page_id, ids), some


def _launch(query, tail, cache, table, factor, work, place, earlier, *, shape, vmem, interpret, name):
    """One call of the kernel; `earlier` are outputs to go on with, or ()."""
    count = query.shape[0]
    blocks, lanes, rows = shape.blocks, shape.lanes, shape.rows
    tiles_of_heads = -(-shape.heads // LANES)
    member = jnp.tile(jnp.repeat(jnp.arange(blocks.pages, dtype=jnp.int32), blocks.piece), 2)[None]
    operands = (
        *work, factor, query, tail, table, cache, place[:, None], member, _keep(blocks.piece, cache.dtype.itemsize),
        *earlier,
    )  # fmt: skip
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    vmem_spec = pl.BlockSpec(memory_space=pltpu.VMEM)
    out_shape = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((count, tiles_of_heads, LANES), jnp.float32),
    )
    queries, stages = shape.queries, 2 * shape.slots + shape.spares
    places = lanes // shape.buffers * blocks.pages * blocks.groups
    scratch = [
        pltpu.VMEM((lanes * BUFFERS, queries, shape.heads, shape.latent), query.dtype),
        pltpu.VMEM((lanes * BUFFERS, queries, 2, shape.heads, LANES), query.dtype),
        pltpu.VMEM((3 * lanes, rows, shape.latent), jnp.float32),
        pltpu.VMEM((3 * lanes, rows, LANES), jnp.float32),
        pltpu.VMEM((3 * lanes, rows, LANES), jnp.float32),
        pltpu.VMEM((lanes, 1, blocks.keys), jnp.int32),
        pltpu.VMEM((stages, queries, shape.heads, shape.latent), query.dtype),
        pltpu.VMEM((stages, queries, tiles_of_heads, LANES), jnp.float32),
        pltpu.VMEM((shape.heads, shape.latent), query.dtype),
        pltpu.VMEM((tiles_of_heads, LANES), jnp.float32),
        pltpu.SMEM(((2 * lanes + 1) * table.shape[-1],), jnp.int32),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        pltpu.SemaphoreType.DMA((lanes + 1,)),
        pltpu.SemaphoreType.DMA((lanes * BUFFERS,)),
        pltpu.SemaphoreType.DMA((3,)),
        pltpu.SemaphoreType.DMA(()),
        *[pltpu.VMEM((BUFFERS, places, blocks.piece, LANES), cache.dtype)] * shape.buffers,
        *[pltpu.SMEM((lanes,), jnp.int32)] * 10,
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SMEM((BUFFERS,), jnp.int32),
        pltpu.SMEM((2 + 4 * (shape.slots + 1),), jnp.int32),
        pltpu.SMEM((5,), jnp.int32),
    ]
    assert len(scratch) == 16 + shape.buffers + len(Lanes._fields)
    scalars = len(work)

    def body(*refs):
        kept = len(operands) - len(earlier)
        kernel(*refs[:kept], *refs[len(operands) :], shape=shape, interpreted=bool(interpret))

    return pl.pallas_call(
        body,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=(),
            in_specs=[vmem_spec, hbm, hbm, hbm, hbm, vmem_spec, vmem_spec, vmem_spec, *[hbm] * len(earlier)],
            out_specs=(hbm, hbm),
            scratch_shapes=scratch,
        ),
        input_output_aliases={len(operands) - 2 + i: i for i in range(len(earlier))},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem, disable_bounds_checks=True),
        interpret=interpret,
        name=name,
    )(*operands)


def mla_attention(
    q_latent: Float[Array, "T N L"],
    q_rope: Float[Array, "T N P"],
    cache: Float[Array, "layers B page 128"],
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
    cache_scale: Float[Array, ""] | float | None = None,
    tiles: Tiles | None = None,
    returns_lse: bool = True,
    interpret: Any = False,
    name: str = "mla_attention",
) -> tuple[Float[Array, "T N L"], Float[Array, "T N"]]:
    """See `mla.api.mla_attention`.

    Args:
      tiles: of the launch for rows of up to `query_tile` tokens; None chooses.
      returns_lse: False leaves the LSE of all but slack undefined, to measure what it costs.
      interpret: as of `pl.pallas_call`.
    """
    count, heads, latent = q_latent.shape
    form = pages_of(cache, latent, q_rope.shape[-1])
    padded = -(-heads // 16) * 16
    if not fits(form, cache.dtype):
        raise ValueError(
            f"cache: got {cache.dtype} pages of {cache.shape[2:]}; the TPU kernel takes pages in planes, a multiple "
            "of 16 rows, of bfloat16, float8_e4m3fn or, but on tpu7x, float8_e4m3b11fnuz; use 'reference' for others"
        )

    # Queries in the dtype of the products: scale, cache scale and base 2 folded in.
    cap = visible.soft_cap
    factor = jnp.asarray(scale, jnp.float32) * (1.0 if cache_scale is None else cache_scale)
    factor = factor * (math.log2(math.e) if cap is None else 1.0 / cap)
    spread = ((0, 0), (0, padded - heads), (0, 0))
    query = jnp.pad((q_latent * factor).astype(jnp.bfloat16), spread)
    tail = jnp.pad((q_rope * factor).astype(jnp.bfloat16), spread)
    none = jnp.zeros_like(tail)
    tail = jnp.stack([jnp.concatenate([tail, none], axis=-1), jnp.concatenate([none, tail], axis=-1)], axis=1)
    out_scale = jnp.asarray(1.0 if cache_scale is None else cache_scale, jnp.float32) * jnp.ones(
        (1, LANES), jnp.float32
    )

    pages = cache.shape[1] * form.sections
    pool = cache.reshape(cache.shape[0] * pages, 2 * latent // LANES + 1, form.section // 2, LANES)
    table = form.section_table(jnp.clip(table, 0, cache.shape[1] - 1))
    lead = jnp.min(jnp.where(rows.length > 0, rows.offset, count))
    run = functools.partial(
        _class, query, tail, pool, table, out_scale, rows, layer, page=form.section, pages=pages, shards=shards,
        rank=rank, interleave=interleave, visible=visible, lse=returns_lse, interpret=interpret,
    )  # fmt: skip
    if query_tile <= 8:
        here = rows.length > 0
        most = max_tiles(count, table.shape[0], query_tile, anchored=False)
        out, lse = run(here, lead, (), queries=query_tile, most=most, tiles=tiles, name=name)
    else:
        few = (rows.length == 1) & (rows.length > 0)
        out, lse = run(few, lead, (), queries=1, most=min(count, table.shape[0]), tiles=tiles, name=name)
        queries = min(_QUERIES, max(1, _MOST_ROWS // padded))
        most = max_tiles(count, table.shape[0], queries, anchored=False)
        out, lse = run(
            rows.length > 1, 0 * lead, (out, lse), queries=queries, most=most, tiles=None, name=name + "_long"
        )
    lse = lse.reshape(count, -1)[:, :heads]
    return out[:, :heads].astype(q_latent.dtype), lse


def _class(
    query, tail, pool, table, out_scale, rows, layer, here, lead, earlier, *, page, pages, shards, rank, interleave,
    visible, lse, interpret, queries, most, tiles, name,
):  # fmt: skip
    """The launch for the rows that are `here`."""
    count, heads, latent = query.shape
    size = pool.dtype.itemsize
    if tiles is None:
        tiles, blocks = choose_tiles(heads, queries, latent, page, pool.dtype)
    else:
        blocks = blocks_of(page, latent, tiles.keys)
    vmem = vmem_bytes(tiles, blocks, heads, queries, latent, size)
    columns = table.shape[1]
    window = min(-(-columns // blocks.pages), _WINDOW // blocks.pages) * blocks.pages
    windows = -(-columns // window)
    shape = Shape(
        lanes=tiles.lanes, queries=queries, heads=heads, latent=latent, blocks=blocks, shards=shards,
        period=period(blocks, shards, interleave), visible=visible, groups=tiles.groups, window=window,
        splits=windows > 1, slots=tiles.slots, staggered=tiles.staggered, lse=lse,
        whole=tiles.whole and visible.window is None,
    )  # fmt: skip
    # Lanes read up to four blocks behind the last column of a window.
    width = -(-(window + 4 * blocks.pages) // LANES) * LANES
    null = jnp.asarray(layer, jnp.int32) * pages
    ids = jnp.pad(table, ((0, 0), (0, windows * window - columns)))
    clean = jnp.asarray(False)
    if shape.whole:
        end = rows_before(rows.start + rows.length, rank, shards, interleave)
        ids, clean = _finite_behind(ids, rows, end, page)
    units = units_of(rows, here, count, queries, most, blocks, table, shards, rank, interleave, visible)
    work = plan(units, tiles.lanes, shape.buffers, blocks, window, windows, width, tiles.slots, lead, null, clean)
    scalars = 4 * (sum(field.size for field in work) + (2 * tiles.lanes + 1) * width)
    if scalars > SCALAR_BYTES:
        raise ValueError(
            f"mla_attention: {scalars} bytes of scalar memory needed for {count} tokens, {table.shape[0]} rows and a "
            f"table of {columns} columns; {SCALAR_BYTES} may be used: give fewer at once"
        )
    ids = jnp.pad(ids.reshape(-1, 1, window), ((0, 0), (0, 0), (0, width - window))) + null
    if not interpret:
        # Small as it is, the compiler would else move it into vector memory first.
        ids = pltpu.with_memory_space_constraint(ids, pltpu.HBM)
        if queries > 1:  # and copies of as many tokens as a unit has, out of vector memory, are loops
            tail = pltpu.with_memory_space_constraint(tail, pltpu.HBM)
    place = positions(blocks, shards, rank, interleave)
    return _launch(
        query, tail, pool, ids, out_scale, work, place, earlier, shape=shape, vmem=vmem,
        interpret=interpret, name=name,
    )  # fmt: skip
