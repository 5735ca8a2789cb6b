"""A block of 64 query rows against a stretch of its context: one program of three warpgroups.

    S = scale (q_latent C^T + q_rope K_pe^T)      third warpgroup, [64, 64] in registers
    P = exp2(S log2 e - m)                        third, to shared memory in bf16
    O = O exp2(m_old - m) + P C                   first and second, each 256 of the 512 columns in registers

So the scores of a tile are worked out while the tile before is summed. Latents and position keys of 64 rows come by
TMA into one of two places, filled in turn, as soon as both sums have left it. A tile has 32 rows of the first half of
a page and the 32 of the second half that share lines of position keys with them, so every line that is loaded is used.

Rows that no query sees may hold NaN. Their scores are masked, but 0 NaN would reach the output: before it sums a tile
with such rows, a warpgroup clears them in its columns.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mla.gpu.work import KEYS, QUERIES, Work
from pallas_kernels.mla.pages import LANES, TAIL
from pallas_kernels.mla.stripe import rows_before
from pallas_kernels.mla.visible import Visible

# The latent that fills the registers of two warpgroups, and shared memory.
LATENT = 512
# Tiles in shared memory; planes of the latent; warpgroups that sum, and planes of each.
_PLACES, _PLANES, _SUMMING = 2, LATENT // LANES, 2
_OWN = _PLANES // _SUMMING
# Registers of a thread that scores and of one that sums, 65,536 in all: with fewer for sums they spill.
_SCORE_REGISTERS, _SUM_REGISTERS = 96, 208
_HALF, _LOG2E = KEYS // 2, math.log2(math.e)
# Operands of the matrix unit lie in 8 x 64 pieces, swizzled.
_PIECES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_COPIES = 2 * _PLANES + 2


def attend(
    q_latent: Float[Array, "TN L"],
    q_rope: Float[Array, "TN P"],
    cache: Float[Array, "layers B ..."],
    layer: Int32[Array, ""] | int,
    table: Int32[Array, "R C"],
    jobs: Work,
    parts: int,
    heads: int,
    page_rows: int,
    factor: Float[Array, ""] | float,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    visible: Visible,
    interpret: object = None,
) -> tuple[Float[Array, "parts M 64 L"], Float[Array, "parts M 64"]]:
    """Every block against each of `parts` stretches of its context.

    Args:
      q_latent, q_rope: query rows, 64 at least.
      page_rows: of a page. The sections of a large one are pages of their own in the cache and the table.
      factor: of the scores.

    Returns:
      Normalised output, fp32 if it is one of several, and natural-log sum of exponentials: -inf where a block has no
      tile or none that a query sees. Without a tile the output is not written.
    """
    blocks, per_page = jobs.row.shape[0], page_rows // KEYS
    kind = q_latent.dtype if parts == 1 else jnp.float32
    numbers = jnp.stack([jobs.row, jobs.begin, jobs.shift, jobs.end, jobs.first, jobs.past])
    common = jnp.stack([jnp.asarray(layer, jnp.int32) * cache.shape[1], jnp.asarray(rank, jnp.int32)])
    factor = jnp.asarray(factor, jnp.float32).reshape(1)
    # Half planes of a page one after another, and its lines of position keys.
    halves = 2 * _PLANES + 1
    cache = cache.reshape(-1, page_rows // 2, LANES)

    def mla_stretch(numbers, common, factor, table, q_latent, q_rope, cache, out, lse, *scratch):
        q_c, q_pe, latent, tail, p_shared, shared, queries_here, tile_here, p_here, used = scratch
        block, part = jax.lax.axis_index("block"), jax.lax.axis_index("part")
        group = jax.lax.axis_index("group")
        row, begin, shift, end, first, past = (numbers[name, block] for name in range(6))
        base, own_rank, scaling = common[0], common[1], factor[0]
        each = jax.lax.div(past - first + parts - 1, parts)
        low = first + part * each
        high = jnp.minimum(low + each, past)

        def along(axis):
            """0 to 63 along an axis of what the matrix unit gives."""
            layout = plgpu.Layout.WGMMA.reduce(1 - axis)
            return plgpu.broadcasted_iota(jnp.int32, (KEYS,), 0, layout=layout)

        def across(value, axis, shape):
            """Repeated along the other axis."""
            return jax.lax.broadcast_in_dim(value, shape, [axis])

        def by_row(value):
            return plgpu.layout_cast(jnp.full((QUERIES,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

        def page(tile):
            """Block of a tile, of the last one for those behind."""
            return table[row, jax.lax.div(jnp.minimum(tile, high - 1), per_page)]

        def fetch(tile, block):
            place = jax.lax.rem(tile - low, _PLACES)
            here, lines = tile_here.at[place], pl.ds(jax.lax.rem(tile, per_page) * _HALF, _HALF)
            at = (base + block) * halves
            for plane in range(_PLANES):
                for half in range(2):
                    into = latent.at[place, plane, pl.ds(half * _HALF, _HALF)]
                    plgpu.copy_gmem_to_smem(cache.at[at + 2 * plane + half, lines], into, here)
            for half in range(2):
                mine = cache.at[at + 2 * _PLANES, lines, pl.ds(half * TAIL, TAIL)]
                plgpu.copy_gmem_to_smem(mine, tail.at[place, pl.ds(half * _HALF, _HALF)], here)

        def local(tile, axis):
            """Rows of the page that the keys of a tile are, along an axis."""
            key = along(axis)
            key += jnp.where(key < _HALF, 0, page_rows // 2 - _HALF)
            return jax.lax.rem(tile, per_page) * _HALF + key

        def kept(tile, past):
            """Rows of a tile's page that lie below position `past`: positions rise along a sequence."""
            page = jax.lax.div(tile, per_page)
            if page_rows % interleave == 0:  # counted in the page alone, which takes fewer registers
                within = past - page * (page_rows * shards)
                return rows_before(jnp.clip(within, 0, page_rows * shards), own_rank, shards, interleave)
            before = rows_before(jnp.maximum(past, 0), own_rank, shards, interleave)
            return jnp.clip(before - page * page_rows, 0, page_rows)

        def scores(tile, place, block):
            """In base 2; -inf where a query does not see a key."""

            def position_keys(acc):
                plgpu.wgmma(acc, q_pe, plgpu.transpose_ref(tail.at[place], (1, 0)))
                return acc[...]

            # A loop, though of four: unrolled, the addresses of all operands would be held in registers.
            def latents(plane, score):
                def product(acc):
                    plgpu.wgmma(acc, q_c.at[plane], plgpu.transpose_ref(latent.at[place, plane], (1, 0)))

                return pl.run_state(product)(plgpu.ACC.init(score))

            shape = (QUERIES, KEYS)
            score = pl.run_scoped(position_keys, plgpu.ACC(shape, jnp.float32))
            score = jax.lax.fori_loop(0, _PLANES, latents, score)
            score = visible.capped(score * scaling) * _LOG2E

            key = across(local(tile, 1), 1, shape)
            query = jax.lax.div(along(0) + begin, heads) + shift
            seen = key < (across(kept(tile, query + 1), 0, shape) if visible.causal else kept(tile, end))
            if visible.window is not None:
                seen &= key >= across(kept(tile, query + 1 - visible.window), 0, shape)
            return jnp.where(seen & (block != 0), score, -jnp.inf)

        def weigh(tile, carry):
            """Scores and P of a tile, and the factor of what was summed before."""
            top, total = carry
            place, block = jax.lax.rem(tile - low, _PLACES), page(tile)
            plgpu.barrier_wait(tile_here.at[place])
            score = scores(tile, place, block)
            new = jnp.maximum(top, score.max(axis=1))
            # Before the first visible key the maximum is -inf, and -inf - -inf must not become NaN.
            anchor = jnp.where(new == -jnp.inf, 0.0, new)
            p = jnp.exp2(score - across(anchor, 0, score.shape))
            fade = jnp.exp2(top - anchor)

            @pl.when(tile > low)
            def _():
                plgpu.barrier_wait(used)

            p_shared[...] = p.astype(p_shared.dtype)
            shared[...] = fade
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_here)
            return new, total * fade + p.sum(axis=1)

        def clear(tile, place, block):
            """Zero the rows of own planes that no query of the block sees, if there are any."""
            count = jnp.where(block != 0, kept(tile, end), 0)

            @pl.when(count < (jax.lax.rem(tile, per_page) + 1) * _HALF + page_rows // 2)
            def _():
                rows = across(local(tile, 0), 0, (KEYS, LANES))
                for nth in range(_OWN):
                    held = latent[place, group * _OWN + nth]
                    latent[place, group * _OWN + nth] = jnp.where(rows < count, held, jnp.zeros_like(held))
                plgpu.commit_smem()

        def by_query():
            """What the third warpgroup left for each query, along the columns."""
            value = plgpu.load(shared, (), layout=plgpu.Layout.WGMMA.reduce(1))
            return across(value, 0, (QUERIES, LANES))

        def add(tile, sums):
            """The latents of a tile, weighed."""
            place = jax.lax.rem(tile - low, _PLACES)
            now, ahead = page(tile), page(tile + _PLACES)
            plgpu.barrier_wait(tile_here.at[place])
            plgpu.barrier_wait(p_here)
            clear(tile, place, now)
            fade = by_query()

            def products(sums):
                for nth, acc in enumerate(sums):
                    plgpu.wgmma(acc, p_shared, latent.at[place, group * _OWN + nth])

            sums = pl.run_state(products)([plgpu.ACC.init(each * fade) for each in sums])
            plgpu.barrier_arrive(used)

            @pl.when(group == 0)
            def _():
                plgpu.barrier_wait(used)

                @pl.when(tile + _PLACES < high)
                def _():
                    fetch(tile + _PLACES, ahead)

            return sums

        @pl.when((low < high) & (group == _SUMMING))
        def _():
            plgpu.set_max_registers(_SCORE_REGISTERS, action="decrease")
            mine = pl.ds(begin, QUERIES)
            for plane in range(_PLANES):
                columns = pl.ds(plane * LANES, LANES)
                plgpu.copy_gmem_to_smem(q_latent.at[mine, columns], q_c.at[plane], queries_here)
            plgpu.copy_gmem_to_smem(q_rope.at[mine], q_pe, queries_here)
            plgpu.barrier_wait(queries_here)
            top, total = jax.lax.fori_loop(low, high, weigh, (by_row(-jnp.inf), by_row(0.0)))
            safe = jnp.where(total > 0, total, 1.0)
            plgpu.barrier_wait(used)
            shared[...] = 1.0 / safe
            lse[part, block] = jnp.where(total > 0, top / _LOG2E + jnp.log(safe), -jnp.inf)
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_here)

        @pl.when((low < high) & (group != _SUMMING))
        def _():
            plgpu.set_max_registers(_SUM_REGISTERS, action="increase")

            @pl.when(group == 0)
            def _():
                for nth in range(_PLACES):

                    @pl.when(low + nth < high)
                    def _(nth=nth):
                        fetch(low + nth, page(low + nth))

            nothing = plgpu.layout_cast(jnp.zeros((QUERIES, LANES), jnp.float32), plgpu.Layout.WGMMA)
            sums = jax.lax.fori_loop(low, high, add, [nothing] * _OWN)
            plgpu.barrier_wait(p_here)
            share = by_query()
            for nth, each in enumerate(sums):
                mine = pl.ds((group * _OWN + nth) * LANES, LANES)
                out[part, block, :, mine] = (each * share).astype(out.dtype)

        @pl.when((low >= high) & (group == 0))
        def _():
            lse[part, block] = by_row(-jnp.inf)

    run = plgpu.kernel(
        mla_stretch,
        out_type=(
            jax.ShapeDtypeStruct((parts, blocks, QUERIES, LATENT), kind),
            jax.ShapeDtypeStruct((parts, blocks, QUERIES), jnp.float32),
        ),
        grid=(blocks, parts),
        grid_names=("block", "part"),
        num_threads=_SUMMING + 1,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((_PLANES, QUERIES, LANES), q_latent.dtype, transforms=_PIECES),
            plgpu.SMEM((QUERIES, TAIL), q_latent.dtype, transforms=_PIECES),
            plgpu.SMEM((_PLACES, _PLANES, KEYS, LANES), cache.dtype, transforms=_PIECES),
            plgpu.SMEM((_PLACES, KEYS, TAIL), cache.dtype, transforms=_PIECES),
            plgpu.SMEM((QUERIES, KEYS), q_latent.dtype, transforms=_PIECES),
            plgpu.SMEM((QUERIES,), jnp.float32),
            plgpu.Barrier(num_arrivals=_PLANES + 1),
            plgpu.Barrier(num_arrivals=_COPIES, num_barriers=_PLACES),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=_SUMMING),
        ],
        compiler_params=plgpu.CompilerParams(
            # The quick exp2 and log are exact enough, the quick tanh has 11 bits.
            approx_math=visible.soft_cap is None,
            # Sums and maxima along keys stay inside groups of four threads.
            reduction_scratch_bytes=0,
        ),
        interpret=interpret or False,
    )
    # The name under which the call is found in a compiled module.
    with jax.named_scope("mla_attention"):
        return run(numbers, common, factor, table, q_latent, q_rope, cache)
