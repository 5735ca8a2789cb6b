"""KDA verify on TPU, alone and behind the commit of the step before; see `kda.tpu.speculate`."""

from typing import Any

from jaxtyping import Array, Float, Int32

from pallas_kernels.kda.records import Commit, Records, pack_rows, unpack_rows
from pallas_kernels.kda.tpu.speculate import VMEM_LIMIT, commit_visits, speculate, verify_visits
from pallas_kernels.kda.tpu.step_tiles import StepTiles, speculate_tiles
from pallas_kernels.rows import RaggedRows


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
    tiles: StepTiles | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "T H V"], Records]:
    """See `kda.api.kda_verify`.

    Raises:
      ValueError: K or V is not 128, or the tiles do not fit into VMEM.
    """
    dtypes = [x.dtype for x in (q, k, v, raw_gate)]
    tiles = tiles or speculate_tiles(read.shape[0], q.shape[1], most, states.dtype, dtypes, (), VMEM_LIMIT)
    dense = tuple(unpack_rows(rows, most, x) for x in (q, k, v, raw_gate, raw_beta))
    visits = verify_visits(rows.length > 0, read, tiles.block)
    out, u, _ = speculate(
        dense, None, a_log, dt_bias, states, layer, visits, tiles, most=most, lower_bound=lower_bound,
        interpret=interpret, name="kda_verify",
    )  # fmt: skip
    return pack_rows(rows, q.shape[0], out), Records(u, dense[1], dense[3])


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
    tiles: StepTiles | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "T H V"], Records, Float[Array, "layers S H K V"]]:
    """See `kda.api.kda_commit_verify`.

    Raises:
      ValueError: K or V is not 128, or the tiles do not fit into VMEM.
    """
    count, most = records.u.shape[:2]
    dtypes, kept = [x.dtype for x in (q, k, v, raw_gate)], [x.dtype for x in records]
    tiles = tiles or speculate_tiles(count, q.shape[1], most, states.dtype, dtypes, kept, VMEM_LIMIT)
    dense = tuple(unpack_rows(rows, most, x) for x in (q, k, v, raw_gate, raw_beta))
    visits = commit_visits(which, most, rows.length > 0, tiles.block)
    out, u, states = speculate(
        dense, records, a_log, dt_bias, states, layer, visits, tiles, most=most, lower_bound=lower_bound,
        interpret=interpret, name="kda_commit_verify",
    )  # fmt: skip
    return pack_rows(rows, q.shape[0], out), Records(u, dense[1], dense[3]), states
