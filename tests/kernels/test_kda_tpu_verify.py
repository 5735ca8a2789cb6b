"""The TPU kernels of verify and commit, interpreted, against golden files, oracle and reference; and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kda import Commit, Records, kda_commit, kda_verify, reference
from pallas_kernels.kda.records import emission_slot
from pallas_kernels.kda.tpu.commit import commit
from pallas_kernels.kda.tpu.speculate import VMEM_LIMIT
from pallas_kernels.kda.tpu.step_tiles import StepTiles, speculate_tiles
from pallas_kernels.kda.tpu.verify import commit_verify, verify
from pallas_kernels.rows import RaggedRows
from tests.kernels import golden, tpu
from tests.kernels.kda_oracle import random_inputs, recurrence, rows_of
from tests.kernels.races import races_found

HEADS, WIDTH, MOST, ROWS, COUNT, SLOTS = 2, 128, 5, 4, 20, 24
NAMES = ("q", "k", "v", "raw_g", "raw_beta")
FP32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
TILES = StepTiles(heads=HEADS, rows=1, block=8, depth=4, ahead=3, vmem=0)
TWO_ROWS = TILES._replace(rows=2, depth=8, ahead=6)
STATIC = ("lower_bound", "interpret", "tiles")
run_verify = jax.jit(functools.partial(verify, most=MOST), static_argnames=STATIC)
run_commit = jax.jit(commit, static_argnames=STATIC)
run_both = jax.jit(commit_verify, static_argnames=STATIC)
CALL = {"interpret": tpu.PLAIN, "tiles": TILES}


def i32(*arrays):
    return tuple(jnp.asarray(a, jnp.int32) for a in arrays)


def tokens_of(x, activation=jnp.float32):
    return [jnp.asarray(x[n], jnp.float32 if n == "raw_beta" else activation) for n in NAMES]


def parameters(seed):
    x = random_inputs(seed, 0, HEADS, WIDTH, WIDTH)
    return [jnp.asarray(x[n]) for n in ("A_log", "dt_bias")]


def widened(a, axes):
    """Zeros behind the golden width of 32: they change neither norms nor products."""
    pad = [(0, 0)] * a.ndim
    for axis in axes:
        pad[axis] = (0, WIDTH - a.shape[axis])
    return np.pad(a, pad)


def golden_case():
    """Golden rows of 5, 2 and 4 tokens around an absent one, packed with NaN between them."""
    file = golden.load("kda_spec_verify_commit")
    lengths, offsets = np.array([5, 2, 0, 4]), np.array([1, 7, 0, 10])
    x = {n: np.full((COUNT, *widened(file[n], [3] if n != "raw_beta" else []).shape[2:]), np.nan) for n in NAMES}
    for row, source in ((0, 0), (1, 1), (3, 2)):
        here = slice(offsets[row], offsets[row] + lengths[row])
        for n in NAMES:
            x[n][here] = widened(file[n], [3] if n != "raw_beta" else [])[source, : lengths[row]]
    states = np.full((2, SLOTS, HEADS, WIDTH, WIDTH), np.nan, np.float32)
    states[1, 3:6] = widened(file["state_before"], [2, 3])
    a_log, dt_bias = jnp.asarray(file["A_log"]), jnp.asarray(widened(file["dt_bias"], [1]))
    return file, tokens_of(x), [a_log, dt_bias], RaggedRows(*i32(offsets, lengths, 0 * lengths)), jnp.asarray(states)


def test_verify_gives_the_golden_corrections_and_outputs():
    file, tokens, constants, rows, states = golden_case()
    o, records = run_verify(*tokens, *constants, states, 1, rows, *i32([3, 4, 9, 5]), lower_bound=-5.0, **CALL)
    slack = np.ones(COUNT, bool)
    for row, source in ((0, 0), (1, 1), (3, 2)):
        length = int(rows.length[row])
        here = slice(int(rows.offset[row]), int(rows.offset[row]) + length)
        slack[here] = False
        # q is scaled by K^-0.5, and K is 128 here and 32 there.
        assert golden.rel_rmse(2 * o[here, :, :32], file["o"][source, :length]) <= 1e-6
        assert golden.rel_rmse(records.u[row, :length, :, :32], file["correction"][source, :length]) <= 1e-6
        np.testing.assert_array_equal(records.k[row, :length, :, :32], file["k"][source, :length])
    np.testing.assert_array_equal(o[slack], 0)


@pytest.mark.parametrize("accepted", range(MOST + 1))
def test_commit_gives_the_golden_state_after_any_number_of_tokens(accepted):
    file, _, constants, _, states = golden_case()
    kept = [widened(file[n], [3]) for n in ("correction", "k", "raw_g")]
    kept = [np.concatenate([a, np.full_like(a[:1], np.nan)]) for a in kept]
    for a in kept:
        a[:, accepted:] = np.nan  # what was not accepted may be anything
    which = Commit(*i32([accepted] * 3 + [7], [3, 4, 5, 9], [3, 7, 0, 0],
                        [accepted - 1, accepted, accepted + 1, 7], [8, 9, 10, 0]))  # fmt: skip
    out = run_commit(Records(*map(jnp.asarray, kept)), *constants, states, 1, which, lower_bound=-5.0, **CALL)
    after = widened(file["state_after_accepting"], [3, 4])
    written = {3: after[0, accepted], 7: after[1, accepted], 4: after[1, 0], 5: after[2, 0]}
    if accepted > 1:
        written[8] = after[0, accepted - 1]
    if accepted > 0:
        written[9] = after[1, accepted]
    for slot in range(SLOTS):
        if slot in written:
            assert golden.rel_rmse(out[1, slot], written[slot]) <= 1e-6
        else:
            assert np.isnan(out[1, slot]).all(), "nothing else is written"
    assert np.isnan(out[0]).all(), "nor another layer"


@settings(max_examples=4, deadline=None)
@given(data=st.data(), bounded=st.booleans(), seed=st.integers(0, 1000))
def test_lazy_steps_follow_the_oracle(data, bounded, seed):
    """Two ragged verify steps, the second committing a random part of the first; all that is unused is NaN."""
    bound = -5.0 if bounded else None
    constants = parameters(seed)
    names = dict(zip(("A_log", "dt_bias"), constants, strict=True))
    states = np.full((2, SLOTS, HEADS, WIDTH, WIDTH), np.nan, np.float32)
    states[1, 1 : 1 + ROWS] = np.random.default_rng(seed).normal(size=states[1, :ROWS].shape)
    truth = [np.zeros(states.shape[2:]), *states[1, 2 : 1 + ROWS].astype(np.float64)]
    states = jnp.asarray(states)
    records = Records(*(jnp.full((ROWS, MOST, HEADS, WIDTH), jnp.nan) for _ in range(3)))
    read, before, accepted = np.array([0, 2, 3, 4]), [None] * ROWS, np.zeros(ROWS, int)
    counts = st.lists(st.integers(0, MOST), min_size=ROWS, max_size=ROWS)
    for step in range(2):
        lengths = np.array(data.draw(counts)) * COUNT // (COUNT + 4)
        gaps = np.array(data.draw(st.lists(st.integers(0, 1), min_size=ROWS, max_size=ROWS)))
        offsets = np.cumsum(gaps + lengths) - lengths
        x = random_inputs(seed + step, COUNT, HEADS, WIDTH, WIDTH) | names
        for n in NAMES:
            inside = np.zeros(COUNT, bool)
            for offset, length in zip(offsets, lengths, strict=True):
                inside[offset : offset + length] = True
            x[n][~inside] = np.nan
        moves = np.array(data.draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)))
        write = np.where(moves | (read == 0), 5 + 4 * step + np.arange(ROWS), read)
        emit_after = np.array(data.draw(counts))
        which = Commit(*i32(accepted, read, write, emit_after, 16 + np.arange(ROWS)))
        o, records, states = run_both(
            *tokens_of(x), *constants, states, 1, rows_of(offsets, lengths, 0 * offsets), records, which,
            lower_bound=bound, **CALL,
        )  # fmt: skip
        read = write
        for r in range(ROWS):
            if accepted[r]:
                truth[r] = before[r][accepted[r]]
            np.testing.assert_allclose(states[1, read[r]], truth[r], atol=1e-5, rtol=1e-5)
            if 0 < emit_after[r] <= accepted[r]:
                np.testing.assert_allclose(states[1, 16 + r], before[r][emit_after[r]], atol=1e-5, rtol=1e-5)
            mine = {n: a if n in names else a[offsets[r] : offsets[r] + lengths[r]] for n, a in x.items()}
            want, before[r] = recurrence(mine, truth[r], bound)
            np.testing.assert_allclose(o[offsets[r] : offsets[r] + lengths[r]], want, atol=1e-5, rtol=1e-5)
        accepted = np.array([data.draw(st.integers(0, n)) for n in lengths])


def mixed_case(state, activation):
    """Rows with tokens and records, with either alone and with neither; one read from the null slot, two emissions."""
    x = random_inputs(1, COUNT, HEADS, WIDTH, WIDTH)
    rows = rows_of([0, 5, 5, 9], [5, 0, 3, 0], [0] * 4)
    states = np.random.default_rng(1).normal(size=(2, SLOTS, HEADS, WIDTH, WIDTH))
    states[:, 0] = np.nan
    kept = np.random.default_rng(2).normal(size=(3, ROWS, MOST, HEADS, WIDTH))
    records = Records(jnp.asarray(kept[0], jnp.float32), *(jnp.asarray(a, activation) for a in kept[1:]))
    which = Commit(*i32([4, 2, 0, 1], [1, 0, 3, 4], [1, 7, 3, 0], [2, 2, 1, 1], [9, 10, 11, 0]))
    return tokens_of(x, activation), parameters(1), jnp.asarray(states, state), rows, records, which


@pytest.mark.parametrize(
    ("state", "activation", "limits"),
    [
        (jnp.float32, jnp.bfloat16, (1e-3, 1e-5)),  # records in two bf16 parts
        (jnp.bfloat16, jnp.bfloat16, (4e-3, 2e-3)),
    ],
)
def test_lazy_gives_what_the_reference_gives_without_a_race(state, activation, limits):
    tokens, constants, states, rows, records, which = mixed_case(state, activation)
    o, again, after = run_both(*tokens, *constants, states, 0, rows, records, which, lower_bound=None,
                              interpret=tpu.CHECKED, tiles=TWO_ROWS)  # fmt: skip
    assert not races_found()
    want, expected, stored = reference.commit_verify(*tokens, *constants, states, 0, rows, records, which,
                                                     lower_bound=None)  # fmt: skip
    assert golden.rel_rmse(o, want) <= limits[0]
    for r in (0, 2):
        length = int(rows.length[r])
        assert golden.rel_rmse(again.u[r, :length], expected.u[r, :length]) <= limits[1]
    assert golden.rel_rmse(after[:, 1:], stored[:, 1:]) <= limits[1]
    untouched = jnp.array([2, 3, 4, 5, 6, 8, *range(11, SLOTS)])
    np.testing.assert_array_equal(
        np.asarray(after[0, untouched], np.float32), np.asarray(states[0, untouched], np.float32)
    )
    assert np.isnan(np.asarray(after[:, 0], np.float32)).all()


def test_an_emission_to_the_slot_of_the_end_is_left_out():
    which = Commit(*i32([3, 3, 3], [1, 2, 3], [4, 5, 6], [2, 2, 0], [4, 7, 8]))
    assert emission_slot(which).tolist() == [0, 7, 0]


def test_commit_of_head_groups():
    kept = np.random.default_rng(2).normal(size=(3, 3, 2, 4, WIDTH)).astype(np.float32)
    records = Records(*map(jnp.asarray, kept))
    x = random_inputs(1, 0, 4, WIDTH, WIDTH)
    constants = [jnp.asarray(x[n]) for n in ("A_log", "dt_bias")]
    states = jnp.asarray(np.random.default_rng(1).normal(size=(1, 6, 4, WIDTH, WIDTH)), jnp.float32)
    which = Commit(*i32([2, 1, 0], [1, 2, 2], [1, 4, 5], [1, 0, 0], [3, 0, 0]))
    tiles = StepTiles(heads=2, rows=1, block=8, depth=4, ahead=3, vmem=0)
    out = run_commit(records, *constants, states, 0, which, lower_bound=None, interpret=tpu.PLAIN, tiles=tiles)
    assert golden.rel_rmse(out, reference.commit(records, *constants, states, 0, which, lower_bound=None)) <= 1e-6


def test_the_public_ops_run_it():
    from jax.experimental.pallas import tpu as pltpu

    x = random_inputs(3, 1, 1, WIDTH, WIDTH)
    constants = [jnp.asarray(x[n]) for n in ("A_log", "dt_bias")]
    states = jnp.asarray(np.random.default_rng(3).normal(size=(1, 3, 1, WIDTH, WIDTH)), jnp.float32)
    one, two = jnp.array([1]), jnp.array([2])
    rows, which = rows_of([0], [1], [0]), Commit(one, one, two, one, 0 * one)

    def ops(form):
        o, records = kda_verify(*tokens_of(x), *constants, states, 0, rows, one, most=1, lower_bound=None,
                                implementation=form)  # fmt: skip
        return o, records.u, kda_commit(records, *constants, states, 0, which, lower_bound=None, implementation=form)

    with pltpu.force_tpu_interpret_mode(tpu.PLAIN):
        got = ops("tpu")
    for a, b in zip(got, ops("reference"), strict=True):
        assert golden.rel_rmse(a, b) <= 1e-6


def test_what_is_not_finite_stays_with_its_request():
    _, constants, states, _, records, which = mixed_case(jnp.float32, jnp.float32)
    for row, field in ((0, "k"), (1, "u")):
        broken = records._replace(**{field: getattr(records, field).at[row, 0].set(jnp.inf)})
        out = run_commit(broken, *constants, states, 0, which, lower_bound=None, interpret=tpu.PLAIN, tiles=TWO_ROWS)
        want = reference.commit(records, *constants, states, 0, which, lower_bound=None)
        mine, other = ([1, 9], [7, 10]) if row == 0 else ([7, 10], [1, 9])
        assert not np.isfinite(out[0, jnp.array(mine)]).all()
        assert golden.rel_rmse(out[0, jnp.array(other)], want[0, jnp.array(other)]) <= 1e-6


def test_tiles_that_do_not_fit_are_refused_with_their_size():
    with pytest.raises(ValueError, match=r"bytes of VMEM needed for 32 heads and 8 tokens, 1048576 may be used"):
        speculate_tiles(128, 32, 8, FP32, [FP32] * 4, [FP32] * 3, 1 << 20)


def test_tiles_count_each_input_and_record_in_its_own_dtype():
    tokens, records = [BF16] * 4, [FP32, BF16, BF16]
    narrow = speculate_tiles(128, 32, 4, FP32, tokens, records, 1 << 27)
    element = 2 * 8 * 4 * 32 * WIDTH * 2  # two more bytes of one operand, in two buffers
    for dtypes, more in (
        (([BF16, BF16, BF16, FP32], records), 1),
        (([BF16, BF16, FP32, BF16], records), 2),  # v, and with it the output
        ((tokens, [FP32] * 3), 2),
    ):
        assert speculate_tiles(128, 32, 4, FP32, *dtypes, 1 << 27).vmem - narrow.vmem == more * element
    assert speculate_tiles(128, 32, 16, FP32, [FP32] * 4, [FP32] * 3, VMEM_LIMIT).block < narrow.block


@pytest.mark.aot
def test_tokens_and_records_of_mixed_dtypes_compile():
    rows, heads, most = 8, 32, 12
    kept, row = (rows, most, heads, WIDTH), ((rows,), jnp.int32)

    def fn(*a):
        return commit_verify(*a[:9], RaggedRows(*a[9:12]), Records(*a[12:15]), Commit(*a[15:]), lower_bound=None)

    token = (rows * most, heads, WIDTH)
    tpu.compile_for(
        "tpu7x", fn, *[(token, x) for x in (BF16, BF16, FP32, FP32)], (token[:2], FP32), ((heads,), FP32),
        ((heads, WIDTH), FP32), ((2, 64, heads, WIDTH, WIDTH), FP32), ((), jnp.int32), row, row, row,
        *[(kept, FP32)] * 3, *[row] * 5, donate=(7,),
    )  # fmt: skip


SHAPES = [
    (128, 32, 4, jnp.float32, jnp.bfloat16),
    (256, 8, 8, jnp.bfloat16, jnp.bfloat16),
    (1, 1, 2, jnp.float32, jnp.float32),
    (9, 12, 4, jnp.float32, jnp.bfloat16),
    (16, 96, 4, jnp.bfloat16, jnp.bfloat16),
]


@pytest.mark.aot
@pytest.mark.parametrize(
    ("chip", "op", "rows", "heads", "most", "state", "activation"),
    tpu.across_chips((op, *shape) for op in ("verify", "commit", "commit_verify") for shape in SHAPES),
)
def test_it_compiles_in_place(chip, op, rows, heads, most, state, activation):
    count = rows * most
    token, row = ((count, heads, WIDTH), activation), ((rows,), jnp.int32)
    record = ((rows, most, heads, WIDTH), activation)
    pool = (4, 2 * rows + 65, heads, WIDTH, WIDTH)
    tokens = [*[token] * 4, ((count, heads), jnp.float32)]
    constants = [((heads,), jnp.float32), ((heads, WIDTH), jnp.float32), (pool, state), ((), jnp.int32)]
    records = [((rows, most, heads, WIDTH), jnp.float32), record, record]

    def fn(*a):
        if op == "verify":
            return verify(*a[:9], RaggedRows(*a[9:12]), a[12], most=most, lower_bound=None)
        if op == "commit":
            return commit(Records(*a[:3]), *a[3:7], Commit(*a[7:12]), lower_bound=None)
        return commit_verify(*a[:9], RaggedRows(*a[9:12]), Records(*a[12:15]), Commit(*a[15:]), lower_bound=None)

    arguments = {
        "verify": [*tokens, *constants, *[row] * 4],
        "commit": [*records, *constants, *[row] * 5],
        "commit_verify": [*tokens, *constants, *[row] * 3, *records, *[row] * 5],
    }[op]
    donated = {"verify": (), "commit": (5,), "commit_verify": (7,)}[op]
    compiled = tpu.compile_for(chip, fn, *arguments, donate=donated)
    bytes_of_pool = int(np.prod(pool)) * jnp.dtype(state).itemsize
    assert compiled.alias_bytes >= bytes_of_pool * bool(donated)
    assert compiled.temporary_bytes < bytes_of_pool / 2


def test_default_tiles_fit_for_every_number_of_heads():
    for heads in (1, 4, 8, 12, 32, 96):
        for rows in (1, 256):
            tiles = speculate_tiles(rows, heads, 8, FP32, [FP32] * 4, [FP32] * 3, VMEM_LIMIT)
            assert heads % tiles.heads == 0
