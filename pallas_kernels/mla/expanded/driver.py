"""Expanded attention for prefill: context rows are gathered and expanded a workspace at a time, and attended to.

k_jh = [W_UK,h c_j | k_pe_j]      v_jh = W_UV,h c_j      o_ih = softmax_j(scale q_ih . k_jh) v_jh
"""

import importlib
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import choose
from pallas_kernels.mla import stripe
from pallas_kernels.mla.expanded.forms import Context
from pallas_kernels.mla.expanded.plan import MOST_BLOCKS, MOST_GROUPS, plan_of
from pallas_kernels.mla.expanded.workspace import Workspace, gather, queue_of, units_of, workspace_of
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


def expand(
    rows: Float[Array, "W LP"],
    w_uk: Float[Array, "N D L"],
    w_uv: Float[Array, "N V L"],
    key_factor: Float[Array, ""],
    value_factor: Float[Array, ""],
) -> tuple[Float[Array, "W ND"], Float[Array, "W P"], Float[Array, "NV W"]]:
    """Keys and values of all heads from cache rows, in the dtype of the rows; sums and factors in fp32."""
    latent = rows[:, : w_uk.shape[-1]]
    precision = Precision.HIGHEST if rows.dtype == jnp.float32 else None
    # Of matrices: a head as an axis of its own makes XLA see a convolution, four times as slow on TPU.
    dot = {"precision": precision, "preferred_element_type": jnp.float32}
    keys, values = (w.astype(rows.dtype).reshape(-1, w.shape[-1]) for w in (w_uk, w_uv))
    nope = jnp.einsum("wl,nl->wn", latent, keys, **dot) * key_factor
    rope = rows[:, w_uk.shape[-1] :].astype(jnp.float32) * key_factor
    value = jnp.einsum("nl,wl->nw", values, latent, **dot) * value_factor
    return nope.astype(rows.dtype), rope.astype(rows.dtype), value.astype(rows.dtype)


def _empty_context(space: Workspace, w_uk: Any, w_uv: Any, dtype: jnp.dtype) -> Context:
    keys, values = (w.shape[0] * w.shape[1] for w in (w_uk, w_uv))
    shapes = (space.rows, keys), (space.rows, space.pages.position), (values, space.rows)
    return Context(*(jax.lax.empty(s, dtype) for s in shapes), jax.lax.empty((space.rows,), jnp.int32))


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
      ValueError: what `mla_attention` raises it for; a workspace too small for a block of keys or a unit of pages; an
        axis of another size than `shards`; for "tpu" types and widths that the kernel does not take.
    """
    run = choose("mla_expanded", implementation, _FORMS, lambda form: form != "tpu" or _kernel().fits(q_nope))()
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
    count, heads, _ = q_nope.shape
    form = pages_of(cache, w_uk.shape[-1], q_rope.shape[-1])
    stripe.check(form.rows, shards, interleave)
    if axis is not None and jax.lax.axis_size(axis) != shards:
        raise ValueError(f"axis: got {axis!r} of {jax.lax.axis_size(axis)} ranks for {shards} shards; they must agree")
    tiling = run.tiling(count, heads)
    space = workspace_of(workspace, form, shards, interleave, shards if axis else 1, tiling.block)
    for name, value, most in (
        ("workspace", space.rows // tiling.block, MOST_BLOCKS),
        ("tokens", tiling.groups, MOST_GROUPS),
    ):
        if value > most:
            raise ValueError(f"{name}: got {value} blocks; at most {most} fit into the plan")

    rank = jnp.asarray(rank, jnp.int32)
    ranks = rank[None] if axis is None else jax.lax.all_gather(rank, axis)
    axis = axis if shards > 1 else None
    queue = queue_of(rows, table.shape[1], space, sees.window)
    pieces = -(-queue.total // space.units)
    valid = tokens(rows, count).valid
    stored = jnp.asarray(1.0 if cache_scale is None else cache_scale, jnp.float32)
    key_factor = scale * _LOG2_E * stored
    query = run.queries(q_nope, q_rope, tiling)

    def chunk(begin, i, context):
        """Expands chunk i of the piece."""
        units = units_of(queue, begin + i * space.chunk, space.chunk)
        found = gather(cache, layer, rows, table, units, space, ranks, rank, axis, q_nope.dtype)
        flat = found.rows.reshape(-1, form.width)
        made = Context(*expand(flat, w_uk, w_uv, key_factor, stored), found.position.reshape(-1))
        at = i * flat.shape[0]
        return Context(*(
            jax.lax.dynamic_update_slice_in_dim(x, y, at, dim)
            for x, y, dim in zip(context, made, (0, 0, 1, 0), strict=True)
        ))  # fmt: skip

    def piece(careful, p, carry):
        state, context = carry
        begin = p * space.units
        units = units_of(queue, begin, space.units)
        chunks = jnp.minimum(-(-(queue.total - begin) // space.chunk), space.units // space.chunk)
        context = jax.lax.fori_loop(0, chunks, lambda i, c: chunk(begin, i, c), context)
        plan = plan_of(
            rows, units, queue.base < begin, queue.ends > begin + space.units, context.at.reshape(-1, tiling.block),
            tiling, space.span, sees.window, careful,
        )  # fmt: skip
        return run.attend(state, query, context, plan, tiling, sees), context

    def attempt(careful, state, context):
        return jax.lax.fori_loop(0, pieces, lambda p, carry: piece(careful, p, carry), (state, context))

    state, context = run.empty(query, w_uv.shape[1]), _empty_context(space, w_uk, w_uv, q_nope.dtype)
    if run.QUICK:

        def again(carry):
            state, context, careful, _ = carry
            state, context = attempt(careful, state, context)
            failed = run.overflowed(state, valid)
            if axis is not None:  # ranks gather together, so they begin again together
                failed = jax.lax.pmax(failed.astype(jnp.int32), axis) > 0
            return state, context, jnp.asarray(True), failed & ~careful

        begin = (state, context, jnp.asarray(False), jnp.asarray(True))
        state, *_ = jax.lax.while_loop(lambda carry: carry[3], again, begin)
    else:
        state, _ = attempt(True, state, context)
    out, lse = run.finish(state, count)
    out = jnp.where(valid[:, None], out, 0).astype(q_nope.dtype)
    return out.reshape(count, heads, -1), jnp.where(valid[:, None], lse, -jnp.inf)
