"""What each chunk of a step has to do, as flat integer arrays for scalar prefetch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from pallas_kernels.rows import RaggedRows, max_tiles, tiles
from pallas_kernels.saves import saves


class ChunkPlan(NamedTuple):
    """M chunks on a grid anchored at absolute positions, n saves in the order of their chunks, in each its end first.

    The chunk behind the last one in use is a full dummy, so that a kernel may run a step over.

    Attributes:
      first: [M] packed token of slot 0, may be negative or reach past the end.
      low, high: [M] slots that are tokens.
      read: [M] slot of the state to start from (0 for zeros) if the chunk is the first of its row, else -1.
      save_bounds: [M + 1] saves of chunk m are save_bounds[m] .. save_bounds[m + 1].
      save_tokens: [n] slots of the chunk that lie before the saved state.
      save_slot: [n] where it goes.
      inner: [M] 1 if a save of the chunk lies before its end.
      plain: [M] 1 if all slots are tokens and slot 0 lies on a multiple of `align` packed tokens.
      used_and_layer: [2] chunks in use, and the layer of the pool.
    """

    first: Int32[Array, "M"]
    low: Int32[Array, "M"]
    high: Int32[Array, "M"]
    read: Int32[Array, "M"]
    save_bounds: Int32[Array, "M1"]
    save_tokens: Int32[Array, "n"]
    save_slot: Int32[Array, "n"]
    inner: Int32[Array, "M"]
    plain: Int32[Array, "M"]
    used_and_layer: Int32[Array, "2"]


def chunk_plan(
    rows: RaggedRows,
    count: int,
    chunk: int,
    align: int,
    layer: Int32[Array, ""] | int,
    read: Int32[Array, "R"],
    write: Int32[Array, "R"],
    emit_position: Int32[Array, "R E"],
    emit_slot: Int32[Array, "R E"],
) -> ChunkPlan:
    """The plan of a step of `count` packed tokens."""
    most = max_tiles(count, read.shape[0], chunk, anchored=True) + 1
    grid = tiles(rows, chunk, anchored=True, max_tiles=most)
    index = jnp.arange(most, dtype=jnp.int32)
    used = index < grid.used
    begins = used & (index == grid.base[grid.row])

    wanted = saves(rows, write, emit_position, emit_slot)
    last = wanted.position - 1
    home = grid.base[wanted.row] + last // chunk - rows.start[wanted.row] // chunk
    # Absent rows save nothing; what is not wanted goes behind the last chunk.
    home = jnp.where((wanted.slot != 0) & (rows.length[wanted.row] > 0), home, most)
    covered = last % chunk + 1
    before_end = covered < grid.high[jnp.minimum(home, most - 1)]
    # The state at a chunk's end lies ready: it leaves while those inside the chunk are computed.
    order = jnp.argsort(2 * home + before_end)
    edges = jnp.arange(most + 1, dtype=jnp.int32)
    bounds = jnp.sum(home[None, :] < edges[:, None], axis=1, dtype=jnp.int32)
    here = home[None, :] == index[:, None]
    inner = jnp.any(here & (covered[None, :] < grid.high[:, None]), axis=1)
    return ChunkPlan(
        first=jnp.where(used, grid.first, 0),
        low=grid.low,
        high=jnp.where(used, grid.high, chunk),
        read=jnp.where(begins, read[grid.row], -1),
        save_bounds=bounds,
        save_tokens=covered[order],
        save_slot=wanted.slot[order],
        inner=inner.astype(jnp.int32),
        plain=(used & (grid.low == 0) & (grid.high == chunk) & (grid.first % align == 0)).astype(jnp.int32),
        used_and_layer=jnp.stack([grid.used, jnp.asarray(layer, jnp.int32)]),
    )


class Betas(NamedTuple):
    """beta = sigmoid(raw_beta), 0 in slots that are no tokens, for each group of heads and chunk, in two layouts.

    Attributes:
      columns: [groups, M, C, 3 group] bf16 parts of each head's column, high, middle and low, which add up to fp32.
      rows: [groups, M, pairs, 2 C] fp32, the slots of a pair of heads one behind the other.
    """

    columns: BFloat16[Array, "groups M C parts"]
    rows: Float32[Array, "groups M pairs C2"]


def betas(raw_beta: Float[Array, "T H"], plan: ChunkPlan, chunk: int, group: int) -> Betas:
    """Betas of all chunks; the last head of an odd group is its own partner."""
    slot = jnp.arange(chunk, dtype=jnp.int32)[None, :]
    index = jnp.clip(plan.first[:, None] + slot, 0, raw_beta.shape[0] - 1)
    inside = (slot >= plan.low[:, None]) & (slot < plan.high[:, None])
    beta = jnp.where(inside[..., None], jax.nn.sigmoid(raw_beta.astype(jnp.float32))[index], 0.0)
    beta = jnp.moveaxis(beta.reshape(*beta.shape[:2], -1, group), 2, 0)  # [groups, M, C, group]
    parts, rest = [], beta
    for _ in range(3):
        # Rounded through reduce_precision, which XLA may not simplify away as a pair of casts.
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    rows = jnp.moveaxis(beta, 2, 3)
    if group % 2:
        rows = jnp.concatenate([rows, rows[:, :, -1:]], axis=2)
    return Betas(jnp.concatenate(parts, axis=-1), rows.reshape(*rows.shape[:2], -1, 2 * chunk))
