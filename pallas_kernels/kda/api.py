"""KDA prefill, decode, verify and commit: signatures and contracts.

Axes: T packed tokens, R rows, H heads, K / V key and value width, S slots, E emissions of a row, Q most tokens
of a row in a verify step (drafts + 1).

Slot 0 is the null slot. A row that reads slot 0 starts from a zero state (the content of slot 0 is never looked at),
and a write or emission to slot 0 is dropped. A read slot stays as it is unless the row also writes it.

What a call may be given, since copies to and from the pool overlap:

- No slot that a row writes, at its end or by an emission, is read or written by another row of the call.
- A row may write the slot it reads, but not emit to it.
- Of several saves of one row to one slot the one after most tokens stays, so its end outlasts its emissions.

With no row or no packed token at all (R or T of 0) nothing is launched.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.dispatch import Implementations, choose, on_hopper
from pallas_kernels.kda import reference, xla
from pallas_kernels.kda.records import Commit, Records, no_records
from pallas_kernels.rows import RaggedRows

# Modules of the TPU kernels, by op.
_TPU = {"prefill": "prefill", "decode": "decode", "verify": "verify", "commit": "commit", "commit_verify": "verify"}


def _forms(op: str) -> Implementations:
    return {
        "reference": getattr(reference, op),
        "xla": getattr(xla, op),
        "tpu": f"pallas_kernels.kda.tpu.{_TPU[op]}:{op}",
        "gpu": f"pallas_kernels.kda.gpu:{op}",
    }


def _fits(states: Float[Array, "layers S H K V"]) -> Callable[[str], bool]:
    """Whether an implementation is for such states on this platform."""
    heads, depth, width = states.shape[2:]
    wide = depth == width == 128
    on_tpu = wide and states.dtype in (jnp.float32, jnp.bfloat16) and (heads <= 32 or heads % 16 == 0)
    return lambda form: {"tpu": on_tpu, "gpu": wide and on_hopper()}.get(form, True)


def kda_prefill(
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
    chunk: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "layers S H K V"]]:
    """Gated delta rule over ragged rows, any mix of lengths (decode rows of one token included).

    q and k come raw (after convolution and SiLU); the L2 norm, the gate, beta and the query scale
    K**-0.5 are applied inside. The reference goes token by token, so its bits do not depend on how a
    sequence is cut; forms in chunks anchor their grid at absolute positions, so a resumed prefill
    meets the same chunk edges as an uncut one.

    Args:
      states: pool of recurrent states; donate it under jit.
      layer: which layer of the pool, may be traced.
      read: [R] slot of the state before the row's first token; 0 starts from zeros.
      write: [R] slot that receives the state after the row's last token; 0 drops it.
      emit_position: [R, E] absolute token counts after which the state is saved as well,
        start < position <= start + length, any offset inside a chunk, several in one chunk.
      emit_slot: [R, E] slot of each emission; 0 means none.
      lower_bound: None for the softplus gate, else the bound (in [-5, 0)) of the sigmoid gate.
      chunk: tokens of a chunk, a power of two, where the implementation has chunks.
      implementation: see `dispatch.choose`.

    Returns:
      Output [T, H, V] in the dtype of v (zeros on slack tokens) and the pool.
    """
    run = choose("kda_prefill", implementation, _forms("prefill"), _fits(states))
    if 0 in (q.shape[0], read.shape[0]):
        return jnp.zeros_like(v), states
    return run(
        q, k, v, raw_gate, raw_beta, a_log, dt_bias, states, layer, rows, read, write,
        emit_position, emit_slot, lower_bound=lower_bound, chunk=chunk,
    )  # fmt: skip


def kda_decode(
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
    implementation: str | None = None,
) -> tuple[Float[Array, "R H V"], Float[Array, "layers S H K V"]]:
    """One token for each active row: same mathematics and slot rules as `kda_prefill`.

    Args:
      active: [R] rows that carry a token; the others give zeros and write nothing.
      emit_slot: [R] second slot that also receives the new state; 0 means none.

    Returns:
      Output [R, H, V] in the dtype of v and the pool.
    """
    run = choose("kda_decode", implementation, _forms("decode"), _fits(states))
    if q.shape[0] == 0:
        return jnp.zeros_like(v), states
    return run(
        q, k, v, raw_gate, raw_beta, a_log, dt_bias, states, layer, active, read, write,
        emit_slot, lower_bound=lower_bound,
    )  # fmt: skip


def kda_verify(
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
    implementation: str | None = None,
) -> tuple[Float[Array, "T H V"], Records]:
    """Runs the tokens of a speculative step without touching any state.

    Each row carries its last sampled token and its drafts, 1 to Q tokens, ragged. How many of them are valid is known
    only once the sampler has seen the outputs; `kda_commit` or `kda_commit_verify` then make the state from the
    records. Mathematics and slot rules are those of `kda_prefill`.

    Args:
      states: pool of recurrent states, read only.
      rows: rows of at most `most` tokens; a longer row is outside the contract. `start` is not used.
      read: [R] slot of the state before the row's first token; 0 starts from zeros.
      most: Q, the most tokens of a row; static.

    Returns:
      Output [T, H, V] in the dtype of v (zeros on slack tokens) and the records of each row.
    """
    run = choose("kda_verify", implementation, _forms("verify"), _fits(states))
    if 0 in (q.shape[0], read.shape[0]):
        return jnp.zeros_like(v), no_records(read.shape[0], most, k, v, raw_gate)
    return run(
        q, k, v, raw_gate, raw_beta, a_log, dt_bias, states, layer, rows, read, most=most, lower_bound=lower_bound
    )  # fmt: skip


def kda_commit(
    records: Records,
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    which: Commit,
    *,
    lower_bound: float | None,
    implementation: str | None = None,
) -> Float[Array, "layers S H K V"]:
    """State after the accepted tokens of a verify step, made from the state before it and the records.

    Args:
      records: of `kda_verify` or `kda_commit_verify`, same layer.
      states: pool of recurrent states; donate it under jit.
      which: accepted tokens and slots of each row, see `Commit`; slot rules are those of `kda_prefill`.

    Returns:
      The pool.
    """
    run = choose("kda_commit", implementation, _forms("commit"), _fits(states))
    if which.read.shape[0] == 0:
        return states
    return run(records, a_log, dt_bias, states, layer, which, lower_bound=lower_bound)


def kda_commit_verify(
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
    implementation: str | None = None,
) -> tuple[Float[Array, "T H V"], Records, Float[Array, "layers S H K V"]]:
    """`kda_commit` of the step before, then `kda_verify` of this one from the committed states, in one pass.

    The state is read once, committed, used and written once, which is what one decode step moves; apart, commit
    and verify would read it twice. It is an op of its own and not a flag of `kda_verify` because its contract
    differs: it takes the pool to be donated and returns it, where `kda_verify` only reads. Decode needs no lazy form
    of its own: it is this op with rows of one token, all of which count in the next step.

    A row may be in either half alone. Without tokens (length 0) it is committed only. Without anything to commit
    (a row fresh from prefill) it has `accepted` 0 and starts from `which.read`, and with `write` equal to `read` or 0
    nothing is written. What the tokens start from has been rounded to the dtype of the pool, as if the two ops had
    run one after the other.

    Args:
      states: pool of recurrent states; donate it under jit.
      rows: rows of this step's tokens, at most Q of the records each.
      records: of the step before.
      which: accepted tokens of the step before, and slots.

    Returns:
      Output [T, H, V] in the dtype of v (zeros on slack tokens), records of this step and the pool.
    """
    run = choose("kda_commit_verify", implementation, _forms("commit_verify"), _fits(states))
    count, most = records.u.shape[:2]
    if 0 in (q.shape[0], count):
        committed = kda_commit(
            records, a_log, dt_bias, states, layer, which, lower_bound=lower_bound, implementation=implementation
        )
        return jnp.zeros_like(v), no_records(count, most, k, v, raw_gate), committed
    return run(
        q, k, v, raw_gate, raw_beta, a_log, dt_bias, states, layer, rows, records, which, lower_bound=lower_bound
    )  # fmt: skip
