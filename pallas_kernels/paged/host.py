"""Block operations called from the host with lists of any length: few programs, pools updated in place.

Lists are padded with null blocks to a power of two, so copies of up to n blocks compile at most 1 + log2 n programs
for a pool. Every id is checked before anything runs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped

from pallas_kernels.paged import api
from pallas_kernels.paged.ids import check, check_content, check_targets

_copy = jax.jit(api.copy_blocks, donate_argnums=0, static_argnames="implementation")
_zero = jax.jit(api.zero_blocks, donate_argnums=0, static_argnames="implementation")
_gather = jax.jit(api.gather_blocks, static_argnames="implementation")
_scatter = jax.jit(api.scatter_blocks, donate_argnums=0, static_argnames="implementation")


def bucket(count: int) -> int:
    """Smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def _padded(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    given = np.asarray(ids, np.int32).reshape(-1)
    return np.pad(given, (0, bucket(len(given)) - len(given)))


def copy(
    pool: Shaped[Array, "layers B ..."],
    pairs: Sequence[tuple[int, int]] | np.ndarray,
    *,
    implementation: str | None = None,
) -> Shaped[Array, "layers B ..."]:
    """`copy_blocks` of (source, target) pairs; the pool is donated.

    Raises:
      ValueError: an id beyond the pool, two equal targets, or the null block as a source.
    """
    given = np.asarray(pairs)
    if given.size and (given.ndim != 2 or given.shape[1] != 2):
        raise ValueError(f"pairs: got shape {list(given.shape)}; give (source, target) pairs, [n, 2]")
    source, target = given.reshape(-1, 2).T
    check("source", source, pool.shape[1])
    check_targets("target", target, pool.shape[1])
    if ((source == 0) & (target != 0)).any():
        raise ValueError("source: got block 0, the null block; use zero to clear a block")
    return _copy(pool, _padded(source), _padded(target), implementation=implementation) if len(pairs) else pool


def zero(
    pool: Shaped[Array, "layers B ..."], blocks: Sequence[int] | np.ndarray, *, implementation: str | None = None
) -> Shaped[Array, "layers B ..."]:
    """`zero_blocks`; the pool is donated.

    Raises:
      ValueError: an id beyond the pool, or two equal ones.
    """
    check_targets("target", blocks, pool.shape[1])
    return _zero(pool, _padded(blocks), implementation=implementation) if len(blocks) else pool


def gather(
    pool: Shaped[Array, "layers B ..."], blocks: Sequence[int] | np.ndarray, *, implementation: str | None = None
) -> Shaped[Array, "layers n ..."]:
    """`gather_blocks`: the content of exactly these blocks.

    Raises:
      ValueError: an id beyond the pool.
    """
    check("source", blocks, pool.shape[1])
    return _gather(pool, _padded(blocks), implementation=implementation)[:, : len(blocks)]


def scatter(
    pool: Shaped[Array, "layers B ..."],
    blocks: Sequence[int] | np.ndarray,
    content: Any,
    *,
    implementation: str | None = None,
) -> Shaped[Array, "layers B ..."]:
    """`scatter_blocks` of content [layers, n, ...]; the pool is donated.

    Raises:
      ValueError: an id beyond the pool, two equal ones, or content of another shape or type.
    """
    check_targets("target", blocks, pool.shape[1])
    check_content(content, pool, len(blocks))
    if not len(blocks):
        return pool
    padding = [(0, 0), (0, bucket(len(blocks)) - len(blocks)), *[(0, 0)] * (pool.ndim - 2)]
    return _scatter(pool, _padded(blocks), np.pad(np.asarray(content), padding), implementation=implementation)
