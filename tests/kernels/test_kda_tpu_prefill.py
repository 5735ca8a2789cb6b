"""The TPU prefill kernel, interpreted on the CPU, agrees with the golden files and the float64 recurrence.

One program for each precision and gate serves most tests, so everything is padded to one shape. Golden files with
K = V = 32 are padded with zeros to 128, which changes the query scale by a factor of 2 and nothing else.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.tpu import prefill as kernel
from pallas_kernels.kda.tpu import tiles
from pallas_kernels.kda.tpu.plan import chunk_plan
from pallas_kernels.rows import RaggedRows
from tests.kernels import golden, tpu
from tests.kernels.kda_oracle import random_inputs, recurrence, rows_of
from tests.kernels.races import races_found
from tests.kernels.test_kda_golden import FILES, one_sequence

TOKENS, ROWS, EMITS, LAYERS, SLOTS, HEADS, WIDTH = 256, 8, 12, 2, 30, 2, 128
TENSORS = ("q", "k", "v", "raw_g")
BF16 = 5e-3  # relative RMSE allowed with bf16 operands


@functools.cache
def program(lower_bound, interpret=True):
    run = functools.partial(kernel.prefill, lower_bound=lower_bound, chunk=64, interpret=interpret)
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False})


def run(x, states, rows, read, write, emit=None, *, lower_bound, dtype, layer=1, fill=np.nan):
    """The kernel on a dict of inputs, all padded with `fill` to one shape; outputs and one layer's states."""
    count, heads, key = x["q"].shape
    emit = np.zeros((2, len(read), 0)) if emit is None else emit
    head, wide = (0, HEADS - heads), (0, WIDTH - key)

    def tensor(name):
        a = np.pad(x[name], ((0, 0), head, wide))
        return jnp.asarray(np.pad(a, ((0, TOKENS - count), (0, 0), (0, 0)), constant_values=fill), dtype)

    def i32(a, *sizes):
        return jnp.asarray(np.pad(a, [(0, n - m) for n, m in zip(sizes, np.shape(a), strict=True)]), jnp.int32)

    beta = np.pad(np.pad(x["raw_beta"], ((0, 0), head)), ((0, TOKENS - count), (0, 0)), constant_values=fill)
    pool = np.full((LAYERS, SLOTS, HEADS, WIDTH, WIDTH), np.nan, np.float32)
    pool[layer, : states.shape[0]] = np.pad(states, ((0, 0), head, wide, wide))
    o, after = program(lower_bound)(
        *(tensor(name) for name in TENSORS), jnp.asarray(beta), jnp.asarray(np.pad(x["A_log"], head)),
        jnp.asarray(np.pad(x["dt_bias"], (head, wide))), jnp.asarray(pool), jnp.int32(layer),
        RaggedRows(*(i32(a, ROWS) for a in rows)), i32(read, ROWS), i32(write, ROWS),
        i32(emit[0], ROWS, EMITS), i32(emit[1], ROWS, EMITS),
    )  # fmt: skip
    o, after = np.asarray(o, np.float32), np.asarray(after)
    np.testing.assert_array_equal(after[1 - layer], pool[1 - layer], "another layer was touched")
    np.testing.assert_array_equal(after[layer, 0], pool[layer, 0], "the null slot was written")
    np.testing.assert_array_equal(o[count:], 0)
    return o[:count, :heads, :key] * (WIDTH / key) ** 0.5, after[layer, :, :heads, :key, :key]


def bf16_exact(x):
    """Tensors rounded to what bf16 holds, so that the oracle sees what the kernel sees."""
    return x | {n: np.array(jnp.asarray(x[n], jnp.bfloat16).astype(jnp.float32)) for n in TENSORS}


def part(x, begin, end):
    return {n: a if n in ("A_log", "dt_bias") else a[begin:end] for n, a in x.items()}


def pool_of(state):
    states = np.full((SLOTS, *state.shape), np.nan, np.float32)
    states[1] = state
    return states


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
def test_output_and_states_match_the_golden_recurrence(name, dtype):
    file = golden.load(name)
    x, count, every = one_sequence(file), file["q"].shape[1], file["states_every_64"][0]
    emit = [[64 * (i + 1) for i in range(len(every))]], [[3 + i for i in range(len(every))]]
    o, states = run(
        x, pool_of(file["initial_state"][0]), rows_of([0], [count], [0]), [1], [2], np.array(emit),
        lower_bound=golden.bound(file["lower_bound"]), dtype=dtype,
    )  # fmt: skip
    limit = FILES[name] if dtype == jnp.float32 else BF16
    assert golden.rel_rmse(o, file["o"][0]) <= limit
    assert golden.rel_rmse(states[2], file["final_state"][0]) <= limit
    assert golden.rel_rmse(states[3 : 3 + len(every)], every) <= limit
    np.testing.assert_array_equal(states[1], file["initial_state"][0])


