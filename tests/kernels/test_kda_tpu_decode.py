"""The TPU decode kernel, interpreted, against golden files and the reference; and compiled for every chip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda_decode, kda_prefill, reference
from pallas_kernels.kda.tpu.decode import decode
from pallas_kernels.kda.tpu.step_tiles import StepTiles, decode_tiles
from tests.kernels import golden, tpu
from tests.kernels.kda_oracle import random_inputs, recurrence, rows_of
from tests.kernels.races import races_found

HEADS, WIDTH, TOKENS = 1, 128, ("q", "k", "v", "raw_g", "raw_beta")
FP32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
SMALL = StepTiles(heads=HEADS, rows=2, block=8, depth=8, ahead=4, vmem=0)
expected = jax.jit(reference.decode, static_argnames="lower_bound")


@functools.partial(jax.jit, static_argnames=("lower_bound", "interpret", "tiles"))
def interpreted(*arguments, lower_bound=None, interpret=tpu.PLAIN, tiles=SMALL):
    return decode(*arguments, lower_bound=lower_bound, interpret=interpret, tiles=tiles)


def batch(rows: int, seed: int, state=jnp.float32, activation=jnp.float32, heads: int = HEADS):
    """Inputs of `rows` rows of which some are absent, in both layers of a pool; absent rows and free slots hold NaN."""
    rng = np.random.default_rng(seed)
    x = random_inputs(seed, rows, heads, WIDTH, WIDTH)
    active = rng.random(rows) < 0.7
    slots = 1 + rng.permutation(3 * rows)
    read = np.where(rng.random(rows) < 0.2, 0, slots[:rows])
    write = np.where(rng.random(rows) < 0.5, slots[:rows], slots[rows : 2 * rows])
    write[rng.random(rows) < 0.1] = 0
    emit = np.where(rng.random(rows) < 0.3, slots[2 * rows :], 0)
    states = np.full((2, 3 * rows + 1, heads, WIDTH, WIDTH), np.nan, np.float32)
    states[:, read[active]] = rng.normal(size=(2, active.sum(), heads, WIDTH, WIDTH))
    states[:, 0] = np.nan
    for n in TOKENS:
        x[n][~active] = np.nan
    tokens = [jnp.asarray(x[n], jnp.float32 if n == "raw_beta" else activation) for n in TOKENS]
    return (
        *tokens, jnp.asarray(x["A_log"]), jnp.asarray(x["dt_bias"]), jnp.asarray(states, state), jnp.int32(1),
        jnp.asarray(active), *(jnp.asarray(a, jnp.int32) for a in (read, write, emit)),
    )  # fmt: skip


def same(got, want, limit):
    """Equal NaN, and close elsewhere."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert golden.rel_rmse(np.nan_to_num(got), np.nan_to_num(want)) <= limit


def test_any_mix_of_rows_gives_what_the_reference_gives_without_a_race():
    arguments = batch(19, 3)
    o, states = interpreted(*arguments, interpret=tpu.CHECKED)
    assert not races_found()
    want, after = expected(*arguments, lower_bound=None)
    same(o, want, 1e-6)
    same(states, after, 1e-6)
    same(states[0], arguments[7][0], 0)  # another layer
    # Nobody there: nothing changes.
    o, states = interpreted(*arguments[:9], jnp.zeros(19, bool), *arguments[10:], interpret=tpu.CHECKED)
    np.testing.assert_array_equal(o, 0)
    np.testing.assert_array_equal(states, arguments[7])


@pytest.mark.parametrize(("state", "limit"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-3)])
def test_narrow_inputs_and_states(state, limit):
    arguments = batch(19, 3, state, jnp.bfloat16)
    o, states = interpreted(*arguments, lower_bound=-5.0)
    want, after = expected(*arguments, lower_bound=-5.0)
    same(o, want, 1e-3)  # outputs may be rounded to the other neighbour
    same(states, after, limit)


def test_head_groups_follow_one_another():
    arguments = batch(6, 5, heads=12)
    tiles = StepTiles(heads=4, rows=1, block=8, depth=4, ahead=2, vmem=0)
    o, states = interpreted(*arguments, tiles=tiles)
    want, after = expected(*arguments, lower_bound=None)
    same(o, want, 1e-6)
    same(states, after, 1e-6)


def test_token_by_token_it_is_the_golden_recurrence():
    file = golden.load("kda_recurrence_dim128")
    tokens = [jnp.asarray(file[n][0]) for n in TOKENS]
    parameters = [jnp.asarray(file[n]) for n in ("A_log", "dt_bias")]
    states = jnp.full((1, 4, *file["initial_state"].shape[1:]), jnp.nan).at[0, 1].set(file["initial_state"][0])
    one = jnp.array([1])
    tiles = StepTiles(heads=1, rows=1, block=8, depth=4, ahead=2, vmem=0)
    x = {n: file[n][0, :12] for n in TOKENS} | {n: file[n] for n in ("A_log", "dt_bias")}
    _, after = recurrence(x, file["initial_state"][0], golden.bound(file["lower_bound"]))
    outs = []
    for t in range(12):
        emit = jnp.array([3 if t == 7 else 0])
        o, states = interpreted(*(a[t : t + 1] for a in tokens), *parameters, states, 0, jnp.array([True]), one, one,
                                emit, lower_bound=golden.bound(file["lower_bound"]), tiles=tiles)  # fmt: skip
        outs.append(o[0])
    assert golden.rel_rmse(jnp.stack(outs), file["o"][0, :12]) <= 1e-6
    assert golden.rel_rmse(states[0, 1], after[12]) <= 1e-6
    assert golden.rel_rmse(states[0, 3], after[8]) <= 1e-6
    assert np.isnan(states[0, 2]).all()


