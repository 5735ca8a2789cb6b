"""KDA as it is defined, one token after another.

Recurrence of a head, S [K, V] in fp32, scale = K^-0.5, q and k L2-normalised:

    S = diag(exp g_t) S
    u_t = beta_t (v_t - S^T k_t)
    S = S + k_t u_t^T
    o_t = S^T (scale q_t)

Every token of prefill and of decode goes through the one loop body below, so a sequence gives the same bits
however it is cut into steps and wherever a saved state is taken up again. On a CPU this is also the fastest
form: the state stays in cache and nothing is computed that a short row does not need.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.kda.inputs import Inputs, prepare
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
        q, k, v, g, beta = (jax.lax.dynamic_index_in_dim(a, t, keepdims=False) for a in x)
        state = jnp.exp(g)[..., None] * state
        u = beta[..., None] * (v - jnp.sum(state * k[..., None], axis=-2))
        state = state + k[..., None] * u[..., None, :]
        o = jnp.sum(state * q[..., None], axis=-2)
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
