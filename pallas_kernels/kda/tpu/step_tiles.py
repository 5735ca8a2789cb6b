"""Tiles of the kernels that visit one state for each row: decode, verify and commit."""

from typing import NamedTuple

import jax.numpy as jnp

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


def decode_tiles(rows: int, heads: int, state: jnp.dtype, activation: jnp.dtype, limit: int) -> StepTiles:
    """Tiles of `decode`.

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
    sublanes = -(-group // 8) * 8
    inputs = 5 * 2 * block * sublanes * WIDTH * max(jnp.dtype(activation).itemsize, 2)
    scratch = 3 * together * sublanes * WIDTH * 4 + 2 * block * max(heads, WIDTH) * 4
    vmem = 2 * depth * unit + inputs + scratch
    if vmem > limit:
        raise ValueError(f"kda_decode: {vmem} bytes of VMEM needed for {heads} heads, {limit} may be used")
    return StepTiles(group, together, block, depth, depth - 2 * together, vmem)


def speculate_tiles(
    rows: int,
    heads: int,
    most: int,
    state: jnp.dtype,
    activation: jnp.dtype,
    limit: int,
    verifies: bool,
    commits: bool,
) -> StepTiles:
    """Tiles of the kernel behind verify and commit, `most` tokens a row.

    Raises:
      ValueError: they do not fit into `limit` bytes of VMEM.
    """
    group = split_heads(heads)
    unit = group * WIDTH * WIDTH * jnp.dtype(state).itemsize
    together = min(rows, _MOST_ROWS, max(1, 32 // group))
    depth = 4
    while depth * unit < 2 * _IN_FLIGHT or depth < 4 * together:
        depth *= 2
    block = min(8, -(-rows // 8) * 8)
    sublanes = -(-group // 8) * 8
    token = most * sublanes * WIDTH
    activations = max(jnp.dtype(activation).itemsize, 2) * (5 * verifies + 2 * commits) * token
    blocks = 2 * block * (activations + 4 * token * (verifies + commits))
    padded = -(-2 * most // 8) * 8
    scratch = 4 * padded * group * together * WIDTH * 4 * verifies
    vmem = (1 + commits) * depth * unit + blocks + scratch
    if vmem > limit:
        raise ValueError(
            f"kda verify/commit: {vmem} bytes of VMEM needed for {heads} heads and {most} tokens, {limit} may be used"
        )
    return StepTiles(group, together, block, depth, depth - together, vmem)
