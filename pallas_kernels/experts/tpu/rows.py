"""Rows of tokens to the experts and back, on the matrix unit.

Blocks of tokens are multiplied with a matrix of ones and zeros that is made where it is needed: P[r, t] says whether
row r is token t. P x gathers, P^T y adds up what the experts of a token gave, in fp32. A row costs as many
multiplications as a block has tokens, a small part of those of an expert, and nothing goes row by row: rows are copied
in groups of `plan.GROUP`, the rows of a tile. A gather by XLA would have to move as many rows as there could be at
most, which on one of 16 ranks is 16 times what there is.

A product mixes tokens, so values that are no finite numbers are taken as 0 here: a token with one, whose result means
nothing anyway, must not spoil those of other tokens.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.experts.plan import GROUP, Sorted
from pallas_kernels.experts.tpu.tiles import LANES, VMEM_BYTES, RowTiles, narrow

# At most: groups whose ones are made side by side; rows gathered, and tokens summed, at once.
ABREAST, ROWS, TOKENS = 16, 256, 256


def rows_of(group: Any) -> Any:
    """Rows of a group of a chunk or of all rows."""
    return pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) <= jnp.finfo(x.dtype).max, x, 0).astype(x.dtype)


class _Groups(NamedTuple):
    """Groups of all blocks, done in chunks of a block. Refs of `plan.Sorted`.

    Attributes:
      most: groups of a block, at most.
      chunk: groups of a chunk.
    """

    expert: Any
    rank: Any
    row: Any
    count: Any
    most: int
    chunk: int

    def chunks(self, block: Any) -> Any:
        """Of a block; at least one."""
        return jnp.maximum(pl.cdiv(self.count[block], self.chunk), 1)

    def used(self, block: Any, chunk: Any) -> Any:
        """Groups of a chunk that are in use."""
        return jnp.minimum(self.count[block] - chunk * self.chunk, self.chunk)

    def each(self, block: Any, chunk: Any, body: Any) -> None:
        """body(place in the chunk, first row) for the groups of a chunk that are in use."""
        first = block * self.most + chunk * self.chunk

        def one(j: Any, carry: Any) -> Any:
            body(j, rows_of(self.row[first + j]))
            return carry

        lax.fori_loop(0, self.used(block, chunk), one, None)

    def ones(self, block: Any, chunk: Any, ranks: Any, place: Any, also: Any = None) -> None:
        """Writes P of a chunk, [rows, tokens]; also(rows of the chunk, matches, expert) sees each group."""
        tokens = place.shape[1]
        first, used = block * self.most + chunk * self.chunk, self.used(block, chunk)
        offset = lax.broadcasted_iota(jnp.int32, (GROUP, tokens), 0)

        abreast = math.gcd(ABREAST, self.chunk)

        def some(i: Any, carry: Any) -> Any:
            for j in range(abreast):
                index = i * abreast + j
                group = first + jnp.clip(index, 0, jnp.maximum(used - 1, 0))
                expert = self.expert[group]
                # Groups that are not in use look for ranks that nobody has.
                matches = ranks[pl.ds(expert, 1)] == jnp.where(index < used, self.rank[group], tokens) + offset
                place[rows_of(index)] = jnp.where(matches, 1.0, 0.0).astype(place.dtype)
                if also is not None:
                    also(rows_of(index), matches, expert)
            return carry

        lax.fori_loop(0, self.chunk // abreast, some, None)


def _gather_kernel(
    expert: Any, rank: Any, row: Any, count: Any, x: Any, ranks: Any, weights: Any, rows_out: Any, shares_out: Any,
    clean: Any, place: Any, rows: Any, shares: Any, left: Any, state: Any, *, most: int, chunk: int,
) -> None:  # fmt: skip
    groups, block = _Groups(expert, rank, row, count, most, chunk), pl.program_id(0)
    turn = 2  # state: [2] groups on their way out of each buffer, then whose turn it is

    @pl.when(block == 0)
    def _() -> None:
        for i in range(3):
            state[i] = 0

    def copies(buffer: Any, j: Any, to: Any) -> list[Any]:
        return [
            pltpu.make_async_copy(rows.at[buffer, rows_of(j)], rows_out.at[to], left.at[buffer]),
            pltpu.make_async_copy(shares.at[buffer, rows_of(j)], shares_out.at[to], left.at[buffer]),
        ]

    def wait(buffer: Any) -> None:
        def one(_: Any, carry: Any) -> Any:
            for copy in copies(buffer, 0, rows_of(0)):
                copy.wait()
            return carry

        lax.fori_loop(0, state[buffer], one, None)
        state[buffer] = 0

    clean[...] = _finite(x[...])

    def one(index: Any, carry: Any) -> Any:
        buffer = state[turn]
        wait(buffer)

        def share(at: Any, matches: jax.Array, of: Any) -> None:
            weight = jnp.sum(jnp.where(matches, weights[pl.ds(of, 1)], 0.0), axis=1, keepdims=True)
            shares[buffer, at] = jnp.broadcast_to(weight, (GROUP, LANES))

        groups.ones(block, index, ranks, place, share)
        size = math.gcd(ROWS // 2 if narrow() else ROWS, chunk * GROUP)

        def some_rows(i: Any, carry: Any) -> Any:
            at = pl.ds(pl.multiple_of(i * size, size), size)
            product = jnp.dot(place[at], clean[...], preferred_element_type=jnp.float32)
            rows[buffer, at] = product.astype(rows.dtype)
            return carry

        lax.fori_loop(0, chunk * GROUP // size, some_rows, None)
        groups.each(block, index, lambda j, to: [copy.start() for copy in copies(buffer, j, to)])
        state[buffer] = jnp.maximum(groups.used(block, index), 0)
        state[turn] = 1 - buffer
        return carry

    lax.fori_loop(0, groups.chunks(block), one, None)

    @pl.when(block == pl.num_programs(0) - 1)
    def _() -> None:
        wait(0)
        wait(1)


def gather(
    x: Float[Array, "T D"], plan: Sorted, tiles: RowTiles, *, interpret: Any = False
) -> tuple[Float[Array, "rows D"], Float32[Array, "rows 128"]]:
    """Rows of all tiles, and their weights in all lanes; rows that belong to no group mean nothing."""
    hidden, blocks = x.shape[1], plan.groups.shape[0]
    block, chunk = tiles
    local = plan.rank.shape[0]
    by_expert = pl.BlockSpec((local, block), lambda b, *_: (0, b))
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        functools.partial(_gather_kernel, most=plan.group_row.shape[0] // blocks, chunk=chunk),
        out_shape=[
            jax.ShapeDtypeStruct((plan.rows, hidden), x.dtype), jax.ShapeDtypeStruct((plan.rows, LANES), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(blocks,),
            in_specs=[pl.BlockSpec((block, hidden), lambda b, *_: (b, 0)), by_expert, by_expert],
            out_specs=[hbm, hbm],
            scratch_shapes=[
                pltpu.VMEM((block, hidden), x.dtype), pltpu.VMEM((chunk * GROUP, block), x.dtype),
                pltpu.VMEM((2, chunk * GROUP, hidden), x.dtype), pltpu.VMEM((2, chunk * GROUP, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((3,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="experts_gather",
    )(plan.group_expert, plan.group_rank, plan.group_row, plan.groups, x, plan.rank, plan.weight)  # fmt: skip


def _combine_kernel(
    expert: Any, rank: Any, row: Any, count: Any, ranks: Any, rows_in: Any, out: Any, place: Any, rows: Any, sums: Any,
    arrived: Any, turn: Any, *, most: int, chunk: int,
) -> None:  # fmt: skip
    groups, block, last = _Groups(expert, rank, row, count, most, chunk), pl.program_id(0), pl.num_programs(0) - 1

    def copy(buffer: Any, j: Any, at: Any) -> Any:
        return pltpu.make_async_copy(rows_in.at[at], rows.at[buffer, rows_of(j)], arrived.at[buffer])

    def fetch(block: Any, index: Any, buffer: Any) -> None:
        groups.each(block, index, lambda j, at: copy(buffer, j, at).start())

    @pl.when(block == 0)
    def _() -> None:
        turn[0] = 0
        fetch(0, 0, 0)

    chunks = groups.chunks(block)
    size = math.gcd(TOKENS, sums.shape[0])

    def one(index: Any, carry: Any) -> Any:
        buffer = turn[0]
        ends = index + 1 == chunks

        @pl.when(jnp.logical_not(ends) | (block < last))
        def _() -> None:
            fetch(jnp.where(ends, block + 1, block), jnp.where(ends, 0, index + 1), 1 - buffer)

        groups.ones(block, index, ranks, place)
        groups.each(block, index, lambda j, at: copy(buffer, j, at).wait())
        rows[buffer] = _finite(rows[buffer])

        def some_tokens(i: Any, carry: Any) -> Any:
            at = pl.ds(pl.multiple_of(i * size, size), size)
            part = lax.dot_general(
                place[:, at], rows[buffer], (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            alone = (index == 0) & ends

            @pl.when(alone)
            def _() -> None:
                out[at] = part.astype(out.dtype)

            @pl.when(jnp.logical_not(alone))
            def _() -> None:
                total = part + jnp.where(index == 0, 0.0, sums[at])
                sums[at] = total
                out[at] = total.astype(out.dtype)

            return carry

        lax.fori_loop(0, sums.shape[0] // size, some_tokens, None)
        turn[0] = 1 - buffer
        return carry

    lax.fori_loop(0, chunks, one, None)


def combine(
    rows: Float[Array, "rows D"], tokens: int, plan: Sorted, tiles: RowTiles, *, interpret: Any = False
) -> Float[Array, "T D"]:
    """Sum of the rows of every token, in fp32; rounded once."""
    hidden, blocks = rows.shape[1], plan.groups.shape[0]
    block, chunk = tiles
    return pl.pallas_call(
        functools.partial(_combine_kernel, most=plan.group_row.shape[0] // blocks, chunk=chunk),
        out_shape=jax.ShapeDtypeStruct((tokens, hidden), rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(blocks,),
            in_specs=[
                pl.BlockSpec((plan.rank.shape[0], block), lambda b, *_: (0, b)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec((block, hidden), lambda b, *_: (b, 0)),
            scratch_shapes=[
                pltpu.VMEM((chunk * GROUP, block), rows.dtype), pltpu.VMEM((2, chunk * GROUP, hidden), rows.dtype),
                pltpu.VMEM((block, hidden), jnp.float32), pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="experts_combine",
    )(plan.group_expert, plan.group_rank, plan.group_row, plan.groups, plan.rank, rows)  # fmt: skip
