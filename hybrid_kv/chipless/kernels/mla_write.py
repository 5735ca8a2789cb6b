"""Row writes of latent attention: rows of 512 + 64, pages in planes, a pool of real size."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from hybrid_kv.chipless.cases import Case, Problem
from pallas_kernels.mla import mla_write
from pallas_kernels.mla.pages import pool_shape
from pallas_kernels.rows import RaggedRows

LATENT, POSITION, LAYERS, LAYER = 512, 64, 7, 3


def _write(lengths: tuple[int, ...], page: int = 64, dtype: Any = jnp.bfloat16, context: int = 4096) -> Problem:
    """Rows one after the other behind `context` cached tokens and a few more, each in pages of its own."""
    rows, total = len(lengths), sum(lengths)
    start = context + 7 * np.arange(rows)
    columns = -(-int(max(start + lengths)) // page)
    order = np.random.default_rng(0).permutation(rows * columns) + 1
    table = order.reshape(rows, columns).astype(np.int32)
    ends = np.cumsum(lengths)
    ragged = RaggedRows(*(jnp.asarray(a, jnp.int32) for a in (ends - lengths, lengths, start)))
    pool = jax.ShapeDtypeStruct(pool_shape(LAYERS, rows * columns + 1, page, LATENT, POSITION, planes=True), dtype)
    new = jax.ShapeDtypeStruct((total, LATENT + POSITION), jnp.bfloat16)

    def run(cache: Any, *given: Any) -> Any:
        cache = pltpu.with_memory_space_constraint(cache, pltpu.HBM)
        return mla_write(cache, *given, shards=1, rank=0, interleave=1, implementation="tpu")

    row = (LATENT + POSITION) * (2 + jnp.dtype(dtype).itemsize)
    return Problem(
        run, (pool, new, np.int32(LAYER), ragged, table), hbm_bytes=total * row, donate=(0,), per=(total, "token")
    )


_part = functools.partial
_decode, _prefill = (1,) * 128, (512,) * 4
CASES = (
    Case("decode", _part(_write, _decode), {"v6e": 6_500, "tpu7x": 7_400}, {"v6e": 850, "tpu7x": 860}),
    Case("decode-fp8", _part(_write, _decode, dtype=jnp.float8_e4m3fn), {"tpu7x": 8_100}, {"tpu7x": 1_040}),
    Case("decode-page-16", _part(_write, _decode, page=16), {}, {}),
    Case("decode-page-1024", _part(_write, _decode, page=1024), {}, {}),
    Case("verify-4", _part(_write, (4,) * 128), {}, {}),
    Case("prefill-4-512", _part(_write, _prefill), {"v6e": 26_700}, {"v6e": 1_010}),
    Case("prefill-4-512-fp8", _part(_write, _prefill, dtype=jnp.float8_e4m3fn), {}, {}),
)
