"""KDA as it is defined, one token after another.

Recurrence of a head, S [K, V] in fp32, scale = K^-0.5, q and k L2-normalised:

    S = diag(exp g_t) S
    u_t = beta_t (v_t - S^T k_t)
    S = S + k_t u_t^T
    o_t = S^T (scale q_t)

Every token of prefill, decode and verify goes through the one step below, so a sequence gives the same bits
however it is cut into steps and wherever a saved state is taken up again; a commit repeats its first and third line
with the u on record. On a CPU this is also the fastest form: the state stays in cache and nothing is computed that a
short row does not need.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.kda.gates import l2_norm, log_decay
from pallas_kernels.kda.inputs import Inputs, prepare
from pallas_kernels.kda.records import Commit, Records, emission_slot, unpack_rows
from pallas_kernels.rows import RaggedRows, tokens
from pallas_kernels.saves import saves
from pallas_kernels.slots import read_slots, write_slots


class _Stops(NamedTuple):
    """Where each row's state is saved, ascending: tokens of the row before it, and the slot. The last is the
    row's end."""

    after: Int32[Array, "R E1"]
    slot: Int32[Array, "R E1"]


def _stops(
    rows: RaggedRows, write: Int32[Array, "R"], emit_position: Int32[Array, "R E"], emit_slot: Int32[Array, "R E"]
) -> _Stops:
    shape = (rows.length.shape[0], -1)
    wanted = saves(rows, write, emit_position, emit_slot)
    slot = wanted.slot.reshape(shape)
    after = jnp.where(slot != 0, wanted.position.reshape(shape) - rows.start[:, None], 0)
    after = after.at[:, -1].set(rows.length)  # the row's end is a stop whether or not it is saved
    order = jnp.argsort(after, axis=1, stable=True)
    return _Stops(jnp.take_along_axis(after, order, 1), jnp.take_along_axis(slot, order, 1))


def _token(
    state: Float[Array, "H K V"], x: Inputs
) -> tuple[Float[Array, "H K V"], Float[Array, "H V"], Float[Array, "H V"]]:
    """One step of the recurrence: the new state, u and the output."""
    q, k, v, g, beta = x
    state = jnp.exp(g)[..., None] * state
    u = beta[..., None] * (v - jnp.sum(state * k[..., None], axis=-2))
    state = state + k[..., None] * u[..., None, :]
    return state, u, jnp.sum(state * q[..., None], axis=-2)


def _advance(
    begin: Int32[Array, ""],
    end: Int32[Array, ""],
    x: Inputs,
    state: Float[Array, "H K V"],
    out: Float[Array, "T H V"],
) -> tuple[Float[Array, "H K V"], Float[Array, "T H V"]]:
    """The recurrence over packed tokens begin to end; the state after them and `out` with their outputs."""

    def token(t, carry):
        state, out = carry
        state, _, o = _token(state, Inputs(*(jax.lax.dynamic_index_in_dim(a, t, keepdims=False) for a in x)))
        return state, jax.lax.dynamic_update_index_in_dim(out, o, t, 0)

    return jax.lax.fori_loop(begin, end, token, (state, out))


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
    """See `kda.api.kda_prefill`; `chunk` changes nothing here."""
    del chunk
    valid = tokens(rows, q.shape[0]).valid
    x = prepare(q, k, v, raw_gate, raw_beta, a_log, dt_bias, lower_bound, valid)
    initial, states = read_slots(states, layer, jnp.where(rows.length > 0, read, 0))
    initial = initial.astype(jnp.float32)
    stops = _stops(rows, write, emit_position, emit_slot)

    def row(r, carry):
        def segment(j, carry):
            state, begin, out, states = carry
            end = rows.offset[r] + stops.after[r, j]
            state, out = _advance(begin, end, x, state, out)
            return state, jnp.maximum(begin, end), out, write_slots(states, layer, stops.slot[r, j][None], state[None])

        out, states = carry
        start = (initial[r], rows.offset[r], out, states)
        _, _, out, states = jax.lax.fori_loop(0, stops.after.shape[1], segment, start)
        return out, states

    out = jnp.zeros(v.shape, jnp.float32)
    out, states = jax.lax.fori_loop(0, rows.length.shape[0], row, (out, states))
    return out.astype(v.dtype), states


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
    initial, states = read_slots(states, layer, jnp.where(active, read, 0))
    initial = initial.astype(jnp.float32)

    def row(r, carry):
        out, states = carry
        state, out = _advance(r, r + active[r], x, initial[r], out)
        for slot in (write, emit_slot):
            states = write_slots(states, layer, jnp.where(active, slot, 0)[r][None], state[None])
        return out, states

    out = jnp.zeros(v.shape, jnp.float32)
    out, states = jax.lax.fori_loop(0, active.shape[0], row, (out, states))
    return out.astype(v.dtype), states


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
    """Outputs and records of rows that start from `initial`."""
    x = prepare(q, k, v, raw_gate, raw_beta, a_log, dt_bias, lower_bound, tokens(rows, q.shape[0]).valid)

    def row(r, carry):
        def token(i, carry):
            state, out, u = carry
            t = rows.offset[r] + i
            token = Inputs(*(jax.lax.dynamic_index_in_dim(a, t, keepdims=False) for a in x))
            state, correction, o = _token(state, token)
            return state, jax.lax.dynamic_update_index_in_dim(out, o, t, 0), u.at[r, i].set(correction)

        return jax.lax.fori_loop(0, rows.length[r], token, (initial[r].astype(jnp.float32), *carry))[1:]

    out = jnp.zeros(v.shape, jnp.float32)
    u = jnp.zeros((rows.length.shape[0], most, *v.shape[1:]), jnp.float32)
    out, u = jax.lax.fori_loop(0, rows.length.shape[0], row, (out, u))
    return out.astype(v.dtype), Records(u, unpack_rows(rows, most, k), unpack_rows(rows, most, raw_gate))


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
    accepted = jnp.clip(which.accepted, 0, records.u.shape[1])  # of an absent row it may be anything
    k, g = l2_norm(records.k), log_decay(records.raw_gate, a_log, dt_bias, lower_bound)

    def row(r, carry):
        def token(i, carry):
            state, saved = carry
            state = jnp.exp(g[r, i])[..., None] * state
            state = state + k[r, i][..., None] * records.u[r, i][..., None, :]
            return state, jnp.where(i + 1 == which.emit_after[r], state, saved)

        committed, states = carry
        start = initial[r].astype(jnp.float32)
        state, saved = jax.lax.fori_loop(0, accepted[r], token, (start, start))
        states = write_slots(states, layer, which.write[r][None], state[None])
        states = write_slots(states, layer, emission_slot(which)[r][None], saved[None])
        return committed.at[r].set(state.astype(states.dtype)), states

    return jax.lax.fori_loop(0, accepted.shape[0], row, (jnp.zeros_like(initial), states))


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
