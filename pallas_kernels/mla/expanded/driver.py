"""Expanded attention for prefill: context rows are gathered and expanded a workspace at a time, and attended to.

k_jh = [W_UK,h c_j | k_pe_j]      v_jh = W_UV,h c_j      o_ih = softmax_j(scale q_ih . k_jh) v_jh
"""

import importlib
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import choose
from pallas_kernels.mla import stripe
from pallas_kernels.mla.checks import check_index, check_pool, check_table
from pallas_kernels.mla.expanded.forms import Context, Filled
from pallas_kernels.mla.expanded.plan import MOST_BLOCKS, MOST_GROUPS, plan_of
from pallas_kernels.mla.expanded.workspace import Gathered, gather, queue_of, units_of, workspace_of
from pallas_kernels.mla.pages import pages_of
from pallas_kernels.mla.visible import Visible, visible
from pallas_kernels.rows import RaggedRows, tokens


def _online() -> ModuleType:
    return importlib.import_module("pallas_kernels.mla.expanded.online")


def _kernel() -> ModuleType:
    return importlib.import_module("pallas_kernels.mla.expanded.tpu")


_FORMS = {"reference": _online, "xla": _online, "tpu": _kernel}


# Scores are exponents of base 2.
_LOG2_E = 1 / math.log(2.0)


