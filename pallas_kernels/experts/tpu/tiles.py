"""Sizes of a launch, the memory they take, and what is refused."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.experts.plan import GROUP, groups_of_block
from pallas_kernels.experts.tpu.forms import Form, Packed, Plain
from pallas_kernels.experts.weights import ExpertWeights, NativeMatrix, PackedExperts
from pallas_kernels.vmem import SMALLEST_VMEM, array_bytes

LANES = 128
# Up to so many tokens every expert sees all of them: the weights pass through the matrix unit in the same time.
FEW = 128
VMEM_BYTES = SMALLEST_VMEM - (4 << 20)
# Scalar memory is 1 MiB on every chip; the groups of all blocks may take this much.
SCALAR_BYTES = 768 << 10
# For what the compiler itself puts into vector memory.
_SPARE = 2 << 20
# Multiply-adds of a product on narrow matrix units: 20,000 of them are a bundle of code, of which 12,000 are enough.
_MOST_NARROW = 220_000_000
# Rows that a tile of a prefill can have.
_ROWS = 64, 128, 256, 384, 512


class FfnTiles(NamedTuple):
    """Sizes of `ffn`.

    Attributes:
      rows: of a tile.
      width: of a block of the hidden layer.
    """

    rows: int
    width: int


class RowTiles(NamedTuple):
    """Sizes of `rows`.

    Attributes:
      block: tokens of a block.
      chunk: groups multiplied at once.
    """

    block: int
    chunk: int


def narrow() -> bool:
    """Whether the chip that is compiled for has matrix units of 128 by 128: a product is then four times the code."""
    return bool(pltpu.is_tpu_device()) and pltpu.get_tpu_info().generation < 6


def form_of(experts: ExpertWeights | PackedExperts) -> Form:
    """The form of these weights."""
    return Packed(experts) if isinstance(experts, PackedExperts) else Plain(experts)


def refusal(x: Float[Array, "T D"], experts: ExpertWeights | PackedExperts) -> str | None:
    """Why the kernel cannot run on these types and widths; None if it can."""
    if x.dtype != jnp.bfloat16:
        return f"x: got {x.dtype}; the TPU kernel takes bfloat16 (implementation 'reference' takes any)"
    if isinstance(experts, ExpertWeights):
        if any(w.dtype != jnp.bfloat16 for w in experts):
            return f"experts: got weights in {experts.gate.dtype}; the TPU kernel takes bfloat16 or packed ones"
    elif isinstance(experts.gate, NativeMatrix) and pltpu.is_tpu_device() and pltpu.get_tpu_info().generation != 7:
        return "experts: got the native packed form, which only tpu7x converts; pack with native=False"
    for name, size in (("hidden", experts.hidden), ("width", experts.width)):
        if size % LANES:
            return f"experts.{name}: got {size}; the TPU kernel takes multiples of {LANES}"
    return None


def ffn_bytes(form: Form, tiles: FfnTiles) -> int:
    """Vector memory of `ffn`: inputs and outputs twice, the sums, and the products of a part."""
    rows, hidden = tiles.rows, form.hidden
    part = tiles.width // form.parts(tiles.width)
    tokens = 4 * array_bytes((rows, hidden), jnp.bfloat16) + 2 * array_bytes((rows, LANES), jnp.float32)
    products = array_bytes((rows, hidden), jnp.float32) + 3 * array_bytes((rows, part), jnp.float32)
    return tokens + array_bytes((rows, hidden), jnp.float32) + products + form.vmem(tiles.width) + _SPARE


def ffn_tiles(form: Form, rows: int, *, fixed: bool) -> FfnTiles:
    """The first sizes that fit into vector memory: at most `rows` rows, or just so many if `fixed`.

    Raises:
      ValueError: none fit.
    """
    most = _MOST_NARROW if narrow() else math.inf
    choices = [rows] if fixed else [r for r in reversed(_ROWS) if r <= rows]
    for size in choices:
        for width in form.widths():
            code = size * width // form.parts(width) * form.hidden
            if (fixed or code <= most) and ffn_bytes(form, FfnTiles(size, width)) <= VMEM_BYTES:
                return FfnTiles(size, width)
    least = FfnTiles(choices[-1], form.widths()[-1])
    raise ValueError(
        f"experts: got hidden {form.hidden} and width {form.width}; {least.rows} rows and blocks of {least.width} "
        f"columns take {ffn_bytes(form, least) >> 20} MiB of vector memory, more than {VMEM_BYTES >> 20} MiB: "
        f"split the width"
    )


def row_bytes(hidden: int, tiles: RowTiles, local: int) -> int:
    """Vector memory of the larger of `rows.gather` and `rows.combine`."""
    rows, ones = tiles.chunk * GROUP, array_bytes((tiles.chunk * GROUP, tiles.block), jnp.bfloat16)
    tokens, sums = (array_bytes((tiles.block, hidden), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    two = 2 * array_bytes((rows, hidden), jnp.bfloat16)
    plan = 4 * array_bytes((local, tiles.block), jnp.int32)
    gather = 3 * tokens + ones + two + 2 * array_bytes((rows, LANES), jnp.float32) + plan
    product = array_bytes((256, hidden), jnp.float32)
    return max(gather, 2 * tokens + sums + ones + two + plan) + product + _SPARE


def prefill_tiles(form: Form, tokens: int, top_k: int, local: int, total: int | None) -> tuple[FfnTiles, RowTiles]:
    """Sizes for so many tokens that choose `top_k` of `total` experts each; None takes 32 times as many.

    Raises:
      ValueError: nothing fits into vector memory, or the plan not into scalar memory.
    """
    chance = min(top_k / (total or 32 * top_k), 1.0)
    block = min(1024, -(-tokens // LANES) * LANES)
    while block > LANES and row_bytes(form.hidden, RowTiles(block, _chunk(block, chance, local)), local) > VMEM_BYTES:
        block = max(block // 2 // LANES * LANES, LANES)
    row_tiles = RowTiles(block, _chunk(block, chance, local))
    if (needed := row_bytes(form.hidden, row_tiles, local)) > VMEM_BYTES:
        raise ValueError(
            f"experts.hidden: got {form.hidden}; {block} tokens take {needed >> 20} MiB of "
            f"vector memory, more than {VMEM_BYTES >> 20} MiB"
        )
    blocks = -(-tokens // block)
    scalars = 3 * 4 * blocks * groups_of_block(block, min(top_k, local), local)
    if scalars > SCALAR_BYTES:
        raise ValueError(
            f"x: got {tokens} tokens; their groups take {scalars >> 10} KiB of scalar memory, more than "
            f"{SCALAR_BYTES >> 10} KiB: cut the step"
        )
    # Rows of an expert, with half a group of zeros for each block; a second tile would read its weights again.
    expected = tokens * chance
    rows = expected + 2 * math.sqrt(expected) + GROUP / 2 * blocks
    most = next((r for r in _ROWS if r >= rows), _ROWS[-1])
    return ffn_tiles(form, most, fixed=False), row_tiles


def _chunk(block: int, chance: float, local: int) -> int:
    """Groups that a block has most of the time, in multiples of 16: a second chunk would multiply all tokens again."""
    return -(-int(1.1 * local * (block * chance / GROUP + 0.5)) // GROUP) * GROUP or GROUP


def padded(rows: int) -> int:
    """Rows in whole tiles of bf16."""
    return -(-rows // GROUP) * GROUP