def test_golden_rows_of_all_lengths_with_checkpoints():
    file = golden.load("kda_varlen_lower_bound")
    cu = file["cu_seqlens"]
    length, count = np.diff(cu), len(cu) - 1
    states = np.full((SLOTS, *file["initial_state"].shape[1:]), np.nan, np.float32)
    states[1 : 1 + count] = file["initial_state"]
    points, slots, used = np.zeros((count, EMITS), int), np.zeros((count, EMITS), int), [0] * count
    for i, (row, offset) in enumerate(zip(file["checkpoint_seq"], file["checkpoint_offset"], strict=True)):
        points[row, used[row]], slots[row, used[row]] = offset, 15 + i
        used[row] += 1
    o, after = run(
        one_sequence(file), states, rows_of(cu[:-1], length, 0 * length),
        np.where(file["has_initial_state"], np.arange(count) + 1, 0), np.arange(count) + 8, (points, slots),
        lower_bound=-5.0, dtype=jnp.float32,
    )  # fmt: skip
    assert golden.rel_rmse(o, file["o"][0]) <= 1e-6
    for row in np.flatnonzero(length):
        assert golden.rel_rmse(after[8 + row], file["final_state"][row]) <= 1e-6
    for row in np.flatnonzero(length == 0):
        assert np.isnan(after[8 + row]).all(), "an absent row writes nothing"
    saved = after[15 : 15 + len(file["checkpoint_states"])]
    assert golden.rel_rmse(saved, file["checkpoint_states"]) <= 1e-6


def ragged_case(seed):
    """Rows of awkward lengths at awkward places, with gaps of NaN, and up to three saves a row at random positions."""
    rng = np.random.default_rng(seed)
    length = rng.permutation([0, 1, 63, 64, 65, int(rng.integers(2, 40))])
    gap = rng.integers(0, 4, len(length)) * rng.integers(0, 2, len(length))
    offset = np.cumsum(gap + length) - length
    start = rng.integers(0, 200, len(length)) * rng.integers(0, 2, len(length))
    read = np.where(rng.random(len(length)) < 0.7, np.arange(len(length)) + 1, 0)
    x = bf16_exact(random_inputs(seed, int(offset[-1] + length[-1]), HEADS, WIDTH, WIDTH))
    covered = np.zeros(len(x["q"]), bool)
    emit = np.zeros((2, len(length), 3), int)
    for row, (o, n) in enumerate(zip(offset, length, strict=True)):
        covered[o : o + n] = True
        for i, after in enumerate(sorted(rng.choice(np.arange(1, n + 1), min(3, n), replace=False))):
            emit[:, row, i] = start[row] + after, 15 + 3 * row + i if row < 5 else 0
    for name in (*TENSORS, "raw_beta"):
        x[name][~covered] = np.nan
    return x, rows_of(offset, length, start), read, np.arange(len(length)) + 8, emit, covered


@pytest.mark.parametrize(
    ("lower_bound", "dtype", "limit", "seed"),
    [(None, jnp.bfloat16, BF16, 0), (-5.0, jnp.bfloat16, BF16, 1), (None, jnp.float32, 1e-6, 2)],
)
def test_ragged_rows_with_saves_anywhere_match_the_recurrence(lower_bound, dtype, limit, seed):
    x, rows, read, write, emit, covered = ragged_case(seed)
    states = np.full((SLOTS, HEADS, WIDTH, WIDTH), np.nan, np.float32)
    states[1:8] = np.random.default_rng(seed).normal(size=(7, HEADS, WIDTH, WIDTH))
    o, after = run(x, states, rows, read, write, emit, lower_bound=lower_bound, dtype=dtype)
    np.testing.assert_array_equal(o[~covered], 0)
    untouched = set(range(1, SLOTS))
    for row, (offset, length, start) in enumerate(zip(*map(np.asarray, rows), strict=True)):
        if not length:
            continue
        initial = states[read[row]] if read[row] else np.zeros_like(states[1])
        want, want_after = recurrence(part(x, offset, offset + length), initial, lower_bound)
        assert golden.rel_rmse(o[offset : offset + length], want) <= limit
        saves = [(start + length, write[row]), *((p, s) for p, s in zip(*emit[:, row], strict=True) if s)]
        for position, slot in saves:
            assert golden.rel_rmse(after[slot], want_after[position - start]) <= limit
            untouched.discard(int(slot))
    rest = sorted(untouched)
    np.testing.assert_array_equal(after[rest], states[rest])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("cut", [64, 100])