def mla_expanded(
    q_nope: Float[Array, "T N D"],
    q_rope: Float[Array, "T N P"],
    w_uk: Float[Array, "N D L"],
    w_uv: Float[Array, "N V L"],
    cache: Float[Array, "layers B *page"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    table: Int32[Array, "R C"],
    *,
    scale: float,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    workspace: int,
    axis: str | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    cache_scale: Float[Array, ""] | float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """Causal attention of many new tokens in expanded form; what it sees is what `mla_attention` sees.

    The rows of the new tokens lie in the cache. Rows of the step without new tokens cost nothing: leave out (length 0)
    those for which the absorbed form is cheaper (`expansion_pays`).

    Args:
      q_nope, q_rope: queries of the own heads, not absorbed.
      w_uk, w_uv: of the own heads; key and value from the latent.
      workspace: most context rows expanded at a time. Memory is bounded by it: rows x heads x (D + V) values.
      axis: mesh axis of the ranks under `shard_map`; each gathers what it holds and the result is whole. None with
        more than one shard: the result covers the keys of `rank` only, to be merged by `merge_lse`.
      layer, rank, cache_scale: may be traced; others as in `mla_attention`.

    Returns:
      Normalised output [T, N, V] in the dtype of q_nope and the natural-log sum of exponentials [T, N] fp32. A token
      without keys, and slack: output 0, LSE -inf.

    Raises:
      ValueError: what `mla_attention` raises it for; a workspace too small for a block of keys or a unit of pages; a
        workspace or tokens beyond what the plan has room for; an axis of another size than `shards`; for "tpu" types
        and widths that the kernel does not take.
    """
    check_pool(cache)
    stripe.check(pages_of(cache, w_uk.shape[-1], q_rope.shape[-1]).rows, shards, interleave)
    check_table(rows, table)
    check_index("layer", layer, cache.shape[0])
    check_index("rank", rank, shards)
    if not q_nope.shape[0] or not table.size:
        empty = jnp.zeros((*q_nope.shape[:2], w_uv.shape[1]), q_nope.dtype)
        return empty, jnp.full(q_nope.shape[:2], -jnp.inf, jnp.float32)

    def fits(form: str) -> bool:
        return form != "tpu" or _kernel().fits(q_nope, q_rope, w_uv.shape[1])

    run = choose("mla_expanded", implementation, _FORMS, fits)()
    return expanded(
        run, q_nope, q_rope, w_uk, w_uv, cache, layer, rows, table, scale=scale, shards=shards, rank=rank,
        interleave=interleave, workspace=workspace, axis=axis, sees=visible(True, window, soft_cap),
        cache_scale=cache_scale,
    )  # fmt: skip


def expanded(
    run: Any,
    q_nope: Float[Array, "T N D"],
    q_rope: Float[Array, "T N P"],
    w_uk: Float[Array, "N D L"],
    w_uv: Float[Array, "N V L"],
    cache: Float[Array, "layers B *page"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    table: Int32[Array, "R C"],
    *,
    scale: float,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    workspace: int,
    axis: str | None,
    sees: Visible,
    cache_scale: Float[Array, ""] | float | None,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """`mla_expanded` by an implementation of the attention (`forms.Attention`)."""
    own = q_nope.shape[1]
    spare = -own % run.HEADS
    if spare:  # heads of zeros, whose outputs nobody sees
        q_nope, q_rope = (jnp.pad(q, ((0, 0), (0, spare), (0, 0))) for q in (q_nope, q_rope))
        w_uk, w_uv = (jnp.pad(w, ((0, spare), (0, 0), (0, 0))) for w in (w_uk, w_uv))
    count, heads, _ = q_nope.shape
    form = pages_of(cache, w_uk.shape[-1], q_rope.shape[-1])
    if axis is not None and jax.lax.axis_size(axis) != shards:
        raise ValueError(f"axis: got {axis!r} of {jax.lax.axis_size(axis)} ranks for {shards} shards; they must agree")
    tiling = run.tiling(count)
    space = workspace_of(workspace, form, shards, interleave, shards if axis else 1, tiling.block)
    if space.rows // tiling.block > MOST_BLOCKS:
        raise ValueError(
            f"workspace: got {workspace} rows; at most {MOST_BLOCKS * tiling.block} fit into the plan of a piece"
        )
    if tiling.groups > MOST_GROUPS:
        raise ValueError(
            f"q_nope: got {count} tokens in {tiling.groups} groups of tiles; at most {MOST_GROUPS} groups fit into the "
            "plan: prefill in several steps"
        )

    rank = jnp.asarray(rank, jnp.int32)
    ranks = rank[None] if axis is None else jax.lax.all_gather(rank, axis)
    axis = axis if shards > 1 else None
    queue = queue_of(rows, table.shape[1], space, sees.window)
    pieces = -(-queue.total // space.units)
    valid = tokens(rows, count).valid
    stored = jnp.asarray(1.0 if cache_scale is None else cache_scale, jnp.float32)
    key_factor = scale * _LOG2_E * stored
    query = run.queries(q_nope, q_rope, tiling)

    def chunk(begin, i, found):
        """Fetches chunk i of the piece into the workspace."""
        units = units_of(queue, begin + i * space.chunk, space.chunk)
        made = gather(cache, layer, rows, table, units, space, ranks, rank, axis, q_nope.dtype)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * space.chunk, 0), found, made)

    def piece(careful, p, carry):
        state, found = carry
        begin = p * space.units
        units = units_of(queue, begin, space.units)
        used = jnp.minimum(queue.total - begin, space.units)
        found = jax.lax.fori_loop(0, -(-used // space.chunk), lambda i, found: chunk(begin, i, found), found)
        filled = Filled(found.rows.reshape(-1, form.width), used * space.unit, space.chunk * space.unit)
        at = found.position.reshape(-1)
        nope, rope, value = run.expand(filled, w_uk, w_uv, key_factor, stored)
        context = Context(nope, rope, value, at)
        plan = plan_of(
            rows, units, queue.base < begin, queue.ends > begin + space.units, at.reshape(-1, tiling.block), tiling,
            space.span, sees.window, careful,
        )  # fmt: skip
        return run.attend(state, query, context, plan, tiling, sees), found

    def attempt(careful, state, found):
        return jax.lax.fori_loop(0, pieces, lambda p, carry: piece(careful, p, carry), (state, found))

    state = run.empty(query, w_uv.shape[1])
    found = Gathered(
        jax.lax.empty((space.units, space.unit, form.width), q_nope.dtype),
        jax.lax.empty((space.units, space.unit), jnp.int32),
    )
    if run.QUICK:

        def again(carry):
            state, found, careful, _ = carry
            state, found = attempt(careful, state, found)
            failed = run.overflowed(state, valid)
            if axis is not None:  # ranks gather together, so they begin again together
                failed = jax.lax.pmax(failed.astype(jnp.int32), axis) > 0
            return state, found, jnp.asarray(True), failed & ~careful

        begin = (state, found, jnp.asarray(False), jnp.asarray(True))
        state, *_ = jax.lax.while_loop(lambda carry: carry[3], again, begin)
    else:
        state, _ = attempt(True, state, found)
    out, lse = run.finish(state, count)
    out = jnp.where(valid[:, None], out, 0).astype(q_nope.dtype)
    return out.reshape(count, heads, -1)[:, :own], jnp.where(valid[:, None], lse, -jnp.inf)[:, :own]
