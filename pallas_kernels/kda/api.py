"""KDA prefill and decode: signatures and contracts.

Axes: T packed tokens, R rows, H heads, K / V key and value width, S slots, E emissions of a row.

Slot 0 is the null slot. A row that reads slot 0 starts from a zero state (the content of slot 0
is never looked at), and a write or emission to slot 0 is dropped. No slot written by a row is read
by another row of the same call. A read slot stays as it is unless the row also writes it.
"""

from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.dispatch import choose
from pallas_kernels.kda import reference, xla
from pallas_kernels.rows import RaggedRows

_PREFILL = {"reference": reference.prefill, "xla": xla.prefill}
_DECODE = {"reference": reference.decode, "xla": xla.decode}


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
    run = choose("kda_prefill", implementation, _PREFILL)
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
    run = choose("kda_decode", implementation, _DECODE)
    return run(
        q, k, v, raw_gate, raw_beta, a_log, dt_bias, states, layer, active, read, write,
        emit_slot, lower_bound=lower_bound,
    )  # fmt: skip
