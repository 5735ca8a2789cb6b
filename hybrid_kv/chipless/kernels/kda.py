"""Kimi Delta Attention: activations in bf16, heads of 128 x 128, a pool of real size, the convolution apart."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from hybrid_kv.chipless.cases import Problem, limited
from pallas_kernels.kda import Commit, Records, kda_commit, kda_commit_verify, kda_decode, kda_prefill, kda_verify
from pallas_kernels.rows import RaggedRows

WIDTH, CHUNK, LAYERS, SLOTS, LAYER = 128, 64, 20, 520, 3
_activation = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
_single = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def _pool(heads: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((LAYERS, SLOTS, heads, WIDTH, WIDTH), dtype)


def _tokens(count: int, heads: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v, raw gate and raw beta, A_log and dt_bias."""
    wide = (_activation((count, heads, WIDTH)),) * 4
    return *wide, _activation((count, heads)), _single((heads,)), _single((heads, WIDTH))


def _slots(*counts: int) -> list[np.ndarray]:
    """So many slots each, all different, in no order."""
    order = np.random.default_rng(0).permutation(np.arange(1, SLOTS)).astype(np.int32)
    return np.split(order[: sum(counts)], np.cumsum(counts)[:-1])


def _call(op: Any, lower_bound: float | None, pool_at: int, **options: Any) -> Any:
    """The op on the TPU, its pool kept in HBM."""

    def run(*arguments: Any) -> Any:
        given = list(arguments)
        given[pool_at] = pltpu.with_memory_space_constraint(given[pool_at], pltpu.HBM)
        return op(*given, lower_bound=lower_bound, implementation="tpu", **options)

    return run


def _decode(rows: int, heads: int, dtype: Any = jnp.float32) -> Problem:
    """Every row active, its state updated where it lies."""
    (slots,) = _slots(rows)
    arguments = (*_tokens(rows, heads), _pool(heads, dtype), np.int32(LAYER), np.ones(rows, bool), slots, slots)
    state = heads * WIDTH * WIDTH * jnp.dtype(dtype).itemsize
    return Problem(
        _call(kda_decode, None, 7), (*arguments, np.zeros(rows, np.int32)), hbm_bytes=2 * rows * state, donate=(7,),
        per=(rows, "row"),
    )  # fmt: skip


def _speculate(op: Any, most: int, heads: int = 32, rows: int = 128) -> Problem:
    """Rows of `most` tokens; commits accept from one to all of them. What has to be moved is the state alone."""
    (slots,) = _slots(rows)
    each = np.arange(rows, dtype=np.int32)
    ragged = RaggedRows(*(jnp.asarray(a, jnp.int32) for a in (each * most, each * 0 + most, each * 0)))
    kept = (rows, most, heads, WIDTH)
    # Shapes alone stand for what the scalars of the kernels do not depend on.
    records: Any = Records(*cast(Any, (_single(kept), _activation(kept), _activation(kept))))
    which = Commit(*(jnp.asarray(a, jnp.int32) for a in (1 + each % most, slots, slots, each * 0, each * 0)))
    *tokens, slope, bias = _tokens(rows * most, heads)
    pool, layer = _pool(heads, jnp.float32), np.int32(LAYER)
    state = rows * heads * WIDTH * WIDTH * 4
    if op is kda_commit:
        arguments: tuple[Any, ...] = (records, slope, bias, pool, layer, which)
        return Problem(_call(op, None, 3), arguments, hbm_bytes=2 * state, donate=(3,), per=(rows, "row"))
    arguments = (*tokens, slope, bias, pool, layer, ragged)
    if op is kda_verify:
        run = _call(op, None, 7, most=most)
        return Problem(run, (*arguments, slots), hbm_bytes=state, per=(rows, "row"))
    run = _call(op, None, 7)
    return Problem(run, (*arguments, records, which), hbm_bytes=2 * state, donate=(7,), per=(rows, "row"))


