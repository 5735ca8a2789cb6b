"""Row writes into pages in planes, on TPU.

The rows of a token are one sublane of five tiles of a page, and memory is written a tile at a time. So the unit of
work is a *patch*: the tiles that hold 8 rows of each half of a page, or of a section of one (`mla.pages`),
[9 half-planes, 8, 128], since the tails of both halves share a tile. A section of n rows seen as [9, n / 2, 128] makes
a patch one rectangle: one copy in, the new rows put over it, one copy out. New tokens come by in chunks; patches of a
chunk are all different, so any number may be on their way, and before the next chunk begins all of them are home. They
are worked on in groups of 8: what a copy costs is scalar work, which straight-line code for a group and one wait for
its copies keep small. Decode has one new row in each patch; a group of such patches has its rows put without a branch.

Values are moved as bits: a patch is taken for int32 words that hold 1, 2 or 4 rows each, and a row is shifted
and masked into its word. So types the core can't compute with cost the same.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mla import stripe
from pallas_kernels.mla.pages import LANES, TAIL, Pages
from pallas_kernels.mla.write import stored
from pallas_kernels.rows import RaggedRows, owner

# Rows of a half page in a patch: what the tiling of memory lets a copy take.
GROUP = 8
# Tokens of a chunk: 4 KiB each in VMEM, twice.
CHUNK = 512
# Patches worked on together; places for groups of patches, and how many of those are on their way in.
TOGETHER, PLACES, AHEAD = 8, 8, 4
# Bytes of scalar memory that the lists of patches may take.
SCALARS = 1 << 19


class Patches(NamedTuple):
    """The patches of a chunk, [M] each; those to be written come first.

    Attributes:
      block: section in the pool.
      group: first of its rows in a half of the section.
      row: that one in the first half, counted from the beginning of its sequence on this rank.
      base: index in the chunk of the token that the first position of the sequence would have.
      low, high: [low, high) of its 8 rows in the first half that are written.
      low2, high2: the same in the second half.
    """

    block: Int32[Array, "M"]
    group: Int32[Array, "M"]
    row: Int32[Array, "M"]
    base: Int32[Array, "M"]
    low: Int32[Array, "M"]
    high: Int32[Array, "M"]
    low2: Int32[Array, "M"]
    high2: Int32[Array, "M"]


def most_patches(tokens: int, rows: int) -> int:
    """A row of m tokens meets at most (m - 2) / 8 + 2 groups of 8 rows."""
    return min(tokens, tokens // GROUP + 2 * rows)


def patches_of(
    rows: RaggedRows,
    table: Int32[Array, "R C"],
    begin: Int32[Array, ""] | int,
    *,
    blocks: int,
    chunk: int,
    n: int,
    sections: int = 1,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
) -> tuple[Patches, Int32[Array, ""]]:
    """Patches that the tokens [begin, begin + chunk) of the packed axis fall into, and how many they are.

    Groups of 8 rows are listed in order. One of a second half page is left to its partner in the first
    half where that one is listed too. Null blocks and ids outside the pool of `blocks` are left out.

    Args:
      n: rows of a section.
      sections: of a page.
    """
    most, half = most_patches(chunk, table.shape[0]), n // 2 // GROUP
    skipped = jnp.clip(begin - rows.offset, 0, rows.length)
    length = jnp.clip(begin + chunk - rows.offset, 0, rows.length) - skipped
    start = rows.start + skipped
    # A stripe of whole turns: the rows of a sequence are counted as those of one block.
    first = stripe.rows_before(start, rank, shards, interleave)
    end = stripe.rows_before(start + length, rank, shards, interleave)
    low = first // GROUP
    count = jnp.where(end > first, (end - 1) // GROUP - low + 1, 0)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    row = owner(ends, most)
    listed = row < count.shape[0]
    row = jnp.where(listed, row, 0)
    at = low[row] + jnp.arange(most, dtype=jnp.int32) - (ends - count)[row]
    column, within = at // (2 * half), at % (2 * half)
    partner_listed = (within >= half) & (at - half >= low[row])
    page, section = column // sections, column % sections
    block = table[row, jnp.minimum(page, table.shape[1] - 1)]
    group = within % half * GROUP
    local = column * n + group

    def clipped(bound: Any, side: int) -> Any:
        return jnp.clip(bound[row] - local - side * (n // 2), 0, GROUP)

    base = rows.offset[row] - begin - rows.start[row]
    found = Patches(
        block * sections + section, group, local, base, clipped(first, 0), clipped(end, 0), clipped(first, 1),
        clipped(end, 1),
    )  # fmt: skip
    wanted = listed & ~partner_listed & (page < table.shape[1]) & (block > 0) & (block < blocks)
    order = jnp.argsort(~wanted, stable=True)
    return Patches(*(field[order] for field in found)), jnp.sum(wanted, dtype=jnp.int32)


class Lists(NamedTuple):
    """Patches as the kernel reads them, [chunks * M'] each but the last.

    Attributes:
      block: section of all layers.
      group, row, base: as in `Patches`.
      ranges: low, high, low2, high2, a byte each from the lowest.
      token: in the chunk, of its first row.
      first: where that row goes: a byte each for its 32-bit word among the words of first halves (255: not there),
        that among those of second halves, and the bits it is shifted by.
      several: [chunks * M' / TOGETHER] 1 if a patch of the group has more than one row.
    """

    block: Int32[Array, "M"]
    group: Int32[Array, "M"]
    row: Int32[Array, "M"]
    base: Int32[Array, "M"]
    ranges: Int32[Array, "M"]
    token: Int32[Array, "M"]
    first: Int32[Array, "M"]
    several: Int32[Array, "G"]


def _listed(
    patches: Patches, total: Int32[Array, "chunks"], page: Int32[Array, ""], *, n: int, width: int, shards: int,
    rank: Int32[Array, ""] | int, interleave: int,
) -> Lists:  # fmt: skip
    """Lists with room for the groups that are sent for ahead; `page` is the first section of the layer."""
    most = patches.block.shape[1]
    room = (-(-most // TOGETHER) + AHEAD) * TOGETHER
    patches = Patches(*(jnp.pad(field, ((0, 0), (0, room - most))) for field in patches))
    there = jnp.arange(room, dtype=jnp.int32) < total[:, None]
    rows = patches.high - patches.low + patches.high2 - patches.low2
    second = (patches.high == patches.low).astype(jnp.int32)
    at = jnp.where(second == 1, patches.low2, patches.low)
    row = second * (n // 2) + patches.row + at
    token = patches.base + stripe.position_in_block(row, rank, shards, interleave)
    word = at * width // 32
    first = jnp.where(second == 1, 255 | word << 8, word | 255 << 8) | at * width % 32 << 16
    ranges = patches.low | patches.high << 8 | patches.low2 << 16 | patches.high2 << 24
    several = jnp.any((there & (rows > 1)).reshape(len(total), -1, TOGETHER), axis=2)
    lists = (
        patches.block + page, patches.group, patches.row, patches.base, ranges, jnp.where(there, token, 0), first,
        several,
    )  # fmt: skip
    return Lists(*(field.astype(jnp.int32).ravel() for field in lists))


def _kernel(
    lists: Any, count: Any, rank_of: Any, bits: Any, _: Any, pool: Any, tiles: Any, arrived: Any, left: Any,
    *, n: int, shards: int, interleave: int, width: int, long_rows: bool, interpreted: bool,
) -> None:  # fmt: skip
    """lists: `Lists`, rank_of: [1], in SMEM; pool: [sections, 9, n / 2, 128]; tiles: [PLACES, TOGETHER * 9, 8, 128]."""
    chunk, rank = pl.program_id(0), rank_of[0]
    total, per_word = count[chunk], 32 // width
    room = lists.block.shape[0] // pl.num_programs(0)
    halves = tiles.shape[1] // TOGETHER
    planes = (halves - 1) // 2
    shape = (GROUP // per_word, LANES)
    word = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    side = jax.lax.broadcasted_iota(jnp.int32, shape, 1) // TAIL
    # Distance of the tokens of neighbouring rows in a group; 0 if it varies, or if rows hardly ever fill a group.
    step = 1 if shards == 1 or interleave % GROUP == 0 else shards if interleave == 1 else 0
    step = step if long_rows else 0
    ones = -1 if width == 32 else (1 << width) - 1

    def copies(which: Any, inwards: bool) -> None:
        """Starts the copies of a group; those of patches that are not there have size 0.

        An interpreter has no copies of a size not known before; there they are predicated.
        """
        place, begin = which & (PLACES - 1), which * TOGETHER
        for j in range(TOGETHER):
            at, there = chunk * room + begin + j, begin + j < total
            size = halves if interpreted else jnp.where(there, halves, 0)
            group = pl.multiple_of(lists.group[at], GROUP)
            outer = pool.at[lists.block[at], pl.ds(0, size), pl.ds(group, GROUP)]
            inner = tiles.at[place, pl.ds(j * halves, size)]
            if inwards:
                copy = pltpu.make_async_copy(outer, inner, arrived.at[place])
            else:
                copy = pltpu.make_async_copy(inner, outer, left.at[place])
            pl.when(there)(copy.start) if interpreted else copy.start()

    def wait(which: Any, sem: Any) -> None:
        """For all copies of a group."""
        place = which & (PLACES - 1)
        there = jnp.where(which < 0, 0, jnp.clip(total - which * TOGETHER, 0, TOGETHER))

        def some(size: Any) -> None:
            part = tiles.at[place, pl.ds(0, size)]
            pltpu.make_async_copy(part, part, sem.at[place]).wait()

        if interpreted:
            jax.lax.fori_loop(0, there, lambda j, _: some(halves), None)
        else:
            some(there * halves)

    def put_first(which: Any) -> None:
        """The first row of each patch of a group."""
        place = which & (PLACES - 1)
        for j in range(TOGETHER):
            at = chunk * room + which * TOGETHER + j
            token, first = lists.token[at], lists.first[at]
            shift = first >> 16
            mask = jnp.int32(ones) << shift
            own = [jnp.where(word == (first >> 8 * half & 255), mask, 0) for half in range(2)]
            tail = jnp.where(side == 0, own[0], own[1])
            values = [bits[token, pl.ds(plane, 1)] << shift for plane in range(planes + 1)]
            for target in range(halves):
                keep = tail if target == halves - 1 else own[target % 2]
                words = pltpu.bitcast(tiles[place, j * halves + target], jnp.int32)
                words = (words & ~keep) | (values[target // 2] & keep)
                tiles[place, j * halves + target] = pltpu.bitcast(words, tiles.dtype)

    def put(which: Any, j: Any) -> None:
        """All rows of a patch."""
        at = chunk * room + which * TOGETHER + j
        place, first, base, ranges = which & (PLACES - 1), lists.row[at], lists.base[at], lists.ranges[at]

        def one(half: int, at: Any) -> None:
            row = half * (n // 2) + first + at
            token = base + stripe.position_in_block(row, rank, shards, interleave)
            shift = (at & (per_word - 1)) * width
            mask = jnp.where(word == at // per_word, jnp.int32(ones) << shift, 0)
            for plane in range(planes + 1):
                target, own = (
                    (2 * plane + half, mask) if plane < planes else (2 * planes, jnp.where(side == half, mask, 0))
                )
                target += j * halves
                words = pltpu.bitcast(tiles[place, target], jnp.int32)
                value = bits[token, pl.ds(plane, 1)] << shift
                tiles[place, target] = pltpu.bitcast((words & ~own) | (value & own), tiles.dtype)

        def whole(half: int) -> None:
            """All 8 rows, whose tokens are evenly spaced."""
            token = base + stripe.position_in_block(half * (n // 2) + first, rank, shards, interleave)
            for plane in range(planes + 1):
                every = [pl.ds(token + k * step, GROUP // per_word, per_word * step) for k in range(per_word)]
                parts = [bits[tokens, pl.ds(plane, 1)].reshape(shape) << k * width for k, tokens in enumerate(every)]
                words = functools.reduce(jnp.bitwise_or, parts)
                target = j * halves + (2 * plane + half if plane < planes else 2 * planes)
                if plane == planes:
                    words = jnp.where(side == half, words, pltpu.bitcast(tiles[place, target], jnp.int32))
                tiles[place, target] = pltpu.bitcast(words, tiles.dtype)

        for half in range(2):
            begin, end = (ranges >> 16 * half & 255), (ranges >> 16 * half + 8 & 255)
            if step:
                pl.when(end - begin == GROUP)(functools.partial(whole, half))
                begin = jnp.where(end - begin == GROUP, end, begin)
            jax.lax.fori_loop(begin, end, lambda at, _, half=half: one(half, at), None)

    def visit(which, carry):
        wait(which - (PLACES - AHEAD), left)
        copies(which + AHEAD, inwards=True)
        wait(which, arrived)
        several = lists.several[chunk * (room // TOGETHER) + which]
        pl.when(several == 0)(lambda: put_first(which))

        @pl.when(several > 0)
        def _():
            there = jnp.minimum(total - which * TOGETHER, TOGETHER)
            jax.lax.fori_loop(0, there, lambda j, _: put(which, j), None)

        copies(which, inwards=False)
        return carry

    groups = (total + TOGETHER - 1) // TOGETHER
    for which in range(AHEAD):
        copies(which, inwards=True)
    jax.lax.fori_loop(0, groups, visit, None)
    for which in range(PLACES - AHEAD):
        wait(groups - 1 - which, left)


def mla_write(
    cache: Float[Array, "layers B *page"],
    new: Float[Array, "T LP"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    table: Int32[Array, "R C"],
    *,
    form: Pages,
    shards: int,
    rank: Int32[Array, ""] | int,
    interleave: int,
    cache_scale: Float[Array, ""] | float | None,
    interpret: Any = False,
) -> Float[Array, "layers B *page"]:
    """See `mla.api.mla_write`.

    Raises:
      ValueError: pages without planes, or whose halves are not whole groups of 8 rows, or more tokens than
        have room in scalar memory.
    """
    if not form.planes or form.section % (2 * GROUP):
        raise ValueError(
            f"cache: got pages of {form.rows} rows {'in planes' if form.planes else 'of whole rows'}; the TPU writes "
            f"pages in planes whose rows are a multiple of {2 * GROUP}"
        )
    n, sections = form.section, form.sections
    chunk = min(CHUNK, new.shape[0])
    chunks = -(-new.shape[0] // chunk)
    room = (-(-most_patches(chunk, table.shape[0]) // TOGETHER) + AHEAD) * TOGETHER
    size = chunks * room * len(Lists._fields) * 4
    if size > SCALARS:
        raise ValueError(
            f"new: got {new.shape[0]} tokens of {table.shape[0]} rows; their lists take {size} bytes of scalar memory "
            f"and may take {SCALARS}: write them in several calls"
        )
    width = 8 * jnp.dtype(cache.dtype).itemsize
    halves = 2 * form.latent // LANES + 1
    place = {"shards": shards, "interleave": interleave}
    patches, total = jax.vmap(
        lambda begin: patches_of(
            rows, table, begin, blocks=cache.shape[1], chunk=chunk, n=n, sections=sections, rank=rank, **place
        )
    )(chunk * jnp.arange(chunks, dtype=jnp.int32))
    page = jnp.asarray(layer, jnp.int32) * (cache.shape[1] * sections)
    lists = _listed(patches, total, page, n=n, width=width, rank=rank, **place)
    pool = cache.reshape(-1, halves, n // 2, LANES)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    bits = _bits(stored(new, cache.dtype, cache_scale), form.latent)
    done = pl.pallas_call(
        functools.partial(
            _kernel,
            n=n,
            width=width,
            long_rows=new.shape[0] >= GROUP * len(rows.offset),
            interpreted=bool(interpret),
            **place,
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(chunks,),
            in_specs=[pl.BlockSpec((chunk, *bits.shape[1:]), lambda i, *_: (i, 0, 0)), hbm],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM((PLACES, TOGETHER * halves, GROUP, LANES), pool.dtype),
                pltpu.SemaphoreType.DMA((PLACES,)),
                pltpu.SemaphoreType.DMA((PLACES,)),
            ],
        ),
        input_output_aliases={len(lists) + 3: 0},
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="mla_write",
    )(lists, total, jnp.asarray(rank, jnp.int32)[None], bits, pool)
    return done.reshape(cache.shape)


def _bits(values: Float[Array, "T LP"], latent: int) -> Int32[Array, "T planes 128"]:
    """Tokens as int32 [T, planes of the latent, then the tail twice side by side, padded to whole tiles, 128]."""
    unsigned = jax.lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * values.dtype.itemsize}"))
    planes = unsigned[:, :latent].reshape(values.shape[0], -1, LANES)
    tails = jnp.tile(unsigned[:, latent:], 2)[:, None]
    padding = jnp.zeros((values.shape[0], -(planes.shape[1] + 1) % 8, LANES), unsigned.dtype)
    return jnp.concatenate([planes, tails, padding], axis=1).astype(jnp.uint32).astype(jnp.int32)
