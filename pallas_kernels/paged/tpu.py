"""Block copies on TPU: HBM to HBM, only the pairs that copy something, all layers of a block in one transfer.

A target may be the source of another pair, so content goes by way of a buffer in HBM: first all sources, then, once
those have arrived, all targets. Nothing passes through the core; a few transfers are under way at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

# Transfers under way: enough for their latency to be hidden by blocks of a few KiB.
_UNDER_WAY = 16


def _kernel(source: Any, target: Any, count: Any, pool: Any, new_pool: Any, held: Any, arrived: Any) -> None:
    def run(transfer: Any) -> None:
        """Start every transfer, each once the one that had its semaphore has ended, and wait for all of them."""

        def one(i, carry):
            pl.when(i >= _UNDER_WAY)(lambda: transfer(i - _UNDER_WAY).wait())
            transfer(i).start()
            return carry

        jax.lax.fori_loop(0, count[0], one, 0)
        jax.lax.fori_loop(jnp.maximum(count[0] - _UNDER_WAY, 0), count[0], lambda i, _: transfer(i).wait(), None)

    def read(i: Any) -> Any:
        return pltpu.make_async_copy(pool.at[:, source[i]], held.at[:, i], arrived.at[i % _UNDER_WAY])

    def write(i: Any) -> Any:
        return pltpu.make_async_copy(held.at[:, i], new_pool.at[:, target[i]], arrived.at[i % _UNDER_WAY])

    run(read)
    run(write)


def copy_blocks(
    pool: Shaped[Array, "layers B *block"],
    source: Int32[Array, "n"],
    target: Int32[Array, "n"],
    *,
    interpret: Any = False,
) -> Shaped[Array, "layers B *block"]:
    """See `paged.api.copy_blocks`."""
    if not source.shape[0]:
        return pool
    # Pairs that copy something first.
    order = jnp.argsort(target == 0, stable=True)
    count = jnp.sum(target != 0, dtype=jnp.int32)[None]
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    held = jax.ShapeDtypeStruct((pool.shape[0], source.shape[0], *pool.shape[2:]), pool.dtype)
    return pl.pallas_call(
        _kernel,
        out_shape=(jax.ShapeDtypeStruct(pool.shape, pool.dtype), held),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[hbm],
            out_specs=(hbm, hbm),
            scratch_shapes=[pltpu.SemaphoreType.DMA((_UNDER_WAY,))],
        ),
        input_output_aliases={3: 0},
        interpret=interpret,
        name="copy_blocks",
    )(source[order], target[order], count, pool)[0]
