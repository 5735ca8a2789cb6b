"""The body of the prefill kernel: what one step of one group of heads moves and computes.

Step s prepares chunk s and carries the state through chunk s - 1, which are independent, so the compiler can overlap
them (`chunk.prepare`, `chunk.advance`); n chunks take n + 1 steps. Inputs and outputs are moved by hand, since chunks
lie anywhere on the packed axis. Everything that not every chunk needs stands under a predicate before or behind the
mathematics, which stay one basic block:

    before: wait for inputs, start the next, move them to slots (`shift`), load or reset the state of a new row
    behind: merge outputs with the neighbour's rows, write them; saves of states
"""

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.tpu import chunk as chunk_math
from pallas_kernels.kda.tpu.arithmetic import NEUTRAL_GATE, Arithmetic
from pallas_kernels.kda.tpu.chunk import CHUNK, WIDTH, Constants, Prepared
from pallas_kernels.kda.tpu.plan import ChunkPlan
from pallas_kernels.kda.tpu.shift import ALIGN, fill_word, move, moved, row_mask, tile_rows, words
from pallas_kernels.kda.tpu.tiles import BUFFERS, WINDOW

INPUTS = 4  # q, k, v, raw gate
STAGED = 2  # states on their way out
_STAGES = 32  # more than either phase has
_SAVE_HEADS = 16  # heads whose masked updates are computed together


def run_staggered(prepare: list[Iterator[None]], advance: list[Iterator[None]], pace: float) -> None:
    """Emit all stages of both phases, in the order that lets the compiler overlap them.

    At time t pair p is at stage t - p of `prepare` and stage (t - p / 2) / pace of `advance`: neighbouring pairs are
    then in different stages, which use different units. The order was found by replaying compiled schedules.
    """
    events: list[tuple[float, int, int]] = [(t + p, 1, p) for p in range(len(prepare)) for t in range(_STAGES)]
    events += [(pace * t + 0.5 * p, 0, p) for p in range(len(advance)) for t in range(_STAGES)]
    for _, phase, p in sorted(events):
        next((advance, prepare)[phase][p], None)


class Refs(NamedTuple):
    """What the kernel reads and writes, in the order of `pallas_call`; n heads and p pairs a program, N = 128 n.

    In HBM: the packed tensors [T, H K], betas (see `plan.Betas`), the output and the pool. In VMEM, whole: gate
    [2, N], the constants of `chunk`. Scratch:

    Attributes:
      inputs: [BUFFERS, 4, WINDOW, N] windows of q, k, v, raw gate.
      beta_columns, beta_rows: [BUFFERS, C, 3 n], [BUFFERS, p, 2 C].
      outputs: [2, WINDOW, N].
      carry: [ALIGN, N] the last block written, which the next chunk may have to complete.
      state: [n, K, V] fp32; old: the same before the chunk, kept where a save lies inside it.
      loaded, staged: [n, K, V] and [STAGED, n, K, V] states on their way in and out, in the pool's dtype.
      u: [C, N] corrections of the chunk last carried.
      read .. decay: `chunk.Prepared` of all pairs.
    """

    q: Any
    k: Any
    v: Any
    raw_gate: Any
    columns_hbm: Any
    rows_hbm: Any
    gate: Any
    sums: Any
    level: Any
    selector: Any
    pool_in: Any
    out: Any
    pool: Any
    inputs: Any
    beta_columns: Any
    beta_rows: Any
    outputs: Any
    carry: Any
    state: Any
    old: Any
    loaded: Any
    staged: Any
    u: Any
    read: Any
    kg: Any
    a_qk: Any
    m: Any
    inverse: Any
    decay: Any
    in_sem: Any
    out_sem: Any
    load_sem: Any
    save_sem: Any


