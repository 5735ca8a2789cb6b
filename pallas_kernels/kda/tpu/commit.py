"""KDA commit on TPU; see `kda.tpu.speculate`."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.kda.records import Commit, Records
from pallas_kernels.kda.tpu.speculate import VMEM_LIMIT, commit_visits, speculate
from pallas_kernels.kda.tpu.step_tiles import StepTiles, speculate_tiles


def commit(
    records: Records,
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    which: Commit,
    *,
    lower_bound: float | None,
    tiles: StepTiles | None = None,
    interpret: Any = False,
) -> Float[Array, "layers S H K V"]:
    """See `kda.api.kda_commit`.

    Raises:
      ValueError: K or V is not 128, or the tiles do not fit into VMEM.
    """
    count, most, heads = records.u.shape[:3]
    tiles = tiles or speculate_tiles(count, heads, most, states.dtype, (), [x.dtype for x in records], VMEM_LIMIT)
    visits = commit_visits(which, most, jnp.zeros(count, bool), tiles.block)
    return speculate(
        None, records, a_log, dt_bias, states, layer, visits, tiles, most=most, lower_bound=lower_bound,
        interpret=interpret, name="kda_commit",
    )[2]  # fmt: skip
