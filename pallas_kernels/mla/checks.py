"""What a caller may get wrong and a kernel would not notice: shapes that do not belong together, wrong indices."""

from typing import Any

import jax
import numpy as np

from pallas_kernels.rows import RaggedRows


def check_table(rows: RaggedRows, table: Any) -> None:
    """Refuse a block table that has not one line for each row of the step.

    Raises:
      ValueError: as said.
    """
    count = rows.offset.shape[0]
    if table.ndim != 2 or table.shape[0] != count:
        raise ValueError(f"table: got shape {list(table.shape)} for {count} rows of the step; give [{count}, columns]")


def check_index(name: str, index: Any, end: int) -> None:
    """Refuse an index outside [0, end); one that is traced passes unseen.

    Raises:
      ValueError: as said.
    """
    if isinstance(index, jax.core.Tracer):
        return
    if not 0 <= int(np.asarray(index)) < end:
        raise ValueError(f"{name}: got {int(np.asarray(index))}; it lies in 0 to {end - 1}")


def check_pool(cache: Any) -> None:
    """Refuse a pool that is not [layers, blocks, rows, width].

    Raises:
      ValueError: as said.
    """
    if cache.ndim != 4:
        raise ValueError(f"cache: got shape {list(cache.shape)}; a pool is [layers, blocks, rows of a page, width]")
