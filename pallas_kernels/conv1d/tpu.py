"""Short causal convolution as one TPU kernel.

    y_t = SiLU( sum_j w_j x_{t - W + 1 + j} )        W = 4

Memory bound: each input is read once, each output and each saved history written once. The packed axis is cut into
groups of 32 tokens (`conv1d.groups`), whose kind decides what is done:

- INNER and CLOSING, the bulk of a prefill. A column of 128 channels is widened to fp32 into a window in vector memory
  that still holds the last tokens of the group before. Loads at any row of that window are free, so the three earlier
  inputs are three more loads.
- DECODE, rows of one token. A history is [3, channels / 128, 128] in the pool, so one row fills whole registers; its
  token is gathered from the window and put behind the history, and the last three of these four planes go out in one
  copy. Histories come in a group ahead.
- MIXED, any ragged edge. As INNER, then the first tokens of every row that begins here are done again behind their
  history, and states are saved from the window.

The pool is seen as [layers, S, 3, channels / 128, 128]: docs/12-conv-kernel.md says why, and how to hold it so that
the reshape costs nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.conv1d.groups import CLOSING, DECODE, EMPTY, INNER, MIXED, PAST, RING, groups, packed, unpacked
from pallas_kernels.rows import RaggedRows
from pallas_kernels.vmem import SMALLEST_VMEM, array_bytes

LANES = 128
TAPS = 4
# Tokens of a group, and groups of a grid step: the first that fit into VMEM. With few tokens a step is one group: the
# first input comes sooner, the last output goes sooner.
TILES = (32, 2), (32, 1), (16, 1)
FEW = 256
ROWS = 16  # rows of a bf16 tile: copies move whole ones
TAIL = 8  # rows of the window that are older than the group
SPARE = 9  # rows behind the group, only ever read into rows that are thrown away
JOINED = 17  # history and first tokens of a row side by side
AHEAD = 4  # histories of ragged rows under way at once
_ACROSS = 16  # columns of one register of bf16 history
UNROLL = 48  # columns of 128 channels done at once
ABREAST = 4  # rows of one token done at once, a power of two
VMEM_LIMIT = SMALLEST_VMEM - (4 << 20)


def refusal(
    x: Float[Array, "T C"], weight: Float[Array, "W C"], conv_states: Float[Array, "layers S W1 C"]
) -> str | None:
    """Why the kernel cannot run on these shapes; None if it can."""
    if weight.shape[0] != TAPS:
        return f"the TPU kernel has {TAPS} taps, not {weight.shape[0]}"
    if x.shape[1] % LANES:
        return f"the TPU kernel needs channels in multiples of {LANES}, not {x.shape[1]}"
    tokens, channels = x.shape
    dtypes = x.dtype, conv_states.dtype
    needed = _vmem_bytes(*_tiles(tokens, channels, *dtypes), channels, *dtypes)
    if needed > VMEM_LIMIT:
        return (
            f"{needed} bytes of VMEM needed for {channels} channels of {x.dtype} with histories of "
            f"{conv_states.dtype}, {VMEM_LIMIT} may be used; give fewer channels a call, or narrower dtypes"
        )
    return None


def _tiles(tokens: int, channels: int, x_dtype: Any, pool_dtype: Any) -> tuple[int, int]:
    """Tokens of a group and groups of a grid step: the first choice that fits into VMEM, else the last."""
    choices = TILES if tokens > FEW else TILES[1:]
    fitting = (tiles for tiles in choices if _vmem_bytes(*tiles, channels, x_dtype, pool_dtype) <= VMEM_LIMIT)
    return next(fitting, choices[-1])


def causal_conv1d(
    x: Float[Array, "T C"],
    weight: Float[Array, "W C"],
    conv_states: Float[Array, "layers S W1 C"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    read: Int32[Array, "R"],
    write: Int32[Array, "R"],
    emit_position: Int32[Array, "R E"],
    emit_slot: Int32[Array, "R E"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "T C"], Float[Array, "layers S W1 C"]]:
    """See `conv1d.api.causal_conv1d`; 4 taps, channels in multiples of 128.

    Histories are read while others are written, so a slot that one row writes must not be read by another row of
    the same call. A row may write the slot it reads.

    Raises:
      ValueError: another number of taps or channels, or more channels than fit into VMEM.
    """
    if why := refusal(x, weight, conv_states):
        raise ValueError(f"causal_conv1d: {why}")
    tokens, channels = x.shape
    columns = channels // LANES
    size, together = _tiles(tokens, channels, x.dtype, conv_states.dtype)
    tile = size * together
    steps = -(-tokens // tile)
    x = jnp.pad(x, ((0, -tokens % ROWS), (0, 0)))
    plan = groups(steps * together, size, rows, read, write, emit_position, emit_slot)
    # SiLU(a) = h tanh h + h with h = a / 2, and halving is exact.
    half = 0.5 * weight.astype(jnp.float32).reshape(TAPS, columns, LANES)
    by_column = jnp.pad(half.transpose(1, 0, 2), ((0, 0), (0, 8 - TAPS), (0, 0))).reshape(columns * 8, LANES)
    pool = conv_states.reshape(*conv_states.shape[:3], columns, LANES)
    scalars = (jnp.asarray(layer, jnp.int32).reshape(1), *packed(plan))

    block = pl.BlockSpec((tile, channels), lambda i, *_: (i, 0))
    history = (PAST, columns, LANES)
    scratch = (
        pltpu.VMEM((2, tile, channels), x.dtype),  # tiles
        pltpu.VMEM((columns * _window_rows(size), LANES), jnp.float32),  # window
        pltpu.VMEM(
            (columns * _window_rows(size), LANES), jnp.float32
        ),  # outputs of a group, where they are not final at once
        pltpu.VMEM((columns * JOINED, LANES), jnp.float32),  # joined
        pltpu.VMEM((size, LANES), jnp.int32),  # which tokens of the group exist
        pltpu.VMEM((RING, size, TAPS, columns, LANES), pool.dtype),  # ring
        pltpu.VMEM((AHEAD, *history), pool.dtype),  # past
        pltpu.VMEM((2, *history), pool.dtype),  # kept
        pltpu.SMEM((RING,), jnp.int32),  # copies out of each part of the ring that were not waited for
        pltpu.SMEM((1,), jnp.int32),  # copies out of `kept` so far
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((RING,)),
        pltpu.SemaphoreType.DMA((RING,)),
        pltpu.SemaphoreType.DMA((AHEAD,)),
        pltpu.SemaphoreType.DMA((2,)),
    )
    y, pool = pl.pallas_call(
        _body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(steps,),
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pltpu.VMEM),
                pl.BlockSpec(memory_space=pltpu.VMEM),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=[block, pl.BlockSpec(memory_space=pltpu.HBM)],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct((tokens, channels), x.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        input_output_aliases={len(scalars) + 3: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=_vmem_bytes(size, together, channels, x.dtype, pool.dtype),
            # A third of the scalar work of a decode step, and scalar work is what bounds it.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="causal_conv1d",
    )(*scalars, x, by_column, half, pool)
    return y, pool.reshape(conv_states.shape)


def _window_rows(size: int) -> int:
    """Rows of a column of the window. Odd, because it is read across columns too, and twice as fast that way."""
    return TAIL + size + SPARE


def _vmem_bytes(size: int, together: int, channels: int, x_dtype: Any, pool_dtype: Any) -> int:
    """Blocks (double-buffered, in and out), scratch, and room for the compiler."""
    columns = channels // LANES
    blocks = 4 * array_bytes((size * together, channels), x_dtype)
    fp32 = array_bytes((columns * (2 * _window_rows(size) + JOINED + 8) + size, LANES), jnp.float32)
    fp32 += array_bytes((TAPS, columns, LANES), jnp.float32)
    histories = array_bytes((RING * size * TAPS + (AHEAD + 2) * PAST, columns, LANES), pool_dtype)
    return int(1.1 * (blocks + fp32 + histories)) + (4 << 20)


def _silu_of_twice(h: Array) -> Array:
    return h * jnp.tanh(h) + h


class _Column(NamedTuple):
    """A column of 128 channels as a traced and a fixed part, so that addresses share their arithmetic."""

    base: Any
    more: int

    def rows(self, height: int, offset: Any, count: int) -> Any:
        """Rows of a buffer with `height` rows a column."""
        return pl.ds(self.base * height + offset + self.more * height, count)

    def lanes(self) -> Any:
        return pl.ds(pl.multiple_of(self.base * LANES, LANES) + self.more * LANES, LANES)


def _each_column(columns: int, work: Callable[[_Column], None]) -> None:
    """Do `work` for every column, several at once so that they overlap."""
    whole = columns // UNROLL

    @pl.loop(0, whole)
    def _(i: Any) -> None:
        for j in range(UNROLL):
            work(_Column(i * UNROLL, j))

    for column in range(whole * UNROLL, columns):
        work(_Column(0, column))


def _each_piece(count: Any, together: int, work: Callable[[list[Any]], None]) -> None:
    """Do `work` for pieces 0 .. count - 1, `together` (a power of two) at once, the rest one by one."""
    whole = count & -together
    pl.loop(0, whole, step=together)(lambda i: work([i + j for j in range(together)]))
    pl.loop(whole, count)(lambda i: work([i]))


def _body(
    # scalars
    layer, per_group, per_row, visited, end, slot,
    # blocks, taps by column and by tap, pool (the output is the input)
    x, taps, taps_across, _pool, y, pool,
    # scratch
    tiles, window, outputs, joined, exists, ring, past, kept, ring_sent, kept_sent, tile_arrived, arrived, sent,
    past_arrived, kept_gone,
) -> None:  # fmt: skip
    """One tile of tokens; its groups in order."""
    kind, first, count, begins, part_of, fetched, following, offset, length, turn, read = unpacked(per_group, per_row)
    size = exists.shape[0]
    height = _window_rows(size)
    columns = window.shape[0] // height
    saves_a_row = 2 * end.shape[0] // visited.shape[0]
    tile = y.shape[0]
    step, steps = pl.program_id(0), pl.num_programs(0)
    inputs = tiles.at[step & 1]

    def for_tile(number: Any, do: Callable[[Any], None]) -> None:
        """`do` the copy of a tile of inputs; the last one may be shorter."""

        def copy_of(rows: int) -> None:
            source = x.at[pl.ds(pl.multiple_of(number * tile, tile), rows)]
            part = number & 1
            do(pltpu.make_async_copy(source, tiles.at[part, pl.ds(0, rows)], tile_arrived.at[part]))

        short = x.shape[0] % tile
        pl.when(number < x.shape[0] // tile)(lambda: copy_of(tile))
        if short:
            pl.when(number == x.shape[0] // tile)(lambda: copy_of(short))

    def tap(j: int, column: _Column) -> Array:
        return taps[column.rows(8, j, 1), :]

    def advance(column: _Column, at: Any) -> Array:
        """Move the window of one column on by a group; returns the group's inputs."""
        window[column.rows(height, 0, TAIL), :] = window[column.rows(height, size, TAIL), :]
        new = inputs[pl.ds(at, size), column.lanes()].astype(jnp.float32)
        window[column.rows(height, TAIL, size), :] = new
        return new

    def convolve(column: _Column, new: Array) -> Array:
        """Outputs of a group behind what the window holds."""
        total = tap(PAST, column) * new
        for ago in range(1, TAPS):
            total += tap(PAST - ago, column) * window[column.rows(height, TAIL - ago, size), :]
        return _silu_of_twice(total)

    def put(column: _Column, at: Any, value: Array) -> None:
        y[pl.ds(at, size), column.lanes()] = value.astype(y.dtype)

    def put_outputs(group: Any, at: Any) -> None:
        """Zeros for tokens of no row."""

        @pl.when(count[group] == size)
        def _() -> None:
            _each_column(columns, lambda column: put(column, at, outputs[column.rows(height, TAIL, size), :]))

        @pl.when(count[group] != size)
        def _() -> None:
            note_existing(group)

            def work(column: _Column) -> None:
                put(column, at, jnp.where(exists[...] != 0, outputs[column.rows(height, TAIL, size), :], 0.0))

            _each_column(columns, work)

    def note_existing(group: Any) -> None:
        token = lax.broadcasted_iota(jnp.int32, (size, LANES), 0) + group * size
        exists[...] = jnp.zeros((size, LANES), jnp.int32)

        @pl.loop(first[group], first[group] + count[group])
        def _(row: Any) -> None:
            inside = (token >= offset[row]) & (token < offset[row] + length[row])
            exists[...] = jnp.where(inside, 1, exists[...])

    # Rows of one token.

    def planes(part: Any, pieces: Any, oldest: int) -> Any:
        """Three planes of the ring: the history that came in (oldest = 0) or the one that goes out (1)."""
        return ring.at[part, pieces, pl.ds(oldest, PAST)]

    def fetch_histories(group: Any) -> None:
        part = part_of[group]

        def work(pieces: list[Any]) -> None:
            for piece in pieces:
                source = pool.at[layer[0], read[first[group] + piece]]
                copy = pltpu.make_async_copy(source, planes(part, piece, 0), arrived.at[part])
                pl.when(read[first[group] + piece] != 0)(copy.start)

        _each_piece(count[group], ABREAST, work)

    def history_out(part: Any, piece: Any, to: Any) -> Any:
        return pltpu.make_async_copy(planes(part, piece, 1), pool.at[layer[0], to], sent.at[part])

    def await_copies(part: Any, semaphore: Any, copies: Any) -> None:
        """Wait for so many histories; a semaphore counts bytes, so a full group is one wait."""

        def wait(pieces: Any) -> None:
            like = planes(part, pieces, 0)
            pltpu.make_async_copy(like, like, semaphore.at[part]).wait()

        pl.when(copies == size)(lambda: wait(pl.ds(0, size)))
        pl.loop(0, jnp.where(copies == size, 0, copies))(lambda _: wait(0))

    def await_ring(part: Any) -> None:
        await_copies(part, sent, ring_sent[part])
        ring_sent[part] = 0

    def decode_rows(part: Any, pieces: list[Any], tokens: list[Any]) -> None:
        def across(column: int, width: int, token: Any) -> Any:
            return pl.ds(column * height + TAIL + token, width, stride=height)

        # All loads stand before all stores: the compiler takes two rows of the ring for the same place.
        results = []
        for column in range(0, columns, _ACROSS):
            width = min(_ACROSS, columns - column)
            here = pl.ds(column, width)
            taps_here = [taps_across[j, here, :] for j in range(TAPS)]
            for piece, token in zip(pieces, tokens, strict=True):
                new = window[across(column, width, token), :]
                total = taps_here[PAST] * new
                for j in reversed(range(PAST)):
                    total += taps_here[j] * ring[part, piece, j, here, :].astype(jnp.float32)
                results.append((column, width, piece, token, _silu_of_twice(total), new.astype(ring.dtype)))
        for column, width, piece, token, out, new in results:
            outputs[across(column, width, token), :] = out
            ring[part, piece, PAST, pl.ds(column, width), :] = new

    def decode(group: Any, at: Any) -> None:
        part = part_of[group]
        pl.when((begins[group] != 0) & (group > 0))(lambda: fetch_histories(group))

        @pl.when(following[group] >= 0)
        def _() -> None:
            await_ring(part_of[following[group]])
            fetch_histories(following[group])

        def work(column: _Column) -> None:
            # Nobody behind these rows needs them: the older part of the window stays as it is.
            window[column.rows(height, TAIL, size), :] = inputs[pl.ds(at, size), column.lanes()].astype(jnp.float32)

        _each_column(columns, work)

        await_copies(part, arrived, fetched[group])

        @pl.when(fetched[group] != count[group])
        def _() -> None:
            @pl.loop(0, count[group])
            def _(piece: Any) -> None:
                @pl.when(read[first[group] + piece] == 0)
                def _() -> None:
                    ring[part, piece, pl.ds(0, PAST)] = jnp.zeros((PAST, *ring.shape[3:]), ring.dtype)

        def rows(pieces: list[Any]) -> None:
            members = [first[group] + piece for piece in pieces]
            decode_rows(part, pieces, [offset[row] - group * size for row in members])
            for piece, row in zip(pieces, members, strict=True):
                for number in range(saves_a_row):
                    to = slot[row * saves_a_row + number]
                    pl.when(to != 0)(history_out(part, piece, to).start)
                    ring_sent[part] += (to != 0).astype(jnp.int32)

        _each_piece(count[group], ABREAST, rows)
        put_outputs(group, at)

    # Ragged edges.

    def begin_past(visit: Any) -> None:
        """Start the copy of the history that this visit needs, if there is such a visit and it needs one."""
        row = jnp.where(visit < visited.shape[0], visited[jnp.minimum(visit, visited.shape[0] - 1)], -1)
        pl.when((row >= 0) & (read[jnp.maximum(row, 0)] != 0))(lambda: past_in(visit, row).start())

    def past_in(visit: Any, row: Any) -> Any:
        part = visit & (AHEAD - 1)
        return pltpu.make_async_copy(pool.at[layer[0], read[row]], past.at[part], past_arrived.at[part])

    def join(row: Any, visit: Any, begin: Any) -> None:
        """History of a row and its first eight tokens, side by side, and the outputs of these tokens."""
        pl.when(read[row] != 0)(lambda: past_in(visit, row).wait())
        for j in range(PAST):
            for column in range(0, columns, _ACROSS):
                width = min(_ACROSS, columns - column)
                old = past[visit & (AHEAD - 1), j, pl.ds(column, width), :].astype(jnp.float32)
                old = jnp.where(read[row] != 0, old, 0.0)
                joined[pl.ds(column * JOINED + j, width, stride=JOINED), :] = old

        begin_past(visit + AHEAD)

        def work(column: _Column) -> None:
            new = window[column.rows(height, TAIL + begin, 8), :]
            joined[column.rows(JOINED, PAST, 8), :] = new
            total = tap(PAST, column) * new
            for ago in range(1, TAPS):
                total += tap(PAST - ago, column) * joined[column.rows(JOINED, PAST - ago, 8), :]
            # Tokens of later rows among these are done again with their own row.
            outputs[column.rows(height, TAIL + begin, 8), :] = _silu_of_twice(total)

        _each_column(columns, work)

    def keep(source: Any, stride: int, at: Any, to: Any) -> None:
        """Save three consecutive rows of `source`, which has `stride` rows a column."""
        gone = kept_sent[0]
        part = gone & 1
        copy = pltpu.make_async_copy(kept.at[part], pool.at[layer[0], to], kept_gone.at[part])
        pl.when(gone >= 2)(copy.wait)
        for j in range(PAST):
            for column in range(0, columns, _ACROSS):
                width = min(_ACROSS, columns - column)
                rows = source[pl.ds(column * stride + at + j, width, stride=stride), :]
                kept[part, j, pl.ds(column, width), :] = rows.astype(kept.dtype)
        copy.start()
        kept_sent[0] = gone + 1

    def save(group: Any, row: Any) -> None:
        """The states of a row that end in the group."""
        for number in range(saves_a_row):
            to = slot[row * saves_a_row + number]
            stop = end[row * saves_a_row + number] - group * size
            after = stop + group * size - offset[row]  # tokens of the row before the state
            here = (to != 0) & (stop > 0) & (stop <= size)
            pl.when(here & (after < PAST))(functools.partial(keep, joined, JOINED, after, to))
            pl.when(here & (after >= PAST))(functools.partial(keep, window, height, TAIL + stop - PAST, to))

    def mixed(group: Any, at: Any) -> None:
        def work(column: _Column) -> None:
            outputs[column.rows(height, TAIL, size), :] = convolve(column, advance(column, at))

        _each_column(columns, work)

        @pl.loop(first[group], first[group] + count[group])
        def _(row: Any) -> None:
            begin = offset[row] - group * size
            # The second visit of a row is the one in the group behind its first token.
            visit = turn[row] + jnp.where(begin < 0, 1, 0)
            pl.when(begin > -PAST)(lambda: join(row, visit, begin))
            save(group, row)

        put_outputs(group, at)

    @pl.when(step == 0)
    def _() -> None:
        kept_sent[0] = 0
        for part in range(RING):
            ring_sent[part] = 0
        for visit in range(AHEAD):
            begin_past(visit)
        for_tile(0, lambda copy: copy.start())
        # Histories of the first group come beside its inputs, not behind them.
        pl.when(begins[0] != 0)(lambda: fetch_histories(0))

    pl.when(step + 1 < steps)(lambda: for_tile(step + 1, lambda copy: copy.start()))
    for_tile(step, lambda copy: copy.wait())

    @pl.loop(0, tile // size)
    def _(i: Any) -> None:
        group, at = step * (tile // size) + i, pl.multiple_of(i * size, size)

        # The bulk of a prefill comes first and passes two tests.
        @pl.when(kind[group] <= CLOSING)
        def _() -> None:
            _each_column(columns, lambda column: put(column, at, convolve(column, advance(column, at))))

        @pl.when(kind[group] != INNER)
        def _() -> None:
            pl.when(kind[group] == CLOSING)(lambda: save(group, first[group]))
            pl.when(kind[group] == DECODE)(lambda: decode(group, at))
            pl.when(kind[group] == MIXED)(lambda: mixed(group, at))

            @pl.when(kind[group] == EMPTY)
            def _() -> None:
                y[pl.ds(at, size), :] = jnp.zeros((size, y.shape[1]), y.dtype)

    @pl.when(step == steps - 1)
    def _() -> None:
        for part in range(RING):
            await_ring(part)
        for part in range(2):
            copy = pltpu.make_async_copy(kept.at[part], pool.at[0, 0], kept_gone.at[part])
            pl.when(kept_sent[0] > part)(copy.wait)
