"""KDA decode on TPU: every present row's state goes through VMEM once.

Per head, with S [K, V] on sublanes and lanes and all arithmetic in fp32, the recurrence of `kda.reference` is
written so that both reductions see the state as it was read,

    p = S^T (d k)      r = S^T (d q)      u = beta (v - p)      o = r + (q . k) u      S' = d S + k u^T

so they need neither u nor the decayed state, and go through the MXU with no column to spread over lanes
(`products`; rows in three bf16 parts, which are exact, or two against a bf16 state). The update needs d and k as
columns (`columns`). Where k comes in bf16 its column is the raw k, which packs into 16 bits exactly, and the norm goes
into u; of a bf16 state the decay is packed as well, as 1 - d rounded to bf16: that moves the state by less than the
rounding it is stored with, however slowly it decays.

The products are bound by weight pushes and the update by spreading columns, so they are pipelined over rows: one
step takes the products of a row and the update of the row before, head by head in turn, because the scheduler
keeps near program order. u and the columns wait in VMEM. One step more than there are rows ends it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.kda.tpu.columns import UpdateColumns, column_shapes, update_columns
from pallas_kernels.kda.tpu.products import ReadProducts
from pallas_kernels.kda.tpu.slots_dma import StateStream, order_of
from pallas_kernels.kda.tpu.step_tiles import WIDTH, StepTiles, decode_tiles
from pallas_kernels.kda.tpu.token_inputs import column, token

_VMEM = 48 << 20


# What is kept of the rows whose update is due: where they lie, where the new state is put, and where it goes.
_FROM, _TO, _WRITE, _EMIT, _GROUP = range(5)


def _kernel(
    layer: Any, bounds: Any, row: Any, read: Any, write: Any, emit: Any, q: Any, k: Any, v: Any, gate: Any, beta: Any,
    slope: Any, bias: Any, pool: Any, out: Any, new_pool: Any, coming: Any, going: Any, u: Any, due: Any,
    arrived: Any, left: Any, cursor: Any, leaving: Any, *columns: Any, tiles: StepTiles, groups: int, blocks: int,
    lower_bound: float | None,
) -> None:  # fmt: skip
    group, block = pl.program_id(0), pl.program_id(1)
    heads, together = tiles.heads, tiles.rows
    last = (group == groups - 1) & (block == blocks - 1)
    narrow = k.dtype == jnp.bfloat16
    stream = StateStream(
        pool, new_pool, layer, read, coming, going, arrived, left, cursor, leaving, bounds[blocks], groups, tiles.ahead
    )  # fmt: skip

    @pl.when((group == 0) & (block == 0))
    def _():
        stream.begin()
        for j in range(together):
            # Nothing is due yet; the first update reads a place that nothing is on its way to, and comes to nothing.
            due[j, _FROM], due[j, _TO], due[j, _WRITE], due[j, _EMIT], due[j, _GROUP] = tiles.depth - 1, j, 0, 0, 0

    out[...] = jnp.zeros(out.shape, out.dtype)
    begin, end = bounds[block], bounds[block + 1]
    saved = UpdateColumns(*(None,) * (2 - len(columns)), *columns)
    repeated = [jnp.concatenate([a[...]] * together, axis=0) for a in (slope, bias)]

    def some_rows(step, carry):
        first = begin + step * together
        index = [first + j for j in range(together)]
        # Behind the last row of the block the arithmetic goes on, on whatever is there, and nothing comes of it.
        known = [jnp.clip(i, 0, jnp.maximum(end - 1, 0)) for i in index]
        home = [jnp.clip(row[i] - block * tiles.block, 0, tiles.block - 1) for i in known]
        unit = group * stream.count + first
        place = [stream.arrival(group * stream.count + i) for i in known]
        before = [due[j, _FROM] for j in range(together)]
        after = [due[j, _TO] for j in range(together)]
        for j in range(together):
            stream.make_room(after[j])

            @pl.when(index[j] < end)
            def _(j=j):
                stream.fetch(unit + j)
                stream.take(unit + j)

        stream.wipe_null(place, [read[i] for i in known])

        def load(ref):
            """Rows under one another: [together * H', width]."""
            return jnp.concatenate([ref[h].astype(jnp.float32) for h in home], axis=0)

        raw_k = load(k)
        raw_beta = jnp.concatenate([column(beta[pl.ds(h, 1)], heads, group * heads) for h in home], axis=0)
        x = token(load(q), raw_k, load(gate), raw_beta, repeated[0], repeated[1], lower_bound)
        products = ReadProducts(x, 2 if coming.dtype == jnp.bfloat16 else 3)
        for j in range(together):
            for h in range(heads):
                pair = j * heads + h
                state = coming[before[j], h].astype(jnp.float32)
                going[after[j], h] = saved.update(pair, state, u[pl.ds(pair, 1)]).astype(going.dtype)
                products.visit(pair, coming[place[j], h])

        p, r = products.results()
        correction = x.beta * (load(v) - p)
        o = r + jnp.sum(x.q * x.k, axis=1, keepdims=True) * correction
        u[...] = correction * x.k_scale if narrow else correction
        update_columns(x, raw_k, k.dtype, coming.dtype).store(saved)

        # From the last row to the first: rows that are not there share the place of the last one that is.
        for j in reversed(range(together)):
            there = index[j] < end
            mine = o[j * heads : (j + 1) * heads].astype(out.dtype)
            out[home[j]] = jnp.where(there, mine, out[home[j]])

        writes, emits = ([due[j, field] for j in range(together)] for field in (_WRITE, _EMIT))
        stream.put(after, writes, due[0, _GROUP])
        stream.put(after, emits, due[0, _GROUP], rare=True)
        for j in range(together):
            there = index[j] < end
            due[j, _FROM] = place[j]
            due[j, _TO] = stream.departure(unit + j)
            due[j, _WRITE] = jnp.where(there, write[known[j]], 0)
            due[j, _EMIT] = jnp.where(there, emit[known[j]], 0)
            due[j, _GROUP] = group
        return carry

    jax.lax.fori_loop(0, pl.cdiv(end - begin, together) + last.astype(jnp.int32), some_rows, None)
    pl.when(last)(stream.end)


def decode(
    q: Float[Array, "R H K"],
    k: Float[Array, "R H K"],
    v: Float[Array, "R H V"],
    raw_gate: Float[Array, "R H K"],
    raw_beta: Float[Array, "R H"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    active: Bool[Array, "R"],
    read: Int32[Array, "R"],
    write: Int32[Array, "R"],
    emit_slot: Int32[Array, "R"],
    *,
    lower_bound: float | None,
    tiles: StepTiles | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "R H V"], Float[Array, "layers S H K V"]]:
    """See `kda.api.kda_decode`.

    Args:
      tiles: None chooses.
      interpret: as of `pl.pallas_call`.

    Raises:
      ValueError: K or V is not 128, or the tiles do not fit into VMEM.
    """
    rows, heads, _ = q.shape
    check_states(states)
    tiles = tiles or decode_tiles(rows, heads, states.dtype, [x.dtype for x in (q, k, v, raw_gate)], _VMEM)
    groups, blocks = heads // tiles.heads, pl.cdiv(rows, tiles.block)
    order = order_of(active, tiles.block)
    scalars = (jnp.asarray(layer, jnp.int32).reshape(1), *order, *(order.pick(a) for a in (read, write, emit_slot)))
    slope = jnp.broadcast_to(jnp.exp(a_log.astype(jnp.float32))[:, None], dt_bias.shape)

    per_row = pl.BlockSpec((tiles.block, tiles.heads, WIDTH), lambda g, b, *_: (b, g, 0))
    per_head = pl.BlockSpec((tiles.heads, WIDTH), lambda g, b, *_: (g, 0))
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    state_buffers = pltpu.VMEM((tiles.depth, tiles.heads, WIDTH, WIDTH), states.dtype)
    columns = column_shapes(tiles.rows * tiles.heads, WIDTH, k.dtype, states.dtype)
    call = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, groups=groups, blocks=blocks, lower_bound=lower_bound),
        out_shape=(jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(states.shape, states.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(groups, blocks),
            in_specs=[
                *(per_row,) * 4, pl.BlockSpec((tiles.block, heads), lambda g, b, *_: (b, 0)), per_head, per_head, hbm,
            ],
            out_specs=(per_row, hbm),
            scratch_shapes=[
                state_buffers, state_buffers,
                pltpu.VMEM((tiles.rows * tiles.heads, WIDTH), jnp.float32), pltpu.SMEM((tiles.rows, 5), jnp.int32),
                pltpu.SemaphoreType.DMA((tiles.depth,)), pltpu.SemaphoreType.DMA((tiles.depth,)),
                pltpu.SMEM((3,), jnp.int32), pltpu.SMEM((tiles.depth,), jnp.int32),
                *(pltpu.VMEM(shape, dtype) for shape, dtype in columns),
            ],
        ),
        input_output_aliases={len(scalars) + 7: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=tiles.vmem + (8 << 20)
        ),
        interpret=interpret,
        name="kda_decode",
    )  # fmt: skip
    return call(*scalars, q, k, v, raw_gate, raw_beta.astype(jnp.float32), slope, dt_bias.astype(jnp.float32), states)


def check_states(states: Float[Array, "layers S H K V"]) -> None:
    """Refuses states that are not 128 by 128, since padding them would copy the pool, and other types."""
    if states.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"states: the pool is {states.dtype}; the TPU kernels take float32 and bfloat16 "
            f"(implementation 'xla' takes any)"
        )
    if states.shape[3:] != (WIDTH, WIDTH):
        raise ValueError(
            f"states: K x V is {states.shape[3]} x {states.shape[4]}; the TPU kernels take 128 x 128 only "
            f"(implementation 'xla' takes any)"
        )
