"""Expanded attention on a TPU: what the driver asks of an implementation, around the kernel in `kernel`.

The state of a group of query tiles stays in VMEM over all blocks of keys of a piece. It goes through HBM only where
other pieces of the context follow.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.mla.expanded import expand_tpu
from pallas_kernels.mla.expanded.forms import Context, Filled
from pallas_kernels.mla.expanded.kernel import KEYS, LANES, QUERIES, STATE, WIDTH, kernel
from pallas_kernels.mla.expanded.plan import MOST_TILES, Plan, Tiling, block_of, group_of
from pallas_kernels.mla.visible import Visible

QUICK = True
# Position keys of two heads fill whole lanes.
HEADS = 2

# Heads of a program: the more, the better the units overlap. Tiles of a group: the fewer bytes of keys.
_HEADS = 16
_VMEM_BYTES = 60 << 20


class Queries(NamedTuple):
    """Packed queries, heads side by side, padded to whole groups of tiles."""

    nope: Float[Array, "T ND"]
    rope: Float[Array, "T NP"]


class State(NamedTuple):
    """Results of the queries seen to the end, and what is kept of the others between pieces.

    Attributes:
      out: [T, N V] normalised; lse: [N, tiles, 1, Q] natural logarithm of the sum of exponentials.
      kept: [N, tiles, STATE, Q] see `kernel`.
    """

    out: Float[Array, "T NV"]
    lse: Float[Array, "N tiles 1 Q"]
    kept: Float[Array, "N tiles S Q"]


def fits(nope: Float[Array, "T N D"], rope: Float[Array, "T N P"], value: int) -> bool:
    """Whether queries and values are of types and widths that the kernel takes."""
    return (
        nope.dtype == rope.dtype == jnp.bfloat16
        and nope.shape[-1] == value == LANES
        and rope.shape[-1] == WIDTH - LANES
    )


def heads_per_program(heads: int) -> int:
    """The largest even divisor that is at most 16; `heads` is even."""
    return max(h for h in range(2, _HEADS + 1, 2) if heads % h == 0)


def tiling(tokens: int) -> Tiling:
    """Tiles of 256 queries in groups of up to four; blocks of 256 keys."""
    tiles = -(-tokens // QUERIES)
    groups = -(-tiles // MOST_TILES)
    return Tiling(QUERIES, KEYS, -(-tiles // groups), groups)


def queries(nope: Float[Array, "T N D"], rope: Float[Array, "T N P"], tiling: Tiling) -> Queries:
    """Queries as they come; the kernel transposes them.

    Raises:
      ValueError: queries that the kernel does not take.
    """
    if not nope.dtype == rope.dtype == jnp.bfloat16 or (nope.shape[-1], rope.shape[-1]) != (LANES, WIDTH - LANES):
        raise ValueError(
            f"q_nope, q_rope: got {nope.dtype}, {rope.dtype}, {nope.shape[-1]} and {rope.shape[-1]} wide; the TPU "
            f"kernel takes bfloat16, {LANES} and {WIDTH - LANES} wide; use implementation='xla'"
        )
    more = ((0, tiling.queries - nope.shape[0]), (0, 0))
    return Queries(*(jnp.pad(x.reshape(x.shape[0], -1), more) for x in (nope, rope)))


def empty(query: Queries, value: int) -> State:
    """A state that means nothing yet.

    Raises:
      ValueError: another width of values.
    """
    if value != LANES:
        raise ValueError(f"w_uv: got values {value} wide; the TPU kernel takes {LANES}; use implementation='xla'")
    count, width = query.nope.shape
    sizes = tiling(count)
    leading = (width // LANES, sizes.groups * sizes.per_group)
    return State(
        jax.lax.empty(query.nope.shape, query.nope.dtype),
        jax.lax.empty((*leading, 1, QUERIES), jnp.float32),
        jax.lax.empty((*leading, STATE, QUERIES), jnp.float32),
    )


def expand(
    filled: Filled,
    w_uk: Float[Array, "N D L"],
    w_uv: Float[Array, "N V L"],
    key_factor: Float[Array, ""],
    value_factor: Float[Array, ""],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "W ND"], Float[Array, "W P"], Float[Array, "NV W"]]:
    """Keys and values of all heads from cache rows, in bf16; sums and factors in fp32."""
    factors = jnp.stack([key_factor, value_factor])
    nope, value = expand_tpu.expand(filled, w_uk, w_uv, factors, heads_per_program(w_uk.shape[0]), interpret=interpret)
    rope = (filled.rows[:, w_uk.shape[-1] :].astype(jnp.float32) * key_factor).astype(nope.dtype)
    return nope, rope, value


def attend(
    state: State,
    query: Queries,
    context: Context,
    plan: Plan,
    tiling: Tiling,
    sees: Visible,
    *,
    interpret: Any = False,
    name: str = "mla_expanded",
) -> State:
    """Adds the keys of one piece of the context; the state is updated in place."""
    heads = state.lse.shape[0]
    group, tiles = heads_per_program(heads), tiling.per_group
    scalars = (plan.step, plan.turn, plan.following, plan.owner, plan.offset, plan.length, plan.start)
    at = jnp.broadcast_to(context.at[:, None], (context.at.shape[0], LANES))

    def tokens_map(h, i, step, *_):
        return group_of(step[i]), h

    def tile_map(h, i, step, *_):
        return h, group_of(step[i]), 0, 0

    def key_map(h, i, step, *_):
        return block_of(step[i]), h

    def value_map(h, i, step, *_):
        return h, block_of(step[i])

    def shared_map(h, i, step, *_):
        return block_of(step[i]), 0

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    dtype, queries = query.nope.dtype, tiles * QUERIES
    vmem = pltpu.VMEM
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(heads // group, plan.used),
        in_specs=[
            hbm,
            hbm,
            pl.BlockSpec((KEYS, group * LANES), key_map),
            pl.BlockSpec((KEYS, WIDTH - LANES), shared_map),
            pl.BlockSpec((KEYS, LANES), shared_map),
            pl.BlockSpec((group * LANES, KEYS), value_map),
            *[hbm] * len(state),
        ],
        out_specs=[
            pl.BlockSpec((queries, group * LANES), tokens_map),
            pl.BlockSpec((group, tiles, 1, QUERIES), tile_map),
            hbm,
        ],
        scratch_shapes=[
            vmem((2, queries, group * LANES), dtype),
            vmem((2, queries, group * (WIDTH - LANES)), dtype),
            vmem((group, tiles, WIDTH, QUERIES), dtype),
            vmem((group, tiles, STATE, QUERIES), jnp.float32),
            vmem((KEYS, QUERIES), jnp.float32),
            pltpu.SMEM((tiles,), jnp.int32),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.SemaphoreType.DMA((2, 2)),
        ],
    )
    operands = (*scalars, *query, context.nope, context.rope, at, context.value, *state)
    first = len(operands) - len(state)
    return State(
        *pl.pallas_call(
            functools.partial(kernel, sees=sees),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state],
            grid_spec=grid_spec,
            input_output_aliases={first + i: i for i in range(len(state))},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True
            ),
            interpret=interpret,
            name=name,
        )(*operands)
    )


def _lse(state: State, count: int) -> Float[Array, "T N"]:
    return state.lse.reshape(state.lse.shape[0], -1)[:, :count].T


def overflowed(state: State, valid: Bool[Array, "T"]) -> Bool[Array, ""]:
    """Whether a score of a valid token left the range of its reference."""
    lse = _lse(state, valid.shape[0])
    return jnp.any(valid[:, None] & jnp.isnan(lse))


def finish(state: State, count: int) -> tuple[Float[Array, "T NV"], Float[Array, "T N"]]:
    """Normalised output, heads side by side, and log-sum-exp; 0 and -inf without keys."""
    return state.out[:count], _lse(state, count)
