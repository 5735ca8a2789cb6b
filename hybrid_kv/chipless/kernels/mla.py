"""Latent attention in absorbed form: pools of real size, q and outputs in bf16, costs for each key a rank holds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from hybrid_kv.chipless.cases import Case, Problem
from pallas_kernels.mla.tpu.attention import mla_attention
from pallas_kernels.mla.tpu.tiles import Tiles
from pallas_kernels.mla.visible import Visible
from pallas_kernels.rows import RaggedRows

LATENT, POSITION, LAYERS, LAYER, ROWS = 512, 64, 8, 3, 128
SCALE = 192**-0.5
BF16, E4M3, B11 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e4m3b11fnuz


def ragged_lengths(rows: int = ROWS) -> np.ndarray:
    """Contexts of 512 to 8192 tokens."""
    return np.random.default_rng(0).integers(512, 8193, rows)


def _attention(
    lengths: np.ndarray | None = None,
    heads: int = 64,
    page: int = 256,
    dtype: Any = BF16,
    tokens: int = 1,
    shards: int = 1,
    tiles: Tiles | None = None,
    query_tile: int | None = None,
) -> Problem:
    """Rows of `tokens` new tokens at the end of sequences of `lengths` tokens; a stripe of one of `shards` ranks."""
    lengths = ragged_lengths() if lengths is None else lengths
    rows = len(lengths)
    columns = -(-int(lengths.max()) // (page * shards))
    needed = -(-lengths // (page * shards))
    ids = np.random.default_rng(1).permutation(int(needed.sum())) + 1
    table = np.zeros((rows, columns), np.int32)
    for row, (at, count) in enumerate(zip(np.cumsum(needed) - needed, needed, strict=True)):
        table[row, :count] = ids[at : at + count]
    each = np.arange(rows, dtype=np.int32)
    ragged = RaggedRows(*(jnp.asarray(a, jnp.int32) for a in (each * tokens, each * 0 + tokens, lengths - tokens)))
    pool = jax.ShapeDtypeStruct((LAYERS, int(needed.sum()) + 1, page * (LATENT + POSITION) // 128, 128), dtype)
    q = jax.ShapeDtypeStruct((rows * tokens, heads, LATENT), BF16)
    rope = jax.ShapeDtypeStruct((rows * tokens, heads, POSITION), BF16)

    def run(q: Any, rope: Any, pool: Any, layer: Any, ragged: RaggedRows, table: Any) -> Any:
        q, pool = (pltpu.with_memory_space_constraint(a, pltpu.HBM) for a in (q, pool))
        return mla_attention(
            q, rope, pool, layer, ragged, table, scale=SCALE, shards=shards, rank=0, interleave=1,
            query_tile=query_tile or tokens, visible=Visible(), tiles=tiles,
        )  # fmt: skip

    keys = int(np.sum(lengths)) // shards
    size = jnp.dtype(dtype).itemsize
    moved = keys * (LATENT + POSITION) * size + rows * tokens * heads * (2 * LATENT + POSITION) * 2
    return Problem(
        run, (q, rope, pool, np.int32(LAYER), ragged, table), hbm_bytes=float(moved),
        macs=float(keys * heads * tokens * (2 * LATENT + POSITION)), per=(keys, "key"),
    )  # fmt: skip


_part = functools.partial
_TRIES = {
    f"try-{name}-{lanes}x{keys}g{groups}-p{page}": _part(
        _attention, dtype=dtype, page=page, tiles=Tiles(lanes, keys, groups)
    )
    for name, dtype in (("bf16", BF16), ("e4m3", E4M3), ("b11", B11))
    for lanes in (4, 8, 12, 16, 20, 24, 32)
    for keys in (256, 512, 1024)
    for groups in (1, 2, 3, 4)
    for page in (64, 256, 1024)
}
CASES = (*(Case(name, build, {}, {}) for name, build in _TRIES.items()),)
