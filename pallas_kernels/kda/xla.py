"""KDA as XLA runs it well on wide machines: prefill in chunks, decode, verify and commit of all rows at once.

Prefill works on chunks (`kda.chunk`) in groups: inside a group all chunks are prepared at once, a
scan carries the state through them, outputs and saved states follow in parallel from the incoming
states. Groups run in a loop whose length is the number of chunks in use, not the most possible. A verify step is one
chunk for each row, and a commit the state inside that chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.kda.chunk import chunk_terms, matmul, state_after
from pallas_kernels.kda.gates import l2_norm, log_decay
from pallas_kernels.kda.inputs import Inputs, prepare
from pallas_kernels.kda.records import Commit, Records, emission_slot, pack_rows, unpack_rows
from pallas_kernels.rows import RaggedRows, Tiles, max_tiles, tiles, tokens
from pallas_kernels.saves import Saves, saves
from pallas_kernels.slots import read_slots, write_slots

# Chunks prepared together, and states saved together: enough for batched products, few enough that
# a step with one short row does not pay for many.
_GROUP = 8
_SAVES = 4


class _Plan(NamedTuple):
    """Saves in chunk order: chunk of each, tokens of that chunk it covers, slot, and the bounds
    of each group in the list."""

    chunk: Int32[Array, "n"]
    covered: Int32[Array, "n"]
    slot: Int32[Array, "n"]
    bounds: Int32[Array, "groups1"]


def _plan(wanted: Saves, rows: RaggedRows, grid: Tiles, chunk: int, groups: int, group: int) -> _Plan:
    last = wanted.position - 1
    index = grid.base[wanted.row] + last // chunk - rows.start[wanted.row] // chunk
    index = jnp.where(wanted.slot == 0, groups * group, index)
    order = jnp.argsort(index)
    edges = jnp.arange(groups + 1, dtype=jnp.int32) * group
    bounds = jnp.sum(index[None, :] < edges[:, None], axis=1, dtype=jnp.int32)
    return _Plan(index[order], (last % chunk + 1)[order], wanted.slot[order], bounds)


def _load_group(inputs: Inputs, grid: Tiles, at: Int32[Array, "G"], chunk: int) -> Inputs:
    """Inputs of the chunks `at`, head-major [G, H, C, ...], neutral in slots that are no tokens."""
    slot = jnp.arange(chunk, dtype=jnp.int32)[None, :]
    index = jnp.clip(grid.first[at][:, None] + slot, 0, inputs.q.shape[0] - 1)
    inside = (slot >= grid.low[at][:, None]) & (slot < grid.high[at][:, None])

    def load(x):
        picked = jnp.moveaxis(x[index], 2, 1)
        return jnp.where(inside.reshape(inside.shape[0], 1, chunk, *(1,) * (x.ndim - 2)), picked, 0.0)

    return jax.tree.map(load, inputs)


def prefill(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    raw_gate: Float[Array, "T H K"],
    raw_beta: Float[Array, "T H"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    read: Int32[Array, "R"],
    write: Int32[Array, "R"],
    emit_position: Int32[Array, "R E"],
    emit_slot: Int32[Array, "R E"],
    *,
    lower_bound: float | None,
    chunk: int,
) -> tuple[Float[Array, "T H V"], Float[Array, "layers S H K V"]]:
    """See `kda.api.kda_prefill`."""
    count, heads, width = q.shape[0], q.shape[1], v.shape[-1]
    most = max_tiles(count, read.shape[0], chunk, anchored=True)
    group = min(_GROUP, most)
    groups = -(-most // group)
    grid = tiles(rows, chunk, anchored=True, max_tiles=groups * group)
    token = tokens(rows, count)
    inputs = prepare(q, k, v, raw_gate, raw_beta, a_log, dt_bias, lower_bound, token.valid)
    initial, states = read_slots(states, layer, read)
    initial = initial.astype(jnp.float32)
    plan = _plan(saves(rows, write, emit_position, emit_slot), rows, grid, chunk, groups, group)

    def one_group(i, carry):
        state, out, states = carry
        at = i * group + jnp.arange(group, dtype=jnp.int32)
        x = _load_group(inputs, grid, at, chunk)
        terms = chunk_terms(*x)

        def one_chunk(state, x):
            row, first, terms = x
            state = jnp.where(first, initial[row], state)
            u = terms.u0 - matmul(terms.w, state)
            kg_u = jnp.einsum("hck,hcv->hkv", terms.kg, u, precision=Precision.HIGHEST)
            return terms.decay[..., None] * state + kg_u, (state, u)

        row = grid.row[at]
        xs = (row, at == grid.base[row], terms)
        state, (incoming, u) = jax.lax.scan(one_chunk, state, xs)
        o = matmul(terms.q_decayed, incoming) + matmul(terms.a_qk, u)
        out = jax.lax.dynamic_update_slice_in_dim(out, o, i * group, axis=0)

        def save(j, states):
            which = plan.bounds[i] + j * _SAVES + jnp.arange(_SAVES, dtype=jnp.int32)
            mine = which < plan.bounds[i + 1]
            which = jnp.where(mine, which, 0)
            c = jnp.clip(plan.chunk[which] - i * group, 0, group - 1)
            kept = state_after(plan.covered[which], incoming[c], x.k[c], x.g[c], u[c])
            return write_slots(states, layer, jnp.where(mine, plan.slot[which], 0), kept)

        rounds = (plan.bounds[i + 1] - plan.bounds[i] + _SAVES - 1) // _SAVES
        return state, out, jax.lax.fori_loop(0, rounds, save, states)

    carry = (
        jnp.zeros_like(initial[0]),
        jnp.zeros((groups * group, heads, chunk, width), jnp.float32),
        states,
    )
    used = (grid.used + group - 1) // group
    _, out, states = jax.lax.fori_loop(0, used, one_group, carry)
    home = grid.base[token.row] + token.position // chunk - rows.start[token.row] // chunk
    o = out[home, :, token.position % chunk]
    return jnp.where(token.valid[:, None, None], o, 0.0).astype(v.dtype), states


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
) -> tuple[Float[Array, "R H V"], Float[Array, "layers S H K V"]]:
    """See `kda.api.kda_decode`."""
    x = prepare(q, k, v, raw_gate, raw_beta, a_log, dt_bias, lower_bound, active)
    state, states = read_slots(states, layer, jnp.where(active, read, 0))
    state = jnp.exp(x.g)[..., None] * state.astype(jnp.float32)
    u = x.beta[..., None] * (x.v - jnp.sum(state * x.k[..., None], axis=-2))
    state = state + x.k[..., None] * u[..., None, :]
    o = jnp.sum(state * x.q[..., None], axis=-2)
    for slot in (write, emit_slot):
        states = write_slots(states, layer, jnp.where(active, slot, 0), state)
    return o.astype(v.dtype), states


def _run(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    raw_gate: Float[Array, "T H K"],
    raw_beta: Float[Array, "T H"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    initial: Float[Array, "R H K V"],
    rows: RaggedRows,
    most: int,
    lower_bound: float | None,
) -> tuple[Float[Array, "T H V"], Records]:
    """Outputs and records of rows that start from `initial`: the chunk form, one chunk a row."""
    x = prepare(q, k, v, raw_gate, raw_beta, a_log, dt_bias, lower_bound, tokens(rows, q.shape[0]).valid)
    chunk = 1 << (most - 1).bit_length()  # halving needs a power of two
    slot = jnp.arange(chunk, dtype=jnp.int32)
    index = jnp.clip(rows.offset[:, None] + slot, 0, q.shape[0] - 1)
    inside = slot < rows.length[:, None]

    def load(x):
        picked = jnp.moveaxis(x[index], 2, 1)
        return jnp.where(inside.reshape(inside.shape[0], 1, chunk, *(1,) * (x.ndim - 2)), picked, 0.0)

    terms = chunk_terms(*jax.tree.map(load, x))
    state = initial.astype(jnp.float32)
    u = terms.u0 - matmul(terms.w, state)
    o = matmul(terms.q_decayed, state) + matmul(terms.a_qk, u)
    out = pack_rows(rows, q.shape[0], jnp.moveaxis(o, 1, 2)).astype(v.dtype)
    records = Records(jnp.moveaxis(u, 1, 2)[:, :most], unpack_rows(rows, most, k), unpack_rows(rows, most, raw_gate))
    return out, records


def _commit(
    records: Records,
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    which: Commit,
    lower_bound: float | None,
) -> tuple[Float[Array, "R H K V"], Float[Array, "layers S H K V"]]:
    """Committed states of all rows, in the dtype of the pool, and the pool with them."""
    initial, states = read_slots(states, layer, which.read)
    most = records.u.shape[1]
    x = l2_norm(records.k), log_decay(records.raw_gate, a_log, dt_bias, lower_bound), records.u

    def after(count):
        inside = (jnp.arange(most) < count[:, None])[:, :, None, None]
        k, g, u = (jnp.moveaxis(jnp.where(inside, a, 0.0), 1, 2) for a in x)
        return state_after(count, initial.astype(jnp.float32), k, g, u).astype(initial.dtype)

    state = after(jnp.clip(which.accepted, 0, most))
    emit = emission_slot(which)
    states = write_slots(states, layer, which.write, state)
    return state, write_slots(states, layer, emit, after(jnp.where(emit != 0, which.emit_after, 0)))


def verify(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    raw_gate: Float[Array, "T H K"],
    raw_beta: Float[Array, "T H"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    read: Int32[Array, "R"],
    *,
    most: int,
    lower_bound: float | None,
) -> tuple[Float[Array, "T H V"], Records]:
    """See `kda.api.kda_verify`."""
    initial, _ = read_slots(states, layer, jnp.where(rows.length > 0, read, 0))
    return _run(q, k, v, raw_gate, raw_beta, a_log, dt_bias, initial, rows, most, lower_bound)


def commit(
    records: Records,
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    which: Commit,
    *,
    lower_bound: float | None,
) -> Float[Array, "layers S H K V"]:
    """See `kda.api.kda_commit`."""
    return _commit(records, a_log, dt_bias, states, layer, which, lower_bound)[1]


def commit_verify(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    raw_gate: Float[Array, "T H K"],
    raw_beta: Float[Array, "T H"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    records: Records,
    which: Commit,
    *,
    lower_bound: float | None,
) -> tuple[Float[Array, "T H V"], Records, Float[Array, "layers S H K V"]]:
    """See `kda.api.kda_commit_verify`."""
    most = records.u.shape[1]
    initial, states = _commit(records, a_log, dt_bias, states, layer, which, lower_bound)
    initial = jnp.where((rows.length > 0)[:, None, None, None], initial, 0)
    out, records = _run(q, k, v, raw_gate, raw_beta, a_log, dt_bias, initial, rows, most, lower_bound)
    return out, records, states