def test_resuming_from_a_save_equals_the_uncut_run(cut, lower_bound):
    x = random_inputs(cut, 200, HEADS, WIDTH, WIDTH)
    states = np.full((SLOTS, HEADS, WIDTH, WIDTH), np.nan, np.float32)
    both = {"lower_bound": lower_bound, "dtype": jnp.float32}
    whole, after = run(x, states, rows_of([0], [200], [0]), [0], [2], np.array([[[cut]], [[3]]]), **both)
    o, resumed = run(part(x, cut, 200), after, rows_of([0], [200 - cut], [cut]), [3], [4], **both)
    assert golden.rel_rmse(o, whole[cut:]) <= 1e-5
    assert golden.rel_rmse(resumed[4], after[2]) <= 1e-5


def test_neighbours_share_tiles_under_the_strongest_bounded_gate():
    x = bf16_exact(random_inputs(3, 128, HEADS, WIDTH, WIDTH))
    x["raw_g"][:] = 40.0  # -5 a token in nearly every channel
    states = np.full((SLOTS, HEADS, WIDTH, WIDTH), np.nan, np.float32)
    o, after = run(x, states, rows_of([0, 63], [63, 65], [0, 0]), [0, 0], [1, 2], lower_bound=-5.0, dtype=jnp.bfloat16)
    for slot, begin, end in ((1, 0, 63), (2, 63, 128)):
        want, want_after = recurrence(part(x, begin, end), np.zeros_like(states[1]), -5.0)
        assert golden.rel_rmse(o[begin:end], want) <= BF16
        assert golden.rel_rmse(after[slot], want_after[-1]) <= BF16


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("a_log", [(-100.0, 100.0), (-70.0, 70.0)])
def test_slots_that_are_no_tokens_are_neutral_for_any_slope(a_log, lower_bound, dtype):
    """A slope that underflows makes the bounded gate constant; one that overflows makes the softplus gate forget."""
    x = bf16_exact(random_inputs(7, 37, HEADS, WIDTH, WIDTH))
    x["A_log"][:] = a_log
    states = pool_of(np.random.default_rng(7).normal(size=(HEADS, WIDTH, WIDTH)).astype(np.float32))
    o, after = run(x, states, rows_of([0], [37], [5]), [1], [2], lower_bound=lower_bound, dtype=dtype)
    want, want_after = recurrence(x, states[1], lower_bound)
    limit = BF16 if dtype == jnp.bfloat16 else 1e-6
    assert golden.rel_rmse(o, want) <= limit
    assert golden.rel_rmse(after[2], want_after[-1]) <= limit


