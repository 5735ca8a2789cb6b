"""Vector memory of a TPU core, and what arrays take of it."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

VMEM_BYTES = {"v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20, "tpu7x": 64 << 20}
# Tiles are chosen alike for all chips.
SMALLEST_VMEM = min(VMEM_BYTES.values())

_LANES, _SUBLANES = 128, 8


def array_bytes(shape: Sequence[int], dtype: DTypeLike) -> int:
    """Bytes of an array whose last two axes are padded to whole tiles: 128 lanes by 8 words of rows."""
    size = jnp.dtype(dtype).itemsize
    tall = _SUBLANES * max(4 // size, 1)
    *outer, rows, lanes = (1, *shape)
    total = -(-rows // tall) * tall * -(-lanes // _LANES) * _LANES * size
    for n in outer:
        total *= n
    return total
