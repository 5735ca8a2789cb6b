"""Latent attention in absorbed form: pools of real size, q and outputs in bf16, costs for each key a rank holds."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from hybrid_kv.chipless.cases import Case, Problem, limited
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
    layers: int = LAYERS,
    lse: bool = True,
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
    pool = jax.ShapeDtypeStruct((layers, int(needed.sum()) + 1, page * (LATENT + POSITION) // 128, 128), dtype)
    q = jax.ShapeDtypeStruct((rows * tokens, heads, LATENT), BF16)
    rope = jax.ShapeDtypeStruct((rows * tokens, heads, POSITION), BF16)

    def run(q: Any, rope: Any, pool: Any, layer: Any, ragged: RaggedRows, table: Any) -> Any:
        q, pool = (pltpu.with_memory_space_constraint(a, pltpu.HBM) for a in (q, pool))
        return mla_attention(
            q, rope, pool, layer, ragged, table, scale=SCALE, shards=shards, rank=0, interleave=1,
            query_tile=query_tile or tokens, visible=Visible(), tiles=tiles, returns_lse=lse,
        )  # fmt: skip

    keys = int(np.sum(lengths)) // shards
    size = jnp.dtype(dtype).itemsize
    moved = keys * (LATENT + POSITION) * size + rows * tokens * heads * (2 * LATENT + POSITION) * 2
    return Problem(
        run, (q, rope, pool, np.int32(min(LAYER, layers - 1)), ragged, table), hbm_bytes=float(moved),
        macs=float(keys * heads * tokens * (2 * LATENT + POSITION)), per=(keys, "key"),
    )  # fmt: skip


_part = functools.partial
_TYPES = {"bf16": BF16, "e4m3": E4M3, "b11": B11}
_SMALL_PAGES = {"e4m3": {"tpu7x": (312_000, 9_100)}}
_EQUAL, _LONG = np.full(ROWS, 4096), 8 * ragged_lengths()


def _each(name: str, limits: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Case]:
    """A case for each type of cache; limits by type, none for most."""
    for short, dtype in _TYPES.items():
        yield limited(f"{name}-{short}", _part(_attention, dtype=dtype, **options), (limits or {}).get(short))


CASES = (
    limited("decode-bf16", _part(_attention), {"v6e": (795_000, 6_800), "tpu7x": (510_000, 9_700)}),
    limited("decode-b11", _part(_attention, dtype=B11), {"v6e": (410_000, 5_250)}),
    limited("decode-e4m3", _part(_attention, dtype=E4M3), {"tpu7x": (308_000, 9_000)}),
    *(
        case
        for page in (16, 32, 64, 128, 1024)
        for case in _each(f"decode-page-{page}", _SMALL_PAGES if page == 64 else None, page=page)
    ),
    *_each("decode-equal", lengths=_EQUAL),
    *(case for heads in (12, 32, 96, 128) for case in _each(f"decode-{heads}-heads", heads=heads)),
    *_each("decode-8-times-as-long", lengths=_LONG),
    *_each("decode-stripe-of-8", lengths=_LONG, shards=8),
    *(
        case
        for thousands, rows in ((32, 128), (128, 32), (1024, 8))
        for name, shards in (("", 1), ("-stripe-of-8", 8))
        for case in _each(
            f"decode-{thousands}k{name}", lengths=np.full(rows, thousands << 10), shards=shards, layers=1
        )
    ),
    *_each("decode-without-lse", lse=False),
    limited(
        "verify-4-bf16", _part(_attention, tokens=4), {"v6e": (985_000, 14_200), "tpu7x": (1_040_000, 10_800)}
    ),
    limited("verify-4-b11", _part(_attention, tokens=4, dtype=B11), {"v6e": (960_000, 13_900)}),
    limited("verify-4-e4m3", _part(_attention, tokens=4, dtype=E4M3), {"tpu7x": (1_020_000, 11_400)}),
    *(case for tokens in (2, 8) for case in _each(f"verify-{tokens}", tokens=tokens)),
    *_each("verify-4-32-heads", tokens=4, heads=32),
    *_each("chunk-16", tokens=16, query_tile=64, lengths=ragged_lengths(16)),
    *(
        limited(f"try-{short}-{n}x{keys}-{groups}", _part(_attention, dtype=dtype, tiles=Tiles(n, keys, groups)))
        for short, dtype in _TYPES.items()
        for n, keys, groups in ((16, 256, 1), (32, 256, 4), (8, 512, 1), (8, 512, 2), (16, 512, 1), (16, 512, 2),
                                    (16, 512, 4), (24, 512, 3), (8, 1024, 2))
    ),
)  # fmt: skip
