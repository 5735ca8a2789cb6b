"""Checks of ids and contents of blocks on the host: an id beyond the pool is refused, never clipped."""

from typing import Any

import jax
import numpy as np


def check(name: str, ids: Any, blocks: int) -> None:
    """Refuse ids outside [0, blocks); traced ids pass unseen.

    Raises:
      ValueError: naming the first such id and its place, or a type that is no whole number.
    """
    if isinstance(ids, jax.core.Tracer):
        return
    if not np.issubdtype(np.asarray(ids).dtype, np.integer) and np.asarray(ids).size:
        raise ValueError(f"{name}: got {np.asarray(ids).dtype} values; ids of blocks are whole numbers")
    wrong = np.flatnonzero((np.asarray(ids) < 0) | (np.asarray(ids) >= blocks))
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(f"{name}: got block {int(np.asarray(ids)[at])} at {at}; the pool has blocks 0 to {blocks - 1}")


def check_targets(name: str, ids: Any, blocks: int) -> None:
    """`check`, and refuse a block that would be written twice (the null block may be).

    Raises:
      ValueError: as said.
    """
    check(name, ids, blocks)
    if isinstance(ids, jax.core.Tracer):
        return
    values, counts = np.unique(np.asarray(ids), return_counts=True)
    twice = values[(counts > 1) & (values != 0)]
    if len(twice):
        raise ValueError(f"{name}: got block {int(twice[0])} twice; each block may be written once")


def check_content(content: Any, pool: Any, count: int) -> None:
    """Refuse what is not the content of `count` blocks of a pool.

    Raises:
      ValueError: another shape or type.
    """
    wanted = (pool.shape[0], count, *pool.shape[2:])
    if content.shape != wanted or content.dtype != pool.dtype:
        raise ValueError(
            f"content: got {content.dtype}{list(content.shape)}; {count} blocks of this pool are "
            f"{pool.dtype}{list(wanted)}"
        )