def _prefill(
    lengths: tuple[int, ...] = (2048,),
    heads: int = 16,
    lower_bound: float | None = None,
    saves: tuple[int, ...] = (),
    most_saves: int = 4,
    start: int = 0,
) -> Problem:
    """Rows from one after the other in the packed axis, resumed at `start` (0: from nothing); saves: positions."""
    rows, count = len(lengths), sum(lengths)
    ends = np.cumsum(lengths)
    ragged = RaggedRows(*(jnp.asarray(a, jnp.int32) for a in (ends - lengths, lengths, np.full(rows, start))))
    own, emitted = _slots(rows, rows * most_saves)
    positions = np.zeros((rows, most_saves), np.int32)
    positions[:, : len(saves)] = saves
    emitted = np.where(positions > 0, emitted.reshape(rows, most_saves), 0).astype(np.int32)
    padded = -(-count // CHUNK) * CHUNK
    read = own if start else np.zeros_like(own)
    arguments = (
        *_tokens(padded, heads),
        _pool(heads, jnp.float32),
        np.int32(LAYER),
        ragged,
        read,
        own,
        positions,
        emitted,
    )
    states = (rows * (2 if start else 1) + np.count_nonzero(emitted)) * heads * WIDTH * WIDTH * 4
    chunks = sum(-(-length // CHUNK) for length in lengths)
    return Problem(
        _call(kda_prefill, lower_bound, 7), arguments, hbm_bytes=5 * count * heads * WIDTH * 2 + float(states),
        donate=(7,), per=(heads * chunks, "head, chunk"),
    )  # fmt: skip


def _two_launches(cut: int = 1000) -> Problem:
    """One row of 2048 tokens whose state at `cut` is saved by ending there and going on in a second call."""
    whole = _prefill(most_saves=0)
    *tokens, pool, layer, _, none, own, positions, slots = whole.arguments
    kept = own + 1
    parts = [(0, cut, 0, none, kept), (cut, 2048 - cut, cut, kept, own)]

    def run(*arguments: Any) -> Any:
        *given, pool = arguments
        for offset, length, start, read, write in parts:
            rows = RaggedRows(*(jnp.asarray([a], jnp.int32) for a in (offset, length, start)))
            numbers = map(jnp.asarray, (read, write, positions, slots))
            out, pool = _call(kda_prefill, None, 7)(*given, pool, layer, rows, *numbers)
        return out, pool

    return Problem(run, (*tokens, pool), hbm_bytes=whole.hbm_bytes, donate=(7,), per=whole.per)


_part = functools.partial
CASES = (
    limited("prefill-any", _prefill, {"v6e": (168000, 8500), "tpu7x": (168000, 8100)}),
    limited("prefill-bounded", _part(_prefill, lower_bound=-5.0), {"v6e": (130000, 7200), "tpu7x": (129000, 6800)}),
    limited("prefill-any-1-save", _part(_prefill, saves=(1024,))),
    limited("prefill-any-1-save-inside", _part(_prefill, saves=(1000,))),
    limited("prefill-any-4-saves", _part(_prefill, saves=(512, 1024, 1536, 1984))),
    limited("prefill-any-4-saves-inside", _part(_prefill, saves=(500, 1000, 1500, 2000)), {"v6e": (177000, 8500)}),
    limited("prefill-bounded-1-save-inside", _part(_prefill, lower_bound=-5.0, saves=(1000,))),
    limited(
        "prefill-bounded-4-saves-inside",
        _part(_prefill, lower_bound=-5.0, saves=(500, 1000, 1500, 1960)),
        {"v6e": (134_000, 7_200)},
    ),
    limited("prefill-bounded-4-saves-late", _part(_prefill, lower_bound=-5.0, saves=(500, 1000, 1500, 2000))),
    limited("prefill-bounded-8-heads", _part(_prefill, heads=8, lower_bound=-5.0)),
    limited("prefill-bounded-4-heads", _part(_prefill, heads=4, lower_bound=-5.0)),
    limited("prefill-bounded-ragged", _part(_prefill, lengths=(37, 900, 1111), lower_bound=-5.0)),
    limited("prefill-any-no-saves", _part(_prefill, most_saves=0)),
    limited("prefill-two-launches", _two_launches),
    limited("prefill-ragged", _part(_prefill, lengths=(1, 63, 64, 65, 700, 1155), start=100)),
    limited("prefill-512", _part(_prefill, lengths=(512,))),
    limited("prefill-8192", _part(_prefill, lengths=(8192,))),
    *(limited(f"prefill-{heads}-heads", _part(_prefill, heads=heads)) for heads in (1, 4, 8, 12, 32)),
    limited("decode-32-heads", _part(_decode, 128, 32), {"v6e": (616_000, 2_800), "tpu7x": (347_000, 2_850)}),
    *(limited(f"decode-{heads}-heads", _part(_decode, 128, heads)) for heads in (16, 12, 8, 4, 1)),
    limited(
        "decode-32-heads-bf16",
        _part(_decode, 128, 32, jnp.bfloat16),
        {"v6e": (313_000, 3_550), "tpu7x": (197_000, 3_500)},
    ),
    *(limited(f"decode-{heads}-heads-bf16", _part(_decode, 128, heads, jnp.bfloat16)) for heads in (16, 8)),
    *(limited(f"decode-{rows}-rows", _part(_decode, rows, 32)) for rows in (1, 16, 256)),
    limited("verify-4", _part(_speculate, kda_verify, 4), {"v6e": (318_000, 2_700)}),
    limited("commit-4", _part(_speculate, kda_commit, 4)),
    limited("commit-verify-4", _part(_speculate, kda_commit_verify, 4), {"v6e": (620_000, 3_750)}),
    limited("verify-8", _part(_speculate, kda_verify, 8)),
    limited("commit-8", _part(_speculate, kda_commit, 8)),
    limited("commit-verify-8", _part(_speculate, kda_commit_verify, 8)),
)
