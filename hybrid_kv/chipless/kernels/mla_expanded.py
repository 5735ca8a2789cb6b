"""Expanded MLA attention of a prefill: its kernels, over context rows that are expanded already, and the whole path."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from hybrid_kv.chipless.cases import Case, Composite, Problem
from pallas_kernels.mla import mla_expanded
from pallas_kernels.mla.expanded import expand_tpu, tpu
from pallas_kernels.mla.expanded.forms import Context, Filled
from pallas_kernels.mla.expanded.plan import plan_of
from pallas_kernels.mla.expanded.workspace import UNSEEN, queue_of, units_of, workspace_of
from pallas_kernels.mla.pages import Pages, pool_shape
from pallas_kernels.mla.visible import visible
from pallas_kernels.rows import RaggedRows

LATENT, NOPE, ROPE, PAGE, WORKSPACE = 512, 128, 64, 256, 8192


def _attention(
    length: tuple[int, ...], context: tuple[int, ...], heads: int = 64, window: int | None = None
) -> Problem:
    """Rows packed one after the other over a context that fits into one piece."""
    count = sum(length)
    tiling = tpu.tiling(count)
    longest = max(n + c for n, c in zip(length, context, strict=True))
    needed = sum(-(-(n + c) // PAGE) * PAGE for n, c in zip(length, context, strict=True))
    space = workspace_of(needed, Pages(PAGE, LATENT, ROPE, planes=True), 1, 1, 1, tiling.block)
    ends = np.cumsum(length)
    rows = RaggedRows(*(jnp.asarray(a, jnp.int32) for a in (ends - np.asarray(length), length, context)))
    sees = visible(True, window, None)

    def run(state, query, nope, rope, value, rows):
        queue = queue_of(rows, -(-longest // PAGE), space, window)
        units = units_of(queue, 0, space.units)
        place = units.number[:, None] * space.unit + jnp.arange(space.unit, dtype=jnp.int32)
        at = jnp.where(place < (rows.start + rows.length)[units.row][:, None], place, UNSEEN)
        plan = plan_of(
            rows, units, queue.base < 0, queue.base < 0, at.reshape(-1, tiling.block), tiling, space.span,
            window, False,
        )  # fmt: skip
        state, query, nope, rope, value = jax.tree.map(
            lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), (state, query, nope, rope, value)
        )
        return tpu.attend(state, query, Context(nope, rope, value, at.reshape(-1)), plan, tiling, sees)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    # Shapes alone stand for what the scalars of the kernel do not depend on.
    query: Any = tpu.Queries(*cast(Any, (shape((count, heads * NOPE)), shape((count, heads * ROPE)))))
    arguments = (
        jax.eval_shape(functools.partial(tpu.empty, value=NOPE), query), query, shape((space.rows, heads * NOPE)),
        shape((space.rows, ROPE)), shape((heads * NOPE, space.rows)), rows,
    )  # fmt: skip
    pairs = sum(n * c + n * (n + 1) // 2 for n, c in zip(length, context, strict=True))
    moved = 2 * heads * (space.rows * 2 * NOPE + count * (2 * NOPE + ROPE))
    return Problem(
        run, arguments, hbm_bytes=moved, macs=pairs * heads * (2 * NOPE + ROPE), donate=(0,), per=(count, "token")
    )


def _expansion(count: int, heads: int = 64) -> Problem:
    """Keys and values of so many rows."""

    def run(rows, w_uk, w_uv, factors, used):
        rows, w_uk, w_uv = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (rows, w_uk, w_uv))
        return expand_tpu.expand(Filled(rows, used, count), w_uk, w_uv, factors, tpu.heads_per_program(heads))

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    arguments = (
        shape((count, LATENT + ROPE)), shape((heads, NOPE, LATENT)), shape((heads, NOPE, LATENT)),
        jax.ShapeDtypeStruct((2,), jnp.float32), np.int32(count),
    )  # fmt: skip
    made = 2 * count * heads * NOPE
    moved = 2 * (made + count * (LATENT + ROPE) + 2 * heads * NOPE * LATENT)
    return Problem(run, arguments, hbm_bytes=moved, macs=made * LATENT, per=(count, "row"))


def _path(length: tuple[int, ...], context: tuple[int, ...], dtype: Any, heads: int = 64) -> Problem:
    """All of `mla_expanded` on a pool of real size, against the multiplications of the absorbed form.

    Queries and outputs have heads side by side, as projections give and take them.
    """
    count, rows, page = sum(length), len(length), 128
    columns = -(-max(n + c for n, c in zip(length, context, strict=True)) // page)

    def run(nope, rope, w_uk, w_uv, cache, layer, step, table):
        nope, rope = (x.reshape(count, heads, -1) for x in (nope, rope))
        out, lse = mla_expanded(
            nope, rope, w_uk, w_uv, cache, layer, step, table, scale=0.07, shards=1, rank=0, interleave=1,
            workspace=WORKSPACE, cache_scale=1.0, implementation="tpu",
        )  # fmt: skip
        return out.reshape(count, -1), lse

    bf16, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=t) for t in (jnp.bfloat16, jnp.int32))
    pool = jax.ShapeDtypeStruct(pool_shape(7, 4096, page, LATENT, ROPE, planes=True), dtype)
    arguments = (
        bf16((count, heads * NOPE)), bf16((count, heads * ROPE)), bf16((heads, NOPE, LATENT)),
        bf16((heads, NOPE, LATENT)), pool, i32(()), RaggedRows(*cast(Any, [i32((rows,))] * 3)), i32((rows, columns)),
    )  # fmt: skip
    pairs = sum(n * c + n * (n + 1) // 2 for n, c in zip(length, context, strict=True))
    return Problem(run, arguments, hbm_bytes=0, macs=pairs * heads * (2 * LATENT + ROPE), per=(count, "token"))


_part = functools.partial
CASES = (
    Case(
        "expand-8192",
        _part(_expansion, 8192),
        cycles={"v6e": 400_000, "tpu7x": 386_000},
        bundles={"v6e": 1_600, "tpu7x": 1_600},
    ),
    Case(
        "2048",
        _part(_attention, (2048,), (0,)),
        cycles={"v6e": 364_000, "tpu7x": 360_000},
        bundles={"v6e": 12_000, "tpu7x": 12_000},
    ),
    Case(
        "4x512-on-3584",
        _part(_attention, (512,) * 4, (3584,) * 4),
        cycles={"v6e": 1_130_000, "tpu7x": 1_090_000},
        bundles={"v6e": 12_000, "tpu7x": 12_000},
    ),
    Case("ragged", _part(_attention, (1, 63, 300, 700, 984), (500, 1000, 0, 4000, 2000)), {}, {}),
    Case("expand-2048", _part(_expansion, 2048), {}, {}),
    *(Case(f"2048-{heads}-heads", _part(_attention, (2048,), (0,), heads), {}, {}) for heads in (12, 32, 96)),
)

# State of all queries, which a second piece reads and the first one wrote: tokens x heads x 144 fp32.
_STATE = 2 * 2048 * 64 * 144 * 4
COMPOSITES = tuple(
    composite
    for short, dtype, chips in (
        ("bf16", jnp.bfloat16, ("v6e", "tpu7x")),
        ("b11", jnp.float8_e4m3b11fnuz, ("v6e",)),
        ("e4m3", jnp.float8_e4m3fn, ("tpu7x",)),
    )
    for composite in (
        Composite(
            f"path-2048-{short}", _part(_path, (2048,), (0,), dtype), chips,
            (("2048", 1), ("expand-2048", 1)), (("round", 1), ("piece", 1), ("chunk of 4,096 rows", 1)),
        ),
        Composite(
            f"path-4x512-on-3584-{short}", _part(_path, (512,) * 4, (3584,) * 4, dtype), chips,
            (("4x512-on-3584", 1), ("expand-8192", 2)), (("round", 1), ("piece", 2), ("chunk of 4,096 rows", 2)),
            _STATE,
        ),
    )
)  # fmt: skip
