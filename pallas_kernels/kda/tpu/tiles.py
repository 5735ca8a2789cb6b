"""Heads of one program of the prefill kernel, from what fits into VMEM."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.kda.tpu.chunk import CHUNK, WIDTH
from pallas_kernels.vmem import SMALLEST_VMEM

MAX_HEADS = 16  # beyond that compile time grows faster than speed
WINDOW = CHUNK + 16  # packed rows that hold a chunk at any offset
BUFFERS = 3  # a chunk in flight, one being prepared, one being carried through the state

# One budget for all chips, so that a program is cut alike everywhere; the rest is for register spills and buffers of
# the compiler.
VMEM_BUDGET = 3 * SMALLEST_VMEM // 4


def vmem_bytes(heads: int, input_dtype: DTypeLike, out_dtype: DTypeLike, pool_dtype: DTypeLike, exact: bool) -> int:
    """Bytes of VMEM that a program of `heads` heads asks for, buffers of both directions included."""
    row = heads * WIDTH
    state = heads * WIDTH * WIDTH
    operand = 4 if exact else 2
    pairs = (heads + 1) // 2
    inputs = 4 * BUFFERS * WINDOW * row * jnp.dtype(input_dtype).itemsize
    outputs = (2 * WINDOW + 16) * row * jnp.dtype(out_dtype).itemsize
    states = 2 * state * 4 + 3 * state * jnp.dtype(pool_dtype).itemsize
    # read, kg, a_qk, m, inverse and decay of a pair, and u.
    prepared = pairs * (operand * (4 + 2 + 1 + 1) * CHUNK * WIDTH + 4 * (16 + 8) * WIDTH)
    corrections = operand * CHUNK * row
    beta = BUFFERS * (2 * CHUNK * WIDTH + 4 * max(pairs, 8) * 2 * CHUNK)
    selector = 2 * 3 * max(heads, 8) * pairs * 2 * CHUNK
    constants = 2 * (4 * CHUNK * 2 * CHUNK * operand + CHUNK * 2 * CHUNK * 4 + 8 * row * 4 + selector)
    return inputs + outputs + states + prepared + corrections + beta + constants


def heads_per_program(
    heads: int,
    input_dtype: DTypeLike,
    out_dtype: DTypeLike,
    pool_dtype: DTypeLike,
    exact: bool,
    limit: int = VMEM_BUDGET,
) -> int:
    """Most heads, at most `MAX_HEADS`, that divide `heads` and fit.

    Heads work in pairs: in a program of an odd number the last one is its own partner.

    Raises:
      ValueError: not even one head fits.
    """
    divisors = [n for n in range(1, min(heads, MAX_HEADS) + 1) if heads % n == 0]
    fitting = [n for n in divisors if vmem_bytes(n, input_dtype, out_dtype, pool_dtype, exact) <= limit]
    if not fitting:
        need = vmem_bytes(1, input_dtype, out_dtype, pool_dtype, exact)
        raise ValueError(
            f"kda_prefill needs {need} bytes of VMEM for one head, {limit} are allowed; use narrower dtypes"
        )
    return max(fitting)
