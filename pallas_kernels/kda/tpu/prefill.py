"""KDA prefill on a TPU: one kernel for ragged rows, any gate, saves at any offset.

The grid is (groups of heads, steps). Step s prepares chunk s and carries the state through chunk s - 1, which
are independent, so the compiler can overlap them (`chunk.prepare`, `chunk.advance`); a group of n chunks takes
n + 1 steps. Inputs and outputs are moved by hand, since chunks lie anywhere on the packed axis. Everything that not
every chunk needs stands under a predicate before or behind the mathematics, which stay one basic block:

    before: wait for inputs, start the next, move them to slots (`shift`), load or reset the state of a new row
    behind: merge outputs with the neighbour's rows, write them; saves of states
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.kda.tpu import chunk as chunk_math
from pallas_kernels.kda.tpu.arithmetic import NEUTRAL_GATE, Arithmetic
from pallas_kernels.kda.tpu.chunk import CHUNK, WIDTH, Constants, Prepared
from pallas_kernels.kda.tpu.plan import ChunkPlan, betas, chunk_plan
from pallas_kernels.kda.tpu.shift import ALIGN, fill_word, moved_tile, row_mask, tile_rows, words
from pallas_kernels.kda.tpu.tiles import BUFFERS, WINDOW, heads_per_program
from pallas_kernels.rows import RaggedRows, tokens

_INPUTS = 4  # q, k, v, raw gate
_STAGED = 2  # states on their way out
_STAGES = 32  # more than either phase has
_SAVE_HEADS = 8  # heads whose masked updates are computed together


def run_staggered(prepare: list[Iterator[None]], advance: list[Iterator[None]], pace: float) -> None:
    """Emit all stages of both phases, in the order that lets the compiler overlap them.

    At time t pair p is at stage t - p of `prepare` and stage (t - p / 2) / pace of `advance`: neighbouring pairs are
    then in different stages, which use different units. The order was found by replaying compiled schedules.
    """
    events = [(t + p, 1, p) for p in range(len(prepare)) for t in range(_STAGES)]
    events += [(pace * t + 0.5 * p, 0, p) for p in range(len(advance)) for t in range(_STAGES)]
    for _, phase, p in sorted(events):
        next((advance, prepare)[phase][p], None)


class _Kernel:
    """The kernel of one group of heads; attributes are its refs and the static facts."""

    def __init__(self, plan, tensors, *, heads: int, arithmetic: Arithmetic, scale: float, rows: int):
        self.plan, self.heads, self.ar, self.scale, self.rows = plan, heads, arithmetic, scale, rows
        (
            *self.hbm, columns_hbm, rows_hbm, self.gate, self.sums, self.level, self.selector, _,
            self.out_hbm, self.pool, self.inputs, self.beta_columns, self.beta_rows, self.outputs, self.carry,
            self.state, self.old, self.loaded, self.staged, self.u,
            self.read, self.kg, self.a_qk, self.m, self.inverse, self.decay,
            self.in_sem, self.out_sem, self.load_sem, self.save_sem,
        ) = tensors  # fmt: skip
        self.betas = ((columns_hbm, self.beta_columns), (rows_hbm, self.beta_rows))
        self.group = pl.program_id(0)
        self.step = pl.program_id(1)
        self.used = plan.used_and_layer[0]
        self.layer = plan.used_and_layer[1]
        # A pair is two heads; the last of an odd number is its own partner and stored once.
        self.pairs = [(h, min(h + 1, heads - 1)) for h in range(0, heads, 2)]

    # -- where things are

    def columns(self, h: int | jax.Array) -> Any:
        start = h * WIDTH if isinstance(h, int) else pl.multiple_of(h * WIDTH, WIDTH)
        return pl.ds(start, WIDTH)

    def group_columns(self) -> Any:
        return pl.ds(pl.multiple_of(self.group * self.heads * WIDTH, WIDTH), self.heads * WIDTH)

    def slots(self, c: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.plan.first[c], self.plan.low[c], self.plan.high[c]

    # -- inputs

    def window(self, c: jax.Array) -> jax.Array:
        """First packed row of the window that holds chunk c."""
        base = jnp.clip(self.plan.first[c] // ALIGN * ALIGN, 0, self.rows - WINDOW)
        return pl.multiple_of(base, ALIGN)

    def start_inputs(self, c: jax.Array) -> None:
        where = (pl.ds(self.window(c), WINDOW), self.group_columns())
        buffer = c % BUFFERS
        for i, x in enumerate(self.hbm):
            pltpu.make_async_copy(x.at[where], self.inputs.at[buffer, i], self.in_sem.at[0, buffer]).start()
        for i, (x, ref) in enumerate(self.betas):
            pltpu.make_async_copy(x.at[self.group, c], ref.at[buffer], self.in_sem.at[1 + i, buffer]).start()

    def wait_inputs(self, c: jax.Array) -> None:
        """One wait for the bytes of all four windows, one for each layout of beta."""
        for i, ref in enumerate((self.inputs, self.beta_columns, self.beta_rows)):
            whole = ref.at[c % BUFFERS]
            pltpu.make_async_copy(whole, whole, self.in_sem.at[i, c % BUFFERS]).wait()

    def rows_of(self, c: jax.Array) -> Any:
        """Where in the window the slots of chunk c lie once `move_inputs` has been: behind whole tiles at most."""
        start = jnp.where(self.plan.plain[c] > 0, self.plan.first[c] - self.window(c), 0)
        return pl.ds(pl.multiple_of(start, ALIGN), CHUNK)

    def move_inputs(self, c: jax.Array) -> None:
        """Put the tokens of chunk c into their slots and neutral values into the others."""
        first, low, high = self.slots(c)
        at = first - self.window(c)

        @pl.when(self.plan.plain[c] == 0)
        def _():
            dtype = self.inputs.dtype
            tall = tile_rows(dtype)
            count = WINDOW // tall

            def column(h, _):
                for i in range(_INPUTS):
                    ref = self.inputs.at[c % BUFFERS, i]
                    fill = fill_word(NEUTRAL_GATE if i == 3 else 0.0, dtype)

                    def load(tile, ref=ref):
                        return words(ref[pl.ds(pl.multiple_of(tile * tall, tall), tall), self.columns(h)])

                    moved = [moved_tile(load, count, at + j * tall, dtype) for j in range(CHUNK // tall)]
                    for j, x in enumerate(moved):
                        mask = row_mask(low - j * tall, high - j * tall, WIDTH, dtype)
                        x = (x & mask) | (jnp.full_like(x, fill) & ~mask)
                        ref[pl.ds(j * tall, tall), self.columns(h)] = pltpu.bitcast(x, dtype)
                return 0

            lax.fori_loop(0, self.heads, column, 0)

    # -- outputs

    def output_blocks(self, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First packed row, and number, of the aligned blocks that chunk c reaches into."""
        first, low, high = self.slots(c)
        begin = (first + low) // ALIGN * ALIGN
        return pl.multiple_of(begin, ALIGN), (first + high - begin + ALIGN - 1) // ALIGN

    def whole_output_copy(self, c: jax.Array) -> Any:
        target = self.out_hbm.at[pl.ds(pl.multiple_of(self.plan.first[c], ALIGN), CHUNK), self.group_columns()]
        return pltpu.make_async_copy(self.outputs.at[c % 2, pl.ds(0, CHUNK)], target, self.out_sem.at[c % 2])

    def for_output_copies(self, c: jax.Array, do: Any) -> None:
        """`do` each copy of the outputs of chunk c: one of all, or one for each aligned block."""
        begin, blocks = self.output_blocks(c)

        @pl.when(self.plan.plain[c] > 0)
        def _():
            do(self.whole_output_copy(c))

        @pl.when(self.plan.plain[c] == 0)
        def _():
            def block(i, _):
                at = pl.multiple_of(i * ALIGN, ALIGN)
                target = self.out_hbm.at[pl.ds(pl.multiple_of(begin + at, ALIGN), ALIGN), self.group_columns()]
                do(pltpu.make_async_copy(self.outputs.at[c % 2, pl.ds(at, ALIGN)], target, self.out_sem.at[c % 2]))
                return 0

            lax.fori_loop(0, blocks, block, 0)

    def write_outputs(self, c: jax.Array) -> None:
        """Start the copies of chunk c, after those of the chunk before, which may share a block with them."""
        before = jnp.maximum(c - 1, 0)
        usual = (c > 0) & (self.plan.plain[before] > 0) & (self.plan.plain[c] > 0)

        @pl.when(usual)
        def _():
            self.whole_output_copy(before).wait()
            self.whole_output_copy(c).start()

        @pl.when(jnp.logical_not(usual))
        def _():
            @pl.when(c > 0)
            def _():
                self.for_output_copies(before, lambda copy: copy.wait())

            self.move_outputs(c)
            self.for_output_copies(c, lambda copy: copy.start())

    def move_outputs(self, c: jax.Array) -> None:
        """Put slots of chunk c onto their packed rows, beside rows of the block that came before."""
        first, low, high = self.slots(c)
        begin, _ = self.output_blocks(c)

        @pl.when(self.plan.plain[c] == 0)
        def _():
            dtype = self.outputs.dtype
            tall = tile_rows(dtype)
            ref = self.outputs.at[c % 2]
            last = (first + high) // ALIGN * ALIGN - begin  # the block that the next chunk may share

            def column(h, _):
                def load(tile):
                    return words(ref[pl.ds(pl.multiple_of(tile * tall, tall), tall), self.columns(h)])

                moved = [
                    moved_tile(load, CHUNK // tall, begin - first + j * tall, dtype) for j in range(WINDOW // tall)
                ]
                for j, x in enumerate(moved):
                    at = first - begin - j * tall
                    if j < ALIGN // tall:
                        mask = row_mask(at + low, at + high, WIDTH, dtype)
                        before = words(self.carry[j * tall : (j + 1) * tall, self.columns(h)])
                        x = (x & mask) | (before & ~mask)
                    ref[j * tall : (j + 1) * tall, self.columns(h)] = pltpu.bitcast(x, dtype)
                last_block = pl.ds(pl.multiple_of(jnp.minimum(last, WINDOW - ALIGN), ALIGN), ALIGN)
                self.carry[:, self.columns(h)] = ref[last_block, self.columns(h)]
                return 0

            lax.fori_loop(0, self.heads, column, 0)

    # -- states

    def pool_at(self, slot: jax.Array) -> Any:
        return self.pool.at[self.layer, slot, pl.ds(self.group * self.heads, self.heads)]

    def load_copy(self, c: jax.Array) -> Any:
        return pltpu.make_async_copy(self.pool_at(self.plan.read[c]), self.loaded, self.load_sem)

    def begin_row(self, c: jax.Array) -> None:
        """The state that chunk c starts from, if it is the first of its row."""
        slot = self.plan.read[c]

        @pl.when(slot > 0)
        def _():
            self.load_copy(c).wait()
            self.state[...] = self.loaded[...].astype(jnp.float32)

        @pl.when(slot == 0)
        def _():
            self.state[...] = jnp.zeros(self.state.shape, jnp.float32)

    def save_copy(self, j: jax.Array) -> Any:
        """Copy of save j; each is started once and waited for once, two later or at the end."""
        return pltpu.make_async_copy(
            self.staged.at[j % _STAGED], self.pool_at(self.plan.save_slot[j]), self.save_sem.at[j % _STAGED]
        )

    def save(self, c: jax.Array) -> None:
        def one(j, _):
            @pl.when(j >= _STAGED)
            def _():
                self.save_copy(j - _STAGED).wait()

            at_end = self.plan.save_tokens[j] >= self.plan.high[c]

            @pl.when(at_end)
            def _():
                self.staged[j % _STAGED] = self.state[...].astype(self.staged.dtype)

            @pl.when(jnp.logical_not(at_end))
            def _():
                self.stage_inner(c, j)

            self.save_copy(j).start()
            return 0

        lax.fori_loop(self.plan.save_bounds[c], self.plan.save_bounds[c + 1], one, 0)

    def stage_inner(self, c: jax.Array, j: jax.Array) -> None:
        """State after some tokens of chunk c: S_b = diag(exp G_b) S + (k exp(G_b - G))^T u over rows up to b.

        u of a row does not depend on later rows. Gates and keys are recomputed from the inputs, which are still there.
        """
        ar, count, rows = self.ar, self.plan.save_tokens[j], self.rows_of(c)
        row = lax.broadcasted_iota(jnp.int32, (CHUNK + 8, CHUNK), 0)
        column = lax.broadcasted_iota(jnp.int32, (CHUNK + 8, CHUNK), 1)
        # Behind each row up to b; below, from the first row on: the whole decay.
        mask = jnp.where((column < count) & ((column > row) | (row >= CHUNK)), 1.0, 0.0)
        mask = ar.round(mask if ar.exact else jnp.concatenate([mask, mask], axis=1))
        kept = lax.broadcasted_iota(jnp.int32, (CHUNK, WIDTH), 0) < count
        together = min(_SAVE_HEADS, self.heads)
        while self.heads % together:
            together -= 1

        def some(i, _):
            heads = [i * together + h for h in range(together)]
            raw = [self.inputs[c % BUFFERS, 3, rows, self.columns(h)] for h in heads]
            gate = [self.gate[:, self.columns(h)] for h in heads]
            g = [ar.log_decay(r, x[0:1], x[1:2]) for r, x in zip(raw, gate, strict=True)]
            decay = [ar.exp(ar.dot(mask, ar.parts(x))) for x in g]
            k = [chunk_math.normalise(self.inputs[c % BUFFERS, 1, rows, self.columns(h)]) for h in heads]
            k = [ar.round(jnp.where(kept, x * d[:CHUNK], 0.0)) for x, d in zip(k, decay, strict=True)]
            added = [ar.dot(x.T, self.u[:, self.columns(h)]) for x, h in zip(k, heads, strict=True)]
            for h, d, x in zip(heads, decay, added, strict=True):
                whole = jnp.broadcast_to(d[CHUNK : CHUNK + 1], (WIDTH, WIDTH)).T
                self.staged[j % _STAGED, h] = (whole * self.old[h] + x).astype(self.staged.dtype)
            return 0

        lax.fori_loop(0, self.heads // together, some, 0)

    # -- mathematics

    def prepare(self, p: int) -> Iterator[None]:
        """Chunk `step` of pair p, into VMEM."""
        buffer, pair, rows = self.step % BUFFERS, self.pairs[p], self.rows_of(self.step)

        def tensor(i):
            return [self.inputs[buffer, i, rows, self.columns(h)] for h in pair]

        beta = self.beta_columns[buffer], self.selector[:, p * 2 * CHUNK : (p + 1) * 2 * CHUNK]
        x = yield from chunk_math.prepare(
            tensor(0), tensor(1), tensor(3), [self.gate[:, self.columns(h)] for h in pair], beta,
            Constants(self.sums[...], self.level[...]), self.ar, self.scale,
        )  # fmt: skip
        self.read[2 * p], self.read[2 * p + 1] = x.read
        self.kg[p], self.a_qk[p], self.m[p], self.inverse[p] = x.kg, x.a_qk, x.m, x.inverse
        self.decay[p, 0:2] = x.decay

    def advance(self, p: int) -> Iterator[None]:
        """Chunk `step` - 1 of pair p, from VMEM."""
        c, pair = jnp.maximum(self.step - 1, 0), self.pairs[p]
        buffer, rows = c % BUFFERS, self.rows_of(c)
        prepared = Prepared(
            (self.read[2 * p], self.read[2 * p + 1]), self.kg[p], self.a_qk[p], self.m[p], self.inverse[p],
            self.decay[p, 0:2],
        )  # fmt: skip
        out, after, u = yield from chunk_math.advance(
            prepared, [self.inputs[buffer, 2, rows, self.columns(h)] for h in pair],
            self.beta_rows[buffer, p : p + 1], [self.state[h] for h in pair], self.ar,
        )  # fmt: skip
        for i, h in enumerate(dict.fromkeys(pair)):
            self.outputs[c % 2, 0:CHUNK, self.columns(h)] = out[i].astype(self.outputs.dtype)
            self.state[h] = after[i]
            self.u[:, self.columns(h)] = u[:, i * WIDTH : (i + 1) * WIDTH]

    def run(self) -> None:
        s, used, plan = self.step, self.used, self.plan

        @pl.when(s == 0)
        def _():
            self.start_inputs(s)

        self.wait_inputs(s)

        @pl.when(s < used)  # the chunk behind the last is a dummy, so that the wait needs no predicate
        def _():
            self.start_inputs(s + 1)

        before = jnp.maximum(s - 1, 0)
        begins = (s > 0) & (plan.read[before] >= 0)

        @pl.when((plan.plain[s] == 0) | begins | (plan.read[s] > 0) | (plan.inner[before] > 0))
        def _():
            @pl.when(s < used)
            def _():
                self.move_inputs(s)

            @pl.when(begins)
            def _():
                self.begin_row(s - 1)

            @pl.when(plan.inner[before] > 0)
            def _():
                self.old[...] = self.state[...]

            @pl.when(plan.read[s] > 0)
            def _():
                self.load_copy(s).start()

        pairs = range(len(self.pairs))
        pace = 2.0 if self.ar.midpoint else 1.5
        run_staggered([self.prepare(p) for p in pairs], [self.advance(p) for p in pairs], pace)

        @pl.when(s > 0)
        def _():
            self.write_outputs(s - 1)

            @pl.when((plan.save_bounds[s - 1] < plan.save_bounds[s]) | (s == used))
            def _():
                self.save(s - 1)

                @pl.when(s == used)
                def _():
                    self.for_output_copies(s - 1, lambda copy: copy.wait())
                    saves = plan.save_bounds[used]

                    def finish(j, _):
                        self.save_copy(j).wait()
                        return 0

                    lax.fori_loop(jnp.maximum(saves - _STAGED, 0), saves, finish, 0)


def _kernel(*refs, heads: int, arithmetic: Arithmetic, scale: float, rows: int) -> None:
    fields = len(ChunkPlan._fields)
    kernel = _Kernel(
        ChunkPlan(*refs[:fields]), refs[fields:], heads=heads, arithmetic=arithmetic, scale=scale, rows=rows
    )

    @pl.when((kernel.step <= kernel.used) & (kernel.used > 0))
    def _():
        kernel.run()


def _call(plan, tensors, beta, gate, states, *, heads, arithmetic, scale, out_dtype, interpret, name):
    """The kernel on [rows, H K] tensors and a pool of K = V = 128."""
    rows, total = tensors[0].shape[0], states.shape[2]
    chunks = plan.first.shape[0]
    pairs = (heads + 1) // 2
    operand = arithmetic.dtype
    sums = jnp.asarray(chunk_math.sum_matrix(arithmetic), operand)
    level = jnp.asarray(chunk_math.level_map())
    selector = jnp.asarray(chunk_math.beta_selector(heads), jnp.bfloat16)
    width = heads * WIDTH

    def constant(x):
        return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    vmem = pltpu.VMEM
    state = (heads, WIDTH, WIDTH)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(plan),
        grid=(total // heads, chunks),
        in_specs=[
            *[hbm] * _INPUTS,
            hbm,
            hbm,
            pl.BlockSpec((2, width), lambda g, *_: (0, g)),
            constant(sums),
            constant(level),
            constant(selector),
            hbm,
        ],
        out_specs=[hbm, hbm],
        scratch_shapes=[
            vmem((BUFFERS, _INPUTS, WINDOW, width), tensors[0].dtype),
            vmem((BUFFERS, CHUNK, 3 * heads), jnp.bfloat16),
            vmem((BUFFERS, pairs, 2 * CHUNK), jnp.float32),
            vmem((2, WINDOW, width), out_dtype),
            vmem((ALIGN, width), out_dtype),
            vmem(state, jnp.float32),
            vmem(state, jnp.float32),
            vmem(state, states.dtype),
            vmem((_STAGED, *state), states.dtype),
            vmem((CHUNK, width), operand),
            vmem((2 * pairs, 2 * CHUNK, WIDTH), operand),
            vmem((pairs, 2 * CHUNK, WIDTH), operand),
            vmem((pairs, CHUNK, 2 * CHUNK), operand),
            vmem((pairs, CHUNK, 2 * CHUNK), operand),
            vmem((pairs, 16, 2 * CHUNK), jnp.float32),
            vmem((pairs, 8, WIDTH), jnp.float32),
            pltpu.SemaphoreType.DMA((3, BUFFERS)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA(()),
            pltpu.SemaphoreType.DMA((_STAGED,)),
        ],
    )
    operands = (*plan, *tensors, *beta, gate, sums, level, selector, states)
    return pl.pallas_call(
        functools.partial(_kernel, heads=heads, arithmetic=arithmetic, scale=scale, rows=rows),
        out_shape=[
            jax.ShapeDtypeStruct((rows, total * WIDTH), out_dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        grid_spec=grid_spec,
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=60 << 20, disable_bounds_checks=True
        ),
        interpret=interpret,
        name=name,
    )(*operands)


def prefill(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    raw_gate: Float[Array, "T H K"],
    raw_beta: Float[Array, "T H"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    read: Int32[Array, "R"],
    write: Int32[Array, "R"],
    emit_position: Int32[Array, "R E"],
    emit_slot: Int32[Array, "R E"],
    *,
    lower_bound: float | None,
    chunk: int,
    interpret: Any = False,
    name: str = "kda_prefill",
) -> tuple[Float[Array, "T H V"], Float[Array, "layers S H K V"]]:
    """See `kda.api.kda_prefill`. bf16 q, k, v, raw gate take bf16 products; any in fp32 makes all of it fp32.

    Args:
      chunk: 64.
      interpret: passed on to `pallas_call`, for tests without a TPU.
      name: of the kernel, for profiles.

    Raises:
      ValueError: K or V other than 128, another chunk, a pool that is neither fp32 nor bf16, or heads that do not
        fit into VMEM.
    """
    count, heads, key = q.shape
    value = v.shape[-1]
    if chunk != CHUNK:
        raise ValueError(f"kda_prefill on TPU: chunk must be {CHUNK}, got {chunk}")
    if (key, value) != (WIDTH, WIDTH):
        raise ValueError(f"kda_prefill on TPU: K and V must be {WIDTH}, got {key} and {value}")
    if states.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"kda_prefill on TPU: states in float32 or bfloat16, got {states.dtype}")
    inputs = (q, k, v, raw_gate)
    exact = any(x.dtype != jnp.bfloat16 for x in inputs)
    arithmetic = Arithmetic(exact, lower_bound)
    dtype = jnp.dtype(jnp.float32 if exact else jnp.bfloat16)
    group = heads_per_program(heads, dtype, dtype, states.dtype, exact)

    rows_padded = max(WINDOW, -(-count // ALIGN) * ALIGN)

    def packed(x):
        return jnp.pad(x.astype(dtype).reshape(count, heads * WIDTH), ((0, rows_padded - count), (0, 0)))

    plan = chunk_plan(rows, count, CHUNK, ALIGN, layer, read, write, emit_position, emit_slot)
    gate = arithmetic.gate_constants(a_log, dt_bias).reshape(2, heads * WIDTH)
    out, states = _call(
        plan, [packed(x) for x in inputs], betas(raw_beta, plan, CHUNK, group), gate, states,
        heads=group, arithmetic=arithmetic, scale=key**-0.5, out_dtype=dtype, interpret=interpret, name=name,
    )  # fmt: skip
    # Blocks between rows were never written.
    valid = tokens(rows, count).valid[:, None, None]
    return jnp.where(valid, out[:count].reshape(v.shape), 0).astype(v.dtype), states
