"""Tiles of the attention kernel: measured choices by chip and type, and the vector memory they take."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.mla.pages import LANES, Pages
from pallas_kernels.mla.tpu.blocks import Blocks, blocks_of
from pallas_kernels.vmem import VMEM_BYTES


class Tiles(NamedTuple):
    """Sizes of a launch.

    Attributes:
      lanes: units worked on side by side.
      keys: of a block, at most.
      groups: parts of the lanes that go through the stages one after another (`kernel.Shape`).
      slots: units finished beside the products of the next step.
      staggered: lanes go through the stages one behind the other (`staggered`); for products of many rows.
      whole: copies all pages of a block, those behind the end of a row too: less to decide for each, more to read.
    """

    lanes: int
    keys: int
    groups: int
    slots: int = 3
    staggered: bool = False
    whole: bool = False


# By rows of queries in a unit, heads times tokens, up to which they hold: by chip generation and bytes of a cached
# value, and for chips that nothing was measured for. Chosen by replayed schedules for one, four and eight tokens of
# 64 heads; docs/13-mla-kernels.md has what each costs.
_FOUR_TOKENS = Tiles(8, 512, 1, 1, staggered=True, whole=True)
_EIGHT_TOKENS = Tiles(3, 512, 1, 0, staggered=True)
_MEASURED: dict[int, dict[tuple[int, int] | None, Tiles]] = {
    64: {
        (6, 2): Tiles(8, 512, 1),
        (6, 1): Tiles(8, 512, 1),
        (7, 2): Tiles(16, 512, 2, whole=True),
        (7, 1): Tiles(24, 512, 3, whole=True),
        None: Tiles(8, 512, 1),
    },
    128: {
        (6, 2): Tiles(8, 512, 1),
        (6, 1): Tiles(8, 512, 1),
        (7, 2): Tiles(16, 512, 2, whole=True),
        (7, 1): Tiles(16, 512, 2, whole=True),
        None: Tiles(8, 512, 1),
    },
    256: {
        **dict.fromkeys([(6, 2), (6, 1)], _FOUR_TOKENS._replace(lanes=12)),
        **dict.fromkeys([(7, 2), (7, 1)], _FOUR_TOKENS),
        None: _FOUR_TOKENS._replace(whole=False),
    },
    512: dict.fromkeys([(6, 2), (6, 1), (7, 2), (7, 1), None], _EIGHT_TOKENS),
}

# Rows of the products times lanes: beyond, code and accumulators grow and nothing is left to hide.
_MOST_ROWS = {64: 1536, 128: 1024, 256: 3072, 512: 1536}
# Copies written out in a step; small pages need many.
_MOST_COPIES = 192
# Scalar memory is 1 MiB on every chip; events and windows of the block table may take this much.
SCALAR_BYTES = 768 << 10
# For what the compiler itself puts into vector memory.
_SPARE = 8 << 20
# Types of pools whose rows are multiplied with bf16; tpu7x has no products with the last one.
_TYPES = (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e4m3b11fnuz)


def generation() -> int:
    """Of the chip that is compiled for; 0 where there is none, as in an interpreter."""
    return pltpu.get_tpu_info().generation if pltpu.is_tpu_device() else 0


def fits(form: Pages, dtype: DTypeLike) -> bool:
    """Whether the kernel takes such pages of such a type, on the chip that is compiled for."""
    missing = generation() == 7 and dtype == jnp.float8_e4m3b11fnuz
    return form.planes and form.section % 16 == 0 and dtype in _TYPES and not missing


def _vmem() -> int:
    """Bytes of vector memory that may be used on the chip that is compiled for; an interpreter is like the largest."""
    whole = pltpu.get_tpu_info().vmem_capacity_bytes if generation() else max(VMEM_BYTES.values())
    return whole * 7 // 8


def choose_tiles(heads: int, queries: int, latent: int, rows: int, dtype: jnp.dtype) -> tuple[Tiles, Blocks]:
    """Tiles and blocks for units of `queries` tokens over pages, or sections of them, of `rows` rows."""
    size = jnp.dtype(dtype).itemsize
    wide = heads * queries
    kind = next((most for most in _MEASURED if wide <= most), max(_MEASURED))
    found = _MEASURED[kind].get((generation(), size), _MEASURED[kind][None])
    lanes = found.lanes
    copies = found.keys // min(rows, found.keys)  # of a lane
    while lanes > 1 and (lanes * wide > _MOST_ROWS[kind] or lanes * copies > _MOST_COPIES):
        lanes //= 2
    tiles = found._replace(lanes=lanes, groups=min(found.groups, lanes))
    return tiles, blocks_of(rows, latent, tiles.keys)


def vmem_bytes(tiles: Tiles, blocks: Blocks, heads: int, queries: int, latent: int, size: int) -> int:
    """Vector memory of a launch, in bytes, with room for what the compiler adds.

    Raises:
      ValueError: more than the chip has.
    """
    wide = heads * queries
    spread = -(-heads // LANES) * LANES
    buffers = 3 * tiles.lanes * blocks.keys * (latent + LANES // 2) * size
    query = 3 * tiles.lanes * wide * (latent + 2 * LANES) * 2
    accumulators = 3 * tiles.lanes * wide * (latent + 2 * LANES) * 4
    stages = 2 * (tiles.slots + tiles.lanes) * queries * (heads * latent * 2 + 8 * spread * 4)
    constants = blocks.keys * (6 * LANES + 64)
    total = buffers + query + accumulators + stages + constants + _SPARE
    most = _vmem()
    if total > most:
        raise ValueError(
            f"mla_attention: {total} bytes of vector memory needed for {queries} tokens of {heads} heads, "
            f"{tiles.lanes} lanes and blocks of {blocks.keys} keys; {most} may be used"
        )
    return total
