"""Expanded attention over the steps of a plan in plain XLA: the kernel's reference.

    s_ij = q_i . k_j      m' = max(m, max_j s_ij)      p_ij = exp2(s_ij - m')
    l'   = l exp2(m - m') + sum_j p_ij                 o' = o exp2(m - m') + sum_j p_ij v_j

Every step takes the running maximum, whatever its kind. Live at a time: the scores of one tile of queries and one block
of keys.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.mla.expanded.forms import Context, Filled
from pallas_kernels.mla.expanded.plan import FRESH, Plan, Tiling, block_of, group_of
from pallas_kernels.mla.visible import Visible

QUICK = False
HEADS = 1

# Below every score and far from the ends of fp32, so that differences stay finite.
_LOWEST = -1e30


class State(NamedTuple):
    """Running maximum, sum of weights and unnormalised output of each tile and head."""

    top: Float[Array, "tiles N Q"]
    total: Float[Array, "tiles N Q"]
    out: Float[Array, "tiles N Q V"]


def tiling(tokens: int) -> Tiling:
    """Tiles of 128 queries, blocks of 128 keys."""
    tile = min(128, -(-tokens // 8) * 8)
    return Tiling(tile, 128, 1, -(-tokens // tile))


def queries(nope: Float[Array, "T N D"], rope: Float[Array, "T N P"], tiling: Tiling) -> Float[Array, "tiles N Q DP"]:
    """Queries by tile."""
    q = jnp.concatenate([nope, rope], axis=-1)
    q = jnp.pad(q, ((0, tiling.queries - q.shape[0]), (0, 0), (0, 0)))
    return jnp.moveaxis(q.reshape(-1, tiling.tile, *q.shape[1:]), 2, 1)


def empty(query: Float[Array, "tiles N Q DP"], value: int) -> State:
    """A state that means nothing yet."""
    shape = query.shape[:3]
    return State(*(jax.lax.empty(s, jnp.float32) for s in (shape, shape, (*shape, value))))


def expand(
    filled: Filled,
    w_uk: Float[Array, "N D L"],
    w_uv: Float[Array, "N V L"],
    key_factor: Float[Array, ""],
    value_factor: Float[Array, ""],
) -> tuple[Float[Array, "W ND"], Float[Array, "W P"], Float[Array, "NV W"]]:
    """Keys and values of all heads from cache rows, in the dtype of the rows; sums and factors in fp32."""
    rows, dtype, latent = filled.rows, filled.rows.dtype, w_uk.shape[-1]
    keys, values = (w.astype(dtype).reshape(-1, latent) for w in (w_uk, w_uv))
    precision = Precision.HIGHEST if dtype == jnp.float32 else None
    dot = {"precision": precision, "preferred_element_type": jnp.float32}

    def chunk(i, made):
        found = jax.lax.dynamic_slice_in_dim(rows, i * filled.chunk, filled.chunk)
        nope = jnp.einsum("wl,nl->wn", found[:, :latent], keys, **dot) * key_factor
        rope = found[:, latent:].astype(jnp.float32) * key_factor
        value = jnp.einsum("nl,wl->nw", values, found[:, :latent], **dot) * value_factor
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(x, y.astype(dtype), i * filled.chunk, axis)
            for x, y, axis in zip(made, (nope, rope, value), (0, 0, 1), strict=True)
        )

    shapes = (len(rows), len(keys)), (len(rows), rows.shape[1] - latent), (len(values), len(rows))
    chunks = -(-filled.used // filled.chunk)
    return jax.lax.fori_loop(0, chunks, chunk, tuple(jax.lax.empty(s, dtype) for s in shapes))


def query_positions(plan: Plan, row: Int32[Array, ""], tile: Int32[Array, ""], slots: int) -> Int32[Array, "slots"]:
    """Position of each query of a tile, -1 where it is not of the row."""
    within = tile * slots + jnp.arange(slots, dtype=jnp.int32) - plan.offset[row]
    return jnp.where((within >= 0) & (within < plan.length[row]), plan.start[row] + within, -1)


def attend(
    state: State,
    query: Float[Array, "tiles N Q DP"],
    context: Context,
    plan: Plan,
    tiling: Tiling,
    sees: Visible,
) -> State:
    """Adds the keys of one piece of the context."""

    def step(i, state):
        code = plan.step[i]
        tile, block = group_of(code), block_of(code)
        old = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, tile, keepdims=False), state)
        fresh = (plan.turn[i] & FRESH) > 0
        top = jnp.where(fresh, _LOWEST, old.top)
        total, out = jnp.where(fresh, 0.0, old.total), jnp.where(fresh, 0.0, old.out)

        def piece(x, axis):
            return jax.lax.dynamic_slice_in_dim(x, block * tiling.block, tiling.block, axis)

        heads = query.shape[1]
        nope, rope = piece(context.nope, 0).reshape(tiling.block, heads, -1), piece(context.rope, 0)[:, None]
        key = jnp.concatenate([nope, jnp.broadcast_to(rope, (*nope.shape[:2], rope.shape[-1]))], axis=-1)
        dot = {"precision": Precision.HIGHEST, "preferred_element_type": jnp.float32}
        score = sees.capped(jnp.einsum("nqd,knd->nqk", query[tile], key, **dot), math.log2(math.e))
        own, at = query_positions(plan, plan.owner[block], tile, tiling.tile)[:, None], piece(context.at, 0)
        mask = at <= own
        if sees.window is not None:
            mask &= at > own - sees.window
        new = jnp.maximum(top, jnp.max(jnp.where(mask, score, _LOWEST), axis=-1))
        p = jnp.where(mask, jnp.exp2(score - new[..., None]), 0.0)
        fade = jnp.exp2(top - new)
        value = piece(context.value, 1).reshape(heads, -1, tiling.block)
        added = jnp.einsum("nqk,nvk->nqv", p.astype(value.dtype), value, **dot)
        made = State(new, total * fade + jnp.sum(p, axis=-1), out * fade[..., None] + added)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, tile, 0), state, made)

    return jax.lax.fori_loop(0, plan.used, step, state)


def overflowed(state: State, valid: Bool[Array, "T"]) -> Bool[Array, ""]:
    """Never: the reference is the maximum."""
    del state, valid
    return jnp.asarray(False)


def finish(state: State, count: int) -> tuple[Float[Array, "T NV"], Float[Array, "T N"]]:
    """Normalised output, heads side by side, and log-sum-exp of the first `count` queries; 0 and -inf without keys."""

    def packed(x):
        x = jnp.moveaxis(x, 2, 1)
        return x.reshape(-1, *x.shape[2:])[:count]

    total = packed(state.total)
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, math.log(2.0) * (packed(state.top) + jnp.log2(safe)), -jnp.inf)
    return (packed(state.out) / safe[..., None]).reshape(count, -1), lse