def test_decode_after_prefill_is_prefill():
    x = random_inputs(2, 8, 1, WIDTH, WIDTH)
    tokens, parameters = [jnp.asarray(x[n]) for n in TOKENS], [jnp.asarray(x[n]) for n in ("A_log", "dt_bias")]
    states = jnp.zeros((1, 4, 1, WIDTH, WIDTH))
    none, one = jnp.zeros((1, 0), jnp.int32), jnp.array([1])

    def prefill(length):
        return kda_prefill(*tokens, *parameters, states, 0, rows_of([0], [length], [0]), jnp.array([0]), one, none,
                           none, lower_bound=-5.0, implementation="reference")  # fmt: skip

    whole, after = prefill(8)
    _, before = prefill(7)
    tiles = StepTiles(heads=1, rows=1, block=8, depth=4, ahead=2, vmem=0)
    o, decoded = interpreted(*(a[7:] for a in tokens), *parameters, before, 0, jnp.array([True]), one, one,
                             jnp.array([0]), lower_bound=-5.0, tiles=tiles)  # fmt: skip
    same(o[0], whole[7], 1e-6)
    same(decoded, after, 1e-6)


def test_the_public_op_runs_it_and_refuses_other_widths():
    from jax.experimental.pallas import tpu as pltpu

    arguments = list(batch(1, 4))
    token = random_inputs(4, 1, HEADS, WIDTH, WIDTH)
    arguments[:5] = [jnp.asarray(token[n]) for n in TOKENS]
    arguments[9:11] = jnp.array([True]), jnp.array([0])
    with pltpu.force_tpu_interpret_mode(tpu.PLAIN):
        o, _ = kda_decode(*arguments, lower_bound=None, implementation="tpu")
    same(o, expected(*arguments, lower_bound=None)[0], 1e-6)
    narrow = [a[..., :64] if i in (0, 1, 2, 3, 6) else a for i, a in enumerate(arguments)]
    narrow[7] = arguments[7][..., :64, :64]
    with pytest.raises(ValueError, match=r"64 x 64; the TPU kernels take 128 x 128"):
        kda_decode(*narrow, lower_bound=None, implementation="tpu")


def test_tiles_that_do_not_fit_are_refused_with_their_size():
    with pytest.raises(ValueError, match=r"bytes of VMEM needed for 32 heads, 1048576 may be used"):
        decode_tiles(128, 32, FP32, [FP32] * 4, 1 << 20)
    with pytest.raises(ValueError, match="multiple of 16"):
        decode_tiles(128, 37, FP32, [FP32] * 4, 1 << 27)


def test_tiles_count_each_input_in_its_own_dtype():
    """A gate and v in fp32 beside bf16: two inputs and the output grow, each in two buffers."""
    narrow, mixed = (decode_tiles(128, 32, FP32, dtypes, 1 << 27) for dtypes in ([BF16] * 4, [BF16, BF16, FP32, FP32]))
    assert mixed.vmem - narrow.vmem == 2 * 3 * 32 * 32 * WIDTH * 2
    tight = decode_tiles(128, 32, FP32, [BF16, BF16, FP32, FP32], mixed.vmem - 1)
    assert tight.block < mixed.block, "fewer rows a block where all would not fit"


def test_pools_of_other_types_are_refused():
    with pytest.raises(ValueError, match="the pool is float16; the TPU kernels take float32 and bfloat16"):
        jax.eval_shape(functools.partial(decode, lower_bound=None), *batch(2, 0, jnp.float16))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("chip", "rows", "heads", "state", "activation"),
    tpu.across_chips(
        [
            (128, 32, jnp.float32, jnp.bfloat16),
            (128, 32, jnp.bfloat16, jnp.bfloat16),
            (256, 8, jnp.bfloat16, jnp.bfloat16),
            (256, 8, jnp.float32, jnp.bfloat16),
            (1, 1, jnp.float32, jnp.float32),
            (33, 4, jnp.bfloat16, jnp.float32),
            (9, 12, jnp.float32, jnp.bfloat16),
            (64, 96, jnp.float32, jnp.bfloat16),
        ]
    ),
)
def test_it_compiles_in_place(chip, rows, heads, state, activation):
    token, row = ((rows, heads, WIDTH), activation), ((rows,), jnp.int32)
    pool = (4, 2 * rows + 65, heads, WIDTH, WIDTH)
    compiled = tpu.compile_for(
        chip, functools.partial(decode, lower_bound=None), token, token, token, token, ((rows, heads), jnp.float32),
        ((heads,), jnp.float32), ((heads, WIDTH), jnp.float32), (pool, state), ((), jnp.int32), ((rows,), jnp.bool_),
        row, row, row, donate=(7,),
    )  # fmt: skip
    bytes_of_pool = int(np.prod(pool)) * jnp.dtype(state).itemsize
    assert compiled.alias_bytes >= bytes_of_pool
    assert compiled.temporary_bytes < bytes_of_pool / 4