class Kernel:
    """One step of the kernel."""

    def __init__(self, plan: ChunkPlan, refs: Refs, *, heads: int, arithmetic: Arithmetic, scale: float, rows: int):
        self.plan, self.refs, self.heads, self.ar, self.scale, self.rows = plan, refs, heads, arithmetic, scale, rows
        self.group = pl.program_id(0)
        self.step = pl.program_id(1)
        self.used = plan.used_and_layer[0]
        self.layer = plan.used_and_layer[1]
        # Heads whose rows are moved together.
        self.together = 2 if heads % 2 == 0 else 1
        # A pair is two heads; the last of an odd number is its own partner and stored once.
        self.pairs = [(h, min(h + 1, heads - 1)) for h in range(0, heads, 2)]

    # -- where things are

    def columns(self, h: int | jax.Array) -> Any:
        start = h * WIDTH if isinstance(h, int) else pl.multiple_of(h * WIDTH, WIDTH)
        return pl.ds(start, WIDTH)

    def group_columns(self) -> Any:
        return pl.ds(pl.multiple_of(self.group * self.heads * WIDTH, WIDTH), self.heads * WIDTH)

    def tile_words(self, ref: Any, tile: jax.Array, h: jax.Array) -> jax.Array:
        """Tile of rows of head h, as words."""
        tall = tile_rows(ref.dtype)
        return words(ref[pl.ds(pl.multiple_of(tile * tall, tall), tall), self.columns(h)])

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
        betas = (self.refs.columns_hbm, self.refs.beta_columns), (self.refs.rows_hbm, self.refs.beta_rows)
        for i, x in enumerate(self.refs[:INPUTS]):
            pltpu.make_async_copy(x.at[where], self.refs.inputs.at[buffer, i], self.refs.in_sem.at[0, buffer]).start()
        for i, (x, ref) in enumerate(betas):
            pltpu.make_async_copy(x.at[self.group, c], ref.at[buffer], self.refs.in_sem.at[1 + i, buffer]).start()

    def wait_inputs(self, c: jax.Array) -> None:
        """One wait for the bytes of all four windows, one for each layout of beta."""
        for i, ref in enumerate((self.refs.inputs, self.refs.beta_columns, self.refs.beta_rows)):
            whole = ref.at[c % BUFFERS]
            pltpu.make_async_copy(whole, whole, self.refs.in_sem.at[i, c % BUFFERS]).wait()

    def rows_of(self, c: jax.Array) -> Any:
        """Where in the window the slots of chunk c lie once `move_inputs` has been: behind whole tiles at most."""
        start = jnp.where(self.plan.plain[c] > 0, self.plan.first[c] - self.window(c), 0)
        return pl.ds(pl.multiple_of(start, ALIGN), CHUNK)

    def move_inputs(self, c: jax.Array) -> None:
        """Put the tokens of chunk c into their slots and neutral values into the others."""
        first, low, high = self.slots(c)
        dtype = self.refs.inputs.dtype
        tall, count = tile_rows(dtype), CHUNK // tile_rows(dtype)

        @pl.when(self.plan.plain[c] == 0)
        def rewrite():
            tiles, within = move(first - self.window(c), count, WINDOW // tall, dtype)
            masks = [row_mask(low - j * tall, high - j * tall, WIDTH, dtype) for j in range(count)]

            def columns(n, _):
                # All loads come first: the compiler cannot know that they read nothing just stored.
                refs = [self.refs.inputs.at[c % BUFFERS, i] for i in range(INPUTS)]
                places = [(i, n * self.together + h) for i in range(INPUTS) for h in range(self.together)]
                runs = [[self.tile_words(refs[i], t, h) for t in tiles] for i, h in places]
                for (i, h), run in zip(places, runs, strict=True):
                    fill = fill_word(NEUTRAL_GATE if i == 3 else 0.0, dtype)
                    for j, (x, mask) in enumerate(zip(moved(run, within, dtype), masks, strict=True)):
                        x = (x & mask) | (fill & ~mask)
                        refs[i][pl.ds(j * tall, tall), self.columns(h)] = pltpu.bitcast(x, dtype)
                return 0

            lax.fori_loop(0, self.heads // self.together, columns, 0)

    # -- outputs

    def output_blocks(self, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First packed row, and number, of the aligned blocks that chunk c reaches into."""
        first, low, high = self.slots(c)
        begin = (first + low) // ALIGN * ALIGN
        return pl.multiple_of(begin, ALIGN), (first + high - begin + ALIGN - 1) // ALIGN

    def whole_output_copy(self, c: jax.Array) -> Any:
        target = self.refs.out.at[pl.ds(pl.multiple_of(self.plan.first[c], ALIGN), CHUNK), self.group_columns()]
        return pltpu.make_async_copy(self.refs.outputs.at[c % 2, pl.ds(0, CHUNK)], target, self.refs.out_sem.at[c % 2])

    def for_output_copies(self, c: jax.Array, do: Any) -> None:
        """`do` each copy of the outputs of chunk c: one of all, or one for each aligned block."""
        begin, blocks = self.output_blocks(c)

        @pl.when(self.plan.plain[c] > 0)
        def whole():
            do(self.whole_output_copy(c))

        @pl.when(self.plan.plain[c] == 0)
        def blocks_of_rows():
            def block(i, _):
                at = pl.multiple_of(i * ALIGN, ALIGN)
                target = self.refs.out.at[pl.ds(pl.multiple_of(begin + at, ALIGN), ALIGN), self.group_columns()]
                do(
                    pltpu.make_async_copy(
                        self.refs.outputs.at[c % 2, pl.ds(at, ALIGN)], target, self.refs.out_sem.at[c % 2]
                    )
                )
                return 0

            lax.fori_loop(0, blocks, block, 0)

    def write_outputs(self, c: jax.Array) -> None:
        """Start the copies of chunk c, after those of the chunk before, which may share a block with them."""
        before = jnp.maximum(c - 1, 0)
        usual = (c > 0) & (self.plan.plain[before] > 0) & (self.plan.plain[c] > 0)

        @pl.when(usual)
        def whole_after_whole():
            self.whole_output_copy(before).wait()
            self.whole_output_copy(c).start()

        @pl.when(jnp.logical_not(usual))
        def any_after_any():
            @pl.when(c > 0)
            def wait():
                self.for_output_copies(before, lambda copy: copy.wait())

            self.move_outputs(c)
            self.for_output_copies(c, lambda copy: copy.start())

    def move_outputs(self, c: jax.Array) -> None:
        """Put slots of chunk c onto their packed rows, beside rows of the block that came before."""
        first, low, high = self.slots(c)
        begin, _ = self.output_blocks(c)

        @pl.when(self.plan.plain[c] == 0)
        def rewrite():
            dtype = self.refs.outputs.dtype
            tall = tile_rows(dtype)
            ref = self.refs.outputs.at[c % 2]
            # The block that the next chunk may share.
            last = jnp.minimum((first + high) // ALIGN * ALIGN - begin, WINDOW - ALIGN)
            tiles, within = move(begin - first, WINDOW // tall, CHUNK // tall, dtype)
            at = first - begin
            masks = [row_mask(at + low - j * tall, at + high - j * tall, WIDTH, dtype) for j in range(ALIGN // tall)]

            def columns(n, _):
                heads = [n * self.together + h for h in range(self.together)]
                runs = [[self.tile_words(ref, t, h) for t in tiles] for h in heads]
                before = [words(self.refs.carry[:, self.columns(h)]) for h in heads]
                for h, run, old in zip(heads, runs, before, strict=True):
                    for j, x in enumerate(moved(run, within, dtype)):
                        if j < ALIGN // tall:
                            x = (x & masks[j]) | (old[8 * j : 8 * j + 8] & ~masks[j])
                        ref[j * tall : (j + 1) * tall, self.columns(h)] = pltpu.bitcast(x, dtype)
                for h in heads:
                    block = ref[pl.ds(pl.multiple_of(last, ALIGN), ALIGN), self.columns(h)]
                    self.refs.carry[:, self.columns(h)] = block
                return 0

            lax.fori_loop(0, self.heads // self.together, columns, 0)

    # -- states

    def pool_at(self, slot: jax.Array) -> Any:
        return self.refs.pool.at[self.layer, slot, pl.ds(self.group * self.heads, self.heads)]

    def load_copy(self, c: jax.Array) -> Any:
        return pltpu.make_async_copy(self.pool_at(self.plan.read[c]), self.refs.loaded, self.refs.load_sem)

    def begin_row(self, c: jax.Array) -> None:
        """The state that chunk c starts from, if it is the first of its row."""
        slot = self.plan.read[c]

        @pl.when(slot > 0)
        def resume():
            self.load_copy(c).wait()
            self.refs.state[...] = self.refs.loaded[...].astype(jnp.float32)

        @pl.when(slot == 0)
        def start_from_zero():
            self.refs.state[...] = jnp.zeros(self.refs.state.shape, jnp.float32)

    def save_copy(self, j: jax.Array) -> Any:
        """Copy of save j; each is started once and waited for once, two later or at the end."""
        return pltpu.make_async_copy(
            self.refs.staged.at[j % STAGED], self.pool_at(self.plan.save_slot[j]), self.refs.save_sem.at[j % STAGED]
        )

    def save(self, c: jax.Array) -> None:
        def one(j, _):
            @pl.when(j >= STAGED)
            def make_room():
                self.save_copy(j - STAGED).wait()

            at_end = self.plan.save_tokens[j] >= self.plan.high[c]

            @pl.when(at_end)
            def stage_end():
                self.refs.staged[j % STAGED] = self.refs.state[...].astype(self.refs.staged.dtype)

            @pl.when(jnp.logical_not(at_end))
            def stage_inside():
                self.stage_inner(c, j)

            self.save_copy(j).start()
            return 0

        lax.fori_loop(self.plan.save_bounds[c], self.plan.save_bounds[c + 1], one, 0)

    def stage_inner(self, c: jax.Array, j: jax.Array) -> None:
        """State after some tokens of chunk c: S_b = diag(exp G_b) S + (k exp(G_b - G))^T u over rows up to b.

        u of a row does not depend on later rows. Gates and keys are recomputed from the inputs, which are still there.
        """
        ar, count, rows = self.ar, self.plan.save_tokens[j], self.rows_of(c)
        # As wide as `parts` are high, which hold a row twice where they hold two parts of it.
        shape = (CHUNK + 8, CHUNK if ar.exact else 2 * CHUNK)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        column = lax.broadcasted_iota(jnp.int32, shape, 1) % CHUNK
        # Behind each row up to b; below, from the first row on: the whole decay.
        mask = ar.round(jnp.where((column < count) & ((column > row) | (row >= CHUNK)), 1.0, 0.0))
        tall = tile_rows(ar.dtype)
        kept = jnp.concatenate([row_mask(-j * tall, count - j * tall, WIDTH, ar.dtype) for j in range(CHUNK // tall)])
        together = min(_SAVE_HEADS, self.heads)
        while self.heads % together:
            together -= 1

        def some(i, _):
            heads = [i * together + h for h in range(together)]
            raw = [self.refs.inputs[c % BUFFERS, 3, rows, self.columns(h)] for h in heads]
            gate = [self.refs.gate[:, self.columns(h)] for h in heads]
            g = [ar.log_decay(r, x[0:1], x[1:2]) for r, x in zip(raw, gate, strict=True)]
            decay = [ar.exp(ar.dot(mask, ar.parts(x))) for x in g]
            k = [chunk_math.normalise(self.refs.inputs[c % BUFFERS, 1, rows, self.columns(h)]) for h in heads]
            k = [words(ar.round(x * d[:CHUNK])) & kept for x, d in zip(k, decay, strict=True)]
            k = [pltpu.bitcast(x, ar.dtype) for x in k]
            added = [ar.dot(x.T, self.refs.u[:, self.columns(h)]) for x, h in zip(k, heads, strict=True)]
            for h, d, x in zip(heads, decay, added, strict=True):
                whole = jnp.broadcast_to(d[CHUNK : CHUNK + 1], (WIDTH, WIDTH)).T
                self.refs.staged[j % STAGED, h] = (whole * self.refs.old[h] + x).astype(self.refs.staged.dtype)
            return 0

        lax.fori_loop(0, self.heads // together, some, 0)

    # -- mathematics

    def prepare(self, p: int) -> Generator[None, None, None]:
        """Chunk `step` of pair p, into VMEM."""
        buffer, pair, rows = self.step % BUFFERS, self.pairs[p], self.rows_of(self.step)

        def tensor(i):
            return [self.refs.inputs[buffer, i, rows, self.columns(h)] for h in pair]

        beta = self.refs.beta_columns[buffer], self.refs.selector[:, p * 2 * CHUNK : (p + 1) * 2 * CHUNK]
        x = yield from chunk_math.prepare(
            tensor(0), tensor(1), tensor(3), [self.refs.gate[:, self.columns(h)] for h in pair], beta,
            Constants(self.refs.sums[...], self.refs.level[...]), self.ar, self.scale,
        )  # fmt: skip
        self.refs.read[2 * p], self.refs.read[2 * p + 1] = x.read
        self.refs.kg[p], self.refs.a_qk[p], self.refs.m[p], self.refs.inverse[p] = x.kg, x.a_qk, x.m, x.inverse
        self.refs.decay[p, 0:2] = x.decay

    def advance(self, p: int) -> Generator[None, None, None]:
        """Chunk `step` - 1 of pair p, from VMEM."""
        c, pair = jnp.maximum(self.step - 1, 0), self.pairs[p]
        buffer, rows = c % BUFFERS, self.rows_of(c)
        refs = self.refs
        prepared = Prepared(
            (refs.read[2 * p], refs.read[2 * p + 1]), refs.kg[p], refs.a_qk[p], refs.m[p], refs.inverse[p],
            refs.decay[p, 0:2],
        )  # fmt: skip
        out, after, u = yield from chunk_math.advance(
            prepared, [self.refs.inputs[buffer, 2, rows, self.columns(h)] for h in pair],
            self.refs.beta_rows[buffer, p : p + 1], [self.refs.state[h] for h in pair], self.ar,
        )  # fmt: skip
        for i, h in enumerate(dict.fromkeys(pair)):
            self.refs.outputs[c % 2, 0:CHUNK, self.columns(h)] = out[i].astype(self.refs.outputs.dtype)
            self.refs.state[h] = after[i]
            self.refs.u[:, self.columns(h)] = u[:, i * WIDTH : (i + 1) * WIDTH]

    def run(self) -> None:
        s, used, plan = self.step, self.used, self.plan

        @pl.when(s == 0)
        def first_inputs():
            self.start_inputs(s)

        self.wait_inputs(s)

        @pl.when(s < used)  # the chunk behind the last is a dummy, so that the wait needs no predicate
        def next_inputs():
            self.start_inputs(s + 1)

        before = jnp.maximum(s - 1, 0)
        begins = (s > 0) & (plan.read[before] >= 0)

        @pl.when((plan.plain[s] == 0) | begins | (plan.read[s] > 0) | (plan.inner[before] > 0))
        def seldom():
            @pl.when(s < used)
            def move():
                self.move_inputs(s)

            @pl.when(begins)
            def begin():
                self.begin_row(s - 1)

            @pl.when(plan.inner[before] > 0)
            def keep_old_state():
                self.refs.old[...] = self.refs.state[...]

            @pl.when(plan.read[s] > 0)
            def fetch_state():
                self.load_copy(s).start()

        pairs = range(len(self.pairs))
        pace = 2.0 if self.ar.midpoint else 1.5
        run_staggered([self.prepare(p) for p in pairs], [self.advance(p) for p in pairs], pace)

        @pl.when(s > 0)
        def results():
            self.write_outputs(s - 1)

            @pl.when((plan.save_bounds[s - 1] < plan.save_bounds[s]) | (s == used))
            def saves():
                self.save(s - 1)

                @pl.when(s == used)
                def drain():
                    self.for_output_copies(s - 1, lambda copy: copy.wait())
                    count = plan.save_bounds[used]

                    def finish(j, _):
                        self.save_copy(j).wait()
                        return 0

                    lax.fori_loop(jnp.maximum(count - STAGED, 0), count, finish, 0)


def kernel(*refs, heads: int, arithmetic: Arithmetic, scale: float, rows: int) -> None:
    fields = len(ChunkPlan._fields)
    body = Kernel(
        ChunkPlan(*refs[:fields]), Refs(*refs[fields:]), heads=heads, arithmetic=arithmetic, scale=scale, rows=rows
    )

    @pl.when((body.step <= body.used) & (body.used > 0))
    def run():
        body.run()
