"""Tiles of the kernels that visit one state for each row: decode, verify and commit."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.kda.tpu.columns import column_shapes
from pallas_kernels.vmem import array_bytes

WIDTH = 128  # K and V: a state is 128 sublanes by 128 lanes

# Heads written out in one program. More fill latencies no better and only lengthen the code.
_MOST_HEADS = 32
# Heads times rows written out together, for the latency at both ends of a step to be small beside its work; with a
# bf16 state there is half the time.
_PAIRS = {jnp.dtype(jnp.float32): 32, jnp.dtype(jnp.bfloat16): 64}
_MOST_ROWS = 8  # each row brings its own predicates, which do not get cheaper by being many
# Bytes that have to be in flight in one direction: bandwidth times latency of any chip, and as much again.
_IN_FLIGHT = 4 << 20
_ROWS = 32
# Heads by which the products of a lazy step trail its commits, so that neither waits for the other.
LAG = 4


class StepTiles(NamedTuple):
    """Sizes of one kernel.

    Attributes:
      heads: heads of a program.
      rows: rows worked on together.
      block: rows whose inputs lie in VMEM together.
      depth: states that may lie in VMEM in each direction, a power of two.
      ahead: states fetched ahead.
      vmem: bytes of VMEM that all this takes.
    """

    heads: int
    rows: int
    block: int
    depth: int
    ahead: int
    vmem: int


def split_heads(heads: int) -> int:
    """Heads of a program: all, or the largest divisor of whole packed tiles that is not above 32.

    Raises:
      ValueError: there is none.
    """
    if heads <= _MOST_HEADS:
        return heads
    for size in range(_MOST_HEADS, 0, -16):
        if heads % size == 0:
            return size
    raise ValueError(
        f"heads: got {heads} on a device; above {_MOST_HEADS} they have to be a multiple of 16; use 'xla' for others"
    )


def _gate_bytes(heads: int) -> int:
    """Slope and bias of the gate, double-buffered."""
    return 4 * array_bytes((heads, WIDTH), jnp.float32)


def decode_tiles(rows: int, heads: int, state: jnp.dtype, inputs: Sequence[jnp.dtype], limit: int) -> StepTiles:
    """Tiles of `decode`.

    Args:
      inputs: dtypes of q, k, v and the raw gate; outputs have that of v.
      limit: bytes of VMEM that may be used.

    Raises:
      ValueError: they do not fit into `limit` bytes of VMEM.
    """
    group = split_heads(heads)
    unit = group * WIDTH * WIDTH * jnp.dtype(state).itemsize
    together = min(rows, _MOST_ROWS, max(1, _PAIRS[jnp.dtype(state)] // group))
    depth = 4
    while depth * unit < 2 * _IN_FLIGHT or depth < 4 * together:
        depth *= 2
    block = min(_ROWS, -(-rows // 8) * 8)
    pairs = together * group
    columns = column_shapes(pairs, WIDTH, inputs[1], state)
    scratch = sum(array_bytes(*each) for each in (((pairs, WIDTH), jnp.float32), *columns))

    def needed(block: int) -> int:
        per_row = sum(array_bytes((block, group, WIDTH), x) for x in (*inputs, inputs[2]))
        beta = array_bytes((block, heads), jnp.float32)
        return 2 * depth * unit + 2 * (per_row + beta) + _gate_bytes(group) + scratch

    while block > 8 and needed(block) > limit:
        block = -(-block // 16) * 8
    vmem = needed(block)
    if vmem > limit:
        raise ValueError(f"kda_decode: {vmem} bytes of VMEM needed for {heads} heads, {limit} may be used")
    return StepTiles(group, together, block, depth, depth - 2 * together, vmem)


def speculate_tiles(
    rows: int,
    heads: int,
    most: int,
    state: jnp.dtype,
    tokens: Sequence[jnp.dtype],
    records: Sequence[jnp.dtype],
    limit: int,
) -> StepTiles:
    """Tiles of the kernel behind verify and commit, `most` tokens a row.

    Args:
      tokens: dtypes of q, k, v and the raw gate, none for commit alone; outputs have that of v.
      records: dtypes of u, k and the raw gate on record, none for verify alone.
      limit: bytes of VMEM that may be used.

    Raises:
      ValueError: they do not fit into `limit` bytes of VMEM.
    """
    group = split_heads(heads)
    unit = group * WIDTH * WIDTH * jnp.dtype(state).itemsize
    together = min(rows, _MOST_ROWS, max(1, 32 // group))
    depth = 4
    while depth * unit < 2 * _IN_FLIGHT or depth < 4 * together:
        depth *= 2
    verifies, commits = bool(tokens), bool(records)
    outputs = (tokens[2], jnp.float32) if verifies else ()
    per_row = sum(array_bytes((most, group, WIDTH), x) for x in (*tokens, *outputs, *records))
    fixed = (1 + commits) * depth * unit + _gate_bytes(group)
    if verifies:
        per_row += array_bytes((most, heads), jnp.float32)  # beta
        kept = 3 if state == jnp.bfloat16 else 4  # parts of decayed rows, and products
        fixed += array_bytes((kept * (-(-2 * most // 8) * 8) * group * together, WIDTH), jnp.float32)
    if verifies and commits:
        fixed += array_bytes(((LAG + 1) * together, WIDTH, WIDTH), state)
    block = 8
    while block > 1 and fixed + 2 * block * per_row > limit:
        block //= 2
    vmem = fixed + 2 * block * per_row
    if vmem > limit:
        raise ValueError(
            f"kda verify/commit: {vmem} bytes of VMEM needed for {heads} heads and {most} tokens, {limit} may be used"
        )
    return StepTiles(group, together, block, depth, depth - together, vmem)