def test_no_row_at_all():
    x = random_inputs(3, 10, HEADS, WIDTH, WIDTH)
    states = np.full((SLOTS, HEADS, WIDTH, WIDTH), np.nan, np.float32)
    o, after = run(x, states, rows_of([0], [0], [0]), [1], [2], lower_bound=-5.0, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(o, 0)
    np.testing.assert_array_equal(after, states)


def test_programs_of_one_head_and_a_bf16_pool_without_races(monkeypatch):
    """The last head of an odd number is its own partner; copies and semaphores are simulated here."""
    monkeypatch.setattr(kernel, "heads_per_program", lambda *_: 1)
    x = bf16_exact(random_inputs(5, 96, 2, WIDTH, WIDTH))
    pool = np.full((1, 6, 2, WIDTH, WIDTH), np.nan, np.float32)
    pool[0, 1] = np.random.default_rng(0).normal(size=(2, WIDTH, WIDTH))
    pool = np.array(jnp.asarray(pool, jnp.bfloat16).astype(jnp.float32))
    run_it = program(-5.0, pltpu.InterpretParams(detect_races=True))
    o, after = run_it(
        *(jnp.asarray(x[n], jnp.bfloat16) for n in TENSORS), jnp.asarray(x["raw_beta"]), jnp.asarray(x["A_log"]),
        jnp.asarray(x["dt_bias"]), jnp.asarray(pool, jnp.bfloat16), jnp.int32(0), rows_of([0, 21], [21, 70], [0, 3]),
        jnp.array([0, 1]), jnp.array([2, 3]), jnp.array([[0], [40]]), jnp.array([[0], [4]]),
    )  # fmt: skip
    assert not races_found()
    o, after = np.asarray(o, np.float32), np.asarray(after, np.float32)
    for begin, end, initial, saves in ((0, 21, 0 * pool[0, 1], [(21, 2)]), (21, 91, pool[0, 1], [(37, 4), (70, 3)])):
        want, want_after = recurrence(part(x, begin, end), initial, -5.0)
        assert golden.rel_rmse(o[begin:end], want) <= BF16
        for count, slot in saves:
            assert golden.rel_rmse(after[0, slot], want_after[count]) <= BF16
    np.testing.assert_array_equal(o[91:], 0)


def test_saves_are_listed_chunk_by_chunk():
    rows = rows_of([0, 3, 3], [3, 0, 130], [62, 0, 64])
    plan = chunk_plan(
        rows, 133, 64, 16, 5, jnp.array([1, 7, 0]), jnp.array([2, 8, 3]),
        jnp.array([[0, 64], [1, 1], [192, 70]]), jnp.array([[0, 4], [9, 9], [5, 6]]),
    )  # fmt: skip
    used = int(plan.used_and_layer[0])
    assert used == 5
    assert plan.first[:used].tolist() == [-62, 2, 3, 67, 131]
    assert plan.low[:used].tolist() == [62, 0, 0, 0, 0]
    assert plan.high[:used].tolist() == [64, 1, 64, 64, 2]
    assert plan.read[:used].tolist() == [1, -1, 0, -1, -1]
    assert plan.save_bounds[: used + 1].tolist() == [0, 1, 2, 3, 4, 5]
    assert plan.save_tokens[:5].tolist() == [64, 1, 6, 64, 2]
    assert plan.save_slot[:5].tolist() == [4, 2, 6, 5, 3]
    assert plan.inner[:used].tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(("heads", "group"), [(1, 1), (4, 4), (8, 8), (12, 12), (32, 16), (96, 16), (17, 1), (21, 7)])
def test_heads_of_a_program(heads, group):
    assert tiles.heads_per_program(heads, jnp.bfloat16, jnp.bfloat16, jnp.float32, False) == group


def test_what_does_not_fit_is_refused_with_numbers():
    with pytest.raises(ValueError, match=r"needs \d+ bytes of VMEM for one head, 100000 are allowed"):
        tiles.heads_per_program(8, jnp.float32, jnp.float32, jnp.float32, True, limit=100_000)
    shapes = arguments(2, jnp.bfloat16)
    for change, message in (
        ({"chunk": 32}, "chunk must be 64, got 32"),
        ({"width": 64}, "K and V must be 128, got 64 and 64"),
        ({"pool": jnp.float16}, "float32 or bfloat16, got float16"),
    ):
        chunk = change.pop("chunk", 64)
        shapes = arguments(2, jnp.bfloat16, **change)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(kernel.prefill, lower_bound=None, chunk=chunk), *shapes)


def arguments(heads, dtype, tokens=512, rows=4, width=WIDTH, pool=jnp.float32):
    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)

    f32, i32 = jnp.float32, jnp.int32
    return (
        *[shape(dtype, tokens, heads, width)] * 4, shape(f32, tokens, heads), shape(f32, heads),
        shape(f32, heads, width), shape(pool, 20, 64, heads, width, width), shape(i32),
        RaggedRows(*[shape(i32, rows)] * 3), shape(i32, rows), shape(i32, rows), *[shape(i32, rows, 2)] * 2,
    )  # fmt: skip


@pytest.mark.aot
@pytest.mark.parametrize(
    ("chip", "heads", "lower_bound", "dtype"),
    [
        ("v5e", 16, None, jnp.bfloat16),
        ("v5p", 16, -5.0, jnp.bfloat16),
        ("v6e", 32, None, jnp.bfloat16),
        ("tpu7x", 12, -5.0, jnp.bfloat16),
        ("tpu7x", 16, None, jnp.bfloat16),
        ("v6e", 1, None, jnp.bfloat16),
        ("v6e", 4, -5.0, jnp.float32),
    ],
)
def test_it_compiles_in_place(chip, heads, lower_bound, dtype):
    run = functools.partial(kernel.prefill, lower_bound=lower_bound, chunk=64)
    compiled = tpu.compile_for(chip, run, *arguments(heads, dtype), donate=(7,))
    assert compiled.alias_bytes >= 20 * 64 * heads * WIDTH * WIDTH * 4
