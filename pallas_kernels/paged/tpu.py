"""Block operations on TPU: copies from HBM to HBM, all layers of a block in one transfer.

Only blocks that are moved cost anything: they come first in the lists. Nothing passes through the core; a few transfers
are under way at a time. In `copy_blocks` a target may be the source of another pair, so content goes by way of a
buffer in HBM: first all sources, then, once those have arrived, all targets.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

# Transfers under way: enough for their latency to be hidden by blocks of a few KiB.
_UNDER_WAY = 16
_HBM = pl.BlockSpec(memory_space=pltpu.HBM)


def _run(count: Any, transfer: Any) -> None:
    """Start transfers 0 to count - 1, each once the one that had its semaphore has ended, and wait for all of them."""

    def one(i, carry):
        pl.when(i >= _UNDER_WAY)(lambda: transfer(i - _UNDER_WAY).wait())
        transfer(i).start()
        return carry

    jax.lax.fori_loop(0, count, one, 0)
    jax.lax.fori_loop(jnp.maximum(count - _UNDER_WAY, 0), count, lambda i, _: transfer(i).wait(), None)


def _copy_kernel(source: Any, target: Any, count: Any, _: Any, pool: Any, held: Any, arrived: Any) -> None:
    def read(i: Any) -> Any:
        return pltpu.make_async_copy(pool.at[:, source[i]], held.at[:, i], arrived.at[i % _UNDER_WAY])

    def write(i: Any) -> Any:
        return pltpu.make_async_copy(held.at[:, i], pool.at[:, target[i]], arrived.at[i % _UNDER_WAY])

    _run(count[0], read)
    _run(count[0], write)


def _gather_kernel(source: Any, target: Any, count: Any, pool: Any, _: Any, out: Any, arrived: Any) -> None:
    def move(i: Any) -> Any:
        return pltpu.make_async_copy(pool.at[:, source[i]], out.at[:, target[i]], arrived.at[i % _UNDER_WAY])

    _run(count[0], move)


def _scatter_kernel(source: Any, target: Any, count: Any, content: Any, _: Any, pool: Any, arrived: Any) -> None:
    def move(i: Any) -> Any:
        return pltpu.make_async_copy(content.at[:, source[i]], pool.at[:, target[i]], arrived.at[i % _UNDER_WAY])

    _run(count[0], move)


def _moved(
    present: Shaped[Array, "n"], *fields: Int32[Array, "n"]
) -> tuple[Int32[Array, "n"], Int32[Array, "n"], Int32[Array, "1"]]:
    """Two fields of the entries that move something, those first, and how many they are."""
    order = jnp.argsort(~present, stable=True)
    first, second = (field[order] for field in fields)
    return first, second, jnp.sum(present, dtype=jnp.int32)[None]


def _call(kernel: Any, outs: Any, lists: Any, arrays: Any, aliased: int, name: str, interpret: Any) -> Any:
    """The kernel over whole arrays in HBM; `aliased`: the array that becomes the first output."""
    return pl.pallas_call(
        kernel,
        out_shape=outs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lists),
            grid=(1,),
            in_specs=[_HBM] * len(arrays),
            out_specs=jax.tree.map(lambda _: _HBM, outs),
            scratch_shapes=[pltpu.SemaphoreType.DMA((_UNDER_WAY,))],
        ),
        input_output_aliases={len(lists) + aliased: 0},
        interpret=interpret,
        name=name,
    )(*lists, *arrays)


def _like(pool: Any, blocks: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((pool.shape[0], blocks, *pool.shape[2:]), pool.dtype)


def copy_blocks(
    pool: Shaped[Array, "layers B *block"],
    source: Int32[Array, "n"],
    target: Int32[Array, "n"],
    *,
    interpret: Any = False,
) -> Shaped[Array, "layers B *block"]:
    """See `paged.api.copy_blocks`."""
    if not len(source):
        return pool
    outs = (_like(pool, pool.shape[1]), _like(pool, len(source)))
    return _call(_copy_kernel, outs, _moved(target != 0, source, target), (pool,), 0, "copy_blocks", interpret)[0]


def zero_blocks(
    pool: Shaped[Array, "layers B *block"], target: Int32[Array, "n"], *, interpret: Any = False
) -> Shaped[Array, "layers B *block"]:
    """See `paged.api.zero_blocks`."""
    zeros = jnp.zeros((pool.shape[0], 1, *pool.shape[2:]), pool.dtype)
    return _scatter(pool, jnp.zeros_like(target), target, zeros, "zero_blocks", interpret)


def gather_blocks(
    pool: Shaped[Array, "layers B *block"], source: Int32[Array, "n"], *, interpret: Any = False
) -> Shaped[Array, "layers n *block"]:
    """See `paged.api.gather_blocks`."""
    count = len(source)
    if not count:
        return jnp.zeros(_like(pool, 0).shape, pool.dtype)
    lists = _moved(source != 0, source, jnp.arange(count, dtype=jnp.int32))
    zeros = jnp.zeros(_like(pool, count).shape, pool.dtype)
    return _call(_gather_kernel, _like(pool, count), lists, (pool, zeros), 1, "gather_blocks", interpret)


def scatter_blocks(
    pool: Shaped[Array, "layers B *block"],
    target: Int32[Array, "n"],
    content: Shaped[Array, "layers n *block"],
    *,
    interpret: Any = False,
) -> Shaped[Array, "layers B *block"]:
    """See `paged.api.scatter_blocks`."""
    return _scatter(pool, jnp.arange(len(target), dtype=jnp.int32), target, content, "scatter_blocks", interpret)


def _scatter(pool: Array, source: Array, target: Array, content: Array, name: str, interpret: Any) -> Array:
    if not len(target):
        return pool
    lists = _moved(target != 0, source, target)
    return _call(_scatter_kernel, _like(pool, pool.shape[1]), lists, (content, pool), 1, name, interpret)
