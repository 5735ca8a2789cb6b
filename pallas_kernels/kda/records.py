"""What a verify step leaves behind so that any number of its tokens can be accepted later."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.rows import RaggedRows, tokens


class Records(NamedTuple):
    """Records of up to Q tokens of each row, dense over row slots.

    With u_t = beta_t (v_t - S^T k_t), the corrections of the delta rule, the state after a tokens is

        S_a = diag(exp G_a) S_0 + sum_(t < a) (k_t exp(G_a - G_t)) u_t^T

    so neither v, beta, q nor any projection is needed again; k and the gate are kept raw, in the dtype they
    came in, because they cost half of what their fp32 forms would and are turned into those by the same code.

    Token slots at or beyond a row's length, and absent rows, are unspecified and may hold NaN.

    The row is the outermost axis: one row is then one contiguous copy per array, whatever the number of heads, and
    heads lie on sublanes, as they do in the packed inputs.

    Attributes:
      u: [R, Q, H, V] fp32.
      k: [R, Q, H, K] after the convolution, not normalised.
      raw_gate: [R, Q, H, K].
    """

    u: Float[Array, "R Q H V"]
    k: Float[Array, "R Q H K"]
    raw_gate: Float[Array, "R Q H K"]


class Commit(NamedTuple):
    """What becomes of each row's records.

    A row that neither writes nor emits (nor, in a lazy step, has tokens) is absent: its other fields mean nothing.

    Attributes:
      accepted: [R] tokens of the records that count, 0 to Q; with 0 the state stays as it is, copied if `write` is
        not `read`, and the records are not looked at.
      read: [R] slot of the state the records start from; 0 stands for zeros.
      write: [R] slot that receives the state after `accepted` tokens; 0 drops it.
      emit_after: [R] tokens after which the state is saved as well, 1 <= emit_after <= accepted; any other value
        saves nothing.
      emit_slot: [R] slot of that save, not the one in `read`; 0 means none.
    """

    accepted: Int32[Array, "R"]
    read: Int32[Array, "R"]
    write: Int32[Array, "R"]
    emit_after: Int32[Array, "R"]
    emit_slot: Int32[Array, "R"]


def pack_rows(rows: RaggedRows, count: int, x: Shaped[Array, "R Q H V"]) -> Shaped[Array, "T H V"]:
    """Dense row slots laid out on the packed axis of `count` tokens, zeros on slack."""
    token = tokens(rows, count)
    return jnp.where(token.valid[:, None, None], x[token.row, token.within], 0)


def unpack_rows(rows: RaggedRows, most: int, x: Shaped[Array, "T *axes"]) -> Shaped[Array, "R Q *axes"]:
    """Packed tokens as `most` slots for each row; slots that are no tokens hold anything."""
    slot = rows.offset[:, None] + jnp.arange(most, dtype=jnp.int32)
    return x[jnp.clip(slot, 0, x.shape[0] - 1)]


def no_records(
    count: int, most: int, k: Float[Array, "T H K"], v: Float[Array, "T H V"], raw_gate: Float[Array, "T H K"]
) -> Records:
    """Records of `count` rows without tokens."""
    like = (k, raw_gate)
    u = jnp.zeros((count, most, *v.shape[1:]), jnp.float32)
    return Records(u, *(jnp.zeros((count, most, *x.shape[1:]), x.dtype) for x in like))


def emission_slot(which: Commit) -> Int32[Array, "R"]:
    """Slot of each row's emission, 0 where none is due or the row's end goes there."""
    due = (which.emit_after > 0) & (which.emit_after <= which.accepted) & (which.emit_slot != which.write)
    return jnp.where(due, which.emit_slot, 0)
