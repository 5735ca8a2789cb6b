"""The ops of `kda.api` as sweeps over the state."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.kda.gates import l2_norm, log_decay
from pallas_kernels.kda.gpu.sweep import WIDTH, Replayed, Run, sweep
from pallas_kernels.kda.inputs import Inputs, prepare
from pallas_kernels.kda.records import Commit, Records, emission_slot, unpack_rows
from pallas_kernels.rows import RaggedRows, tokens


def _check(states: jax.Array, interpret: object) -> None:
    depth, width = states.shape[-2:]
    # The interpreter also takes fewer keys, and its time goes with their number.
    if width != WIDTH or (depth != WIDTH and interpret is None):
        raise ValueError(
            f"states: a head is {depth} x {width}; the GPU kernels take {WIDTH} x {WIDTH}, one column a thread; use "
            "implementation='xla' for others"
        )


def _run(
    x: Inputs,
    rows: RaggedRows,
    write: Int32[Array, "R"],
    emit_after: Int32[Array, "R E"],
    emit_slot: Int32[Array, "R E"],
) -> Run:
    return Run(rows.offset, rows.length, x._replace(g=jnp.exp(x.g)), write, emit_after, emit_slot)


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
    interpret: object = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "layers S H K V"]]:
    """See `kda.api.kda_prefill`; there are no chunks."""
    _check(states, interpret)
    present = rows.length > 0
    valid = tokens(rows, q.shape[0]).valid
    x = prepare(q, k, v, raw_gate, raw_beta, a_log, dt_bias, lower_bound, valid)
    run = _run(x, rows, jnp.where(present, write, 0), emit_position - rows.start[:, None], emit_slot)
    states, out, _ = sweep(
        states, layer, jnp.where(present, read, 0), None, run, jnp.zeros(v.shape, v.dtype), interpret=interpret
    )
    return out, states


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
    interpret: object = None,
) -> tuple[Float[Array, "R H V"], Float[Array, "layers S H K V"]]:
    """See `kda.api.kda_decode`."""
    _check(states, interpret)
    x = prepare(q, k, v, raw_gate, raw_beta, a_log, dt_bias, lower_bound, active)
    each, one = jnp.arange(active.shape[0], dtype=jnp.int32), active.astype(jnp.int32)
    run = _run(x, RaggedRows(each, one, each), jnp.where(active, write, 0), one[:, None], emit_slot[:, None])
    states, out, _ = sweep(
        states, layer, jnp.where(active, read, 0), None, run, jnp.zeros(v.shape, v.dtype), interpret=interpret
    )
    return out, states


def _replayed(
    records: Records,
    a_log: jax.Array,
    dt_bias: jax.Array,
    which: Commit,
    lower_bound: float | None,
    goes_on: Bool[Array, "R"] | bool = False,
) -> tuple[Replayed, Int32[Array, "R"]]:
    """What a commit puts into the states, and their slots. Rows that neither write nor emit nor go on are absent."""
    most, slot = records.u.shape[1], emission_slot(which)
    present = (which.write != 0) | (slot != 0) | goes_on
    count = jnp.where(present, jnp.clip(which.accepted, 0, most), 0)
    decay, k = jnp.exp(log_decay(records.raw_gate, a_log, dt_bias, lower_bound)), l2_norm(records.k)
    replayed = Replayed(count, decay, k, records.u, which.emit_after, slot, which.write)
    return replayed, jnp.where(present, which.read, 0)


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
    interpret: object = None,
) -> tuple[Float[Array, "T H V"], Records]:
    """See `kda.api.kda_verify`."""
    _check(states, interpret)
    x = prepare(q, k, v, raw_gate, raw_beta, a_log, dt_bias, lower_bound, tokens(rows, q.shape[0]).valid)
    nowhere = jnp.zeros_like(read)
    run = _run(x, rows, nowhere, nowhere[:, None][:, :0], nowhere[:, None][:, :0])
    out = jnp.zeros(v.shape, v.dtype)
    read = jnp.where(rows.length > 0, read, 0)
    _, out, u = sweep(states, layer, read, None, run, out, most, writes=False, interpret=interpret)
    return out, Records(u, unpack_rows(rows, most, k), unpack_rows(rows, most, raw_gate))


def commit(
    records: Records,
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    which: Commit,
    *,
    lower_bound: float | None,
    interpret: object = None,
) -> Float[Array, "layers S H K V"]:
    """See `kda.api.kda_commit`."""
    _check(states, interpret)
    replayed, read = _replayed(records, a_log, dt_bias, which, lower_bound)
    none = jnp.zeros((0, states.shape[2], WIDTH), jnp.float32)
    return sweep(states, layer, read, replayed, None, none, interpret=interpret)[0]


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
    interpret: object = None,
) -> tuple[Float[Array, "T H V"], Records, Float[Array, "layers S H K V"]]:
    """See `kda.api.kda_commit_verify`."""
    _check(states, interpret)
    most = records.u.shape[1]
    x = prepare(q, k, v, raw_gate, raw_beta, a_log, dt_bias, lower_bound, tokens(rows, q.shape[0]).valid)
    nowhere = jnp.zeros_like(which.read)
    replayed, read = _replayed(records, a_log, dt_bias, which, lower_bound, rows.length > 0)
    run = _run(x, rows, nowhere, nowhere[:, None][:, :0], nowhere[:, None][:, :0])
    out = jnp.zeros(v.shape, v.dtype)
    states, out, u = sweep(states, layer, read, replayed, run, out, most, interpret=interpret)
    return out, Records(u, unpack_rows(rows, most, k), unpack_rows(rows, most, raw_gate)), states
