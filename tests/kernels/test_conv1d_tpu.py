"""The TPU kernel of the short convolution, interpreted, against the reference and the golden file.

One compiled program serves all tests but the one that looks for races: steps of 320 tokens and 136 rows, columns of
channels two at a time with one left over.
"""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv.chipless.targets import compiler_installed
from pallas_kernels.conv1d import causal_conv1d, reference, tpu
from pallas_kernels.rows import RaggedRows
from tests.kernels import golden
from tests.kernels.races import races_found
from tests.kernels.tpu import CHECKED

TOKENS, ROWS, EMISSIONS, SLOTS, LAYERS, CHANNELS = 320, 136, 2, 200, 2, 384
REPEATS = CHANNELS // 24  # the golden file has 24 channels
# Half the time to compile; each program runs a few times.
QUICK = {"xla_backend_optimization_level": 0}


class Step:
    """A step of fixed shape under construction: absent rows, NaN in all slack and in every slot."""

    def __init__(self, tokens=TOKENS, rows=ROWS, channels=CHANNELS, seed=0):
        self.rng = np.random.default_rng(seed)
        self.x = np.full((tokens, channels), np.nan, np.float32)
        self.weight = self.rng.normal(size=(4, channels)).astype(np.float32)
        self.states = np.full((LAYERS, SLOTS, 3, channels), np.nan, np.float32)
        # Fields of absent rows mean nothing.
        self.offset, self.start, self.read, self.write = self.rng.integers(0, SLOTS, (4, rows))
        self.length = np.zeros(rows, np.int64)
        self.position, self.slot = self.rng.integers(0, SLOTS, (2, rows, EMISSIONS))
        self.count = self.end = self.used = 0

    def add(self, length, gap=0, fresh=True, keep=True, emit=(), x=None, history=None):
        """Append a row; returns (its offset, its write slot)."""
        row, self.count = self.count, self.count + 1
        channels = self.x.shape[1]
        self.offset[row], self.length[row] = self.end + gap, length
        self.end += gap + length
        x = self.rng.normal(size=(length, channels)) if x is None else x
        self.x[self.offset[row] : self.end] = jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)
        self.start[row] = 0 if fresh else 100 + row
        self.read[row] = 0 if fresh else self._new_slot()
        if not fresh:
            history = self.rng.normal(size=(3, channels)) if history is None else history
            self.states[1, self.read[row]] = jnp.asarray(history, jnp.bfloat16).astype(jnp.float32)
        # A row may write the slot it reads.
        self.write[row] = 0 if not keep else self.read[row] if not fresh and row % 2 else self._new_slot()
        for i in range(EMISSIONS):
            self.position[row, i] = self.start[row] + emit[i] if i < len(emit) else 0
            self.slot[row, i] = self._new_slot() if i < len(emit) else 0
        return self.offset[row], self.write[row]

    def _new_slot(self):
        self.used += 1
        return self.used

    def arguments(self, dtype=jnp.float32):
        i32 = functools.partial(jnp.asarray, dtype=jnp.int32)
        return (
            jnp.asarray(self.x, dtype), jnp.asarray(self.weight), jnp.asarray(self.states, dtype), i32(1),
            RaggedRows(i32(self.offset), i32(self.length), i32(self.start)), i32(self.read), i32(self.write),
            i32(self.position), i32(self.slot),
        )  # fmt: skip


@pytest.fixture(scope="module")
def kernel():
    """The kernel on the shapes above."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu, "UNROLL", 2)
        patch.setattr(tpu, "_ACROSS", 2)
        patch.setattr(tpu, "ABREAST", 2)
        run = functools.partial(tpu.causal_conv1d, interpret=True)
        yield jax.jit(run).lower(*Step().arguments()).compile(compiler_options=QUICK)


@pytest.fixture(scope="module")
def plain():
    return jax.jit(reference.causal_conv1d).lower(*Step().arguments()).compile()


def check(kernel, plain, step):
    """Runs both; outputs agree, saved histories are equal to the bit, NaN stays where nothing was written."""
    (y, states), (want, kept) = kernel(*step.arguments()), plain(*step.arguments())
    np.testing.assert_allclose(y, want, atol=2e-6, rtol=2e-6)
    np.testing.assert_array_equal(states, kept)
    covered = np.zeros(len(step.x), bool)
    for offset, length in zip(step.offset[: step.count], step.length[: step.count], strict=True):
        covered[offset : offset + length] = True
    assert np.isfinite(y[covered]).all() and (y[~covered] == 0).all()
    return np.asarray(y), np.asarray(states)


def test_rows_shorter_than_the_history_match_the_golden_file(kernel):
    file = golden.load("causal_conv1d")
    wide = functools.partial(np.tile, reps=REPEATS)
    step, cu = Step(), file["cu_seqlens"]
    step.weight = wide(file["weight"].T)
    slots = []
    for i, has in enumerate(file["has_initial_state"]):
        slots.append(step.add(cu[i + 1] - cu[i], fresh=not has, x=wide(file["x"][cu[i] : cu[i + 1]]))[1])
        if has:
            step.states[1, step.read[i]] = wide(file["initial_state"][i].T)
    y, states = kernel(*step.arguments())
    assert golden.rel_rmse(y[: cu[-1]], wide(file["y"])) <= 1e-6
    np.testing.assert_array_equal(y[cu[-1] :], 0)
    for i, slot in enumerate(slots):
        if cu[i + 1] > cu[i]:
            np.testing.assert_array_equal(states[1, slot], wide(file["final_state"][i].T))
    assert np.isnan(states[:, 0]).all() and np.isnan(states[0]).all()


def test_decode_matches_the_golden_file(kernel):
    file = golden.load("causal_conv1d")
    wide = functools.partial(np.tile, reps=REPEATS)
    step = Step()
    step.weight = wide(file["weight"].T)
    slots = []
    for x, history in zip(file["decode_x"], file["decode_state_in"], strict=True):
        slots.append(step.add(1, fresh=False, x=wide(x[None]))[1])
        step.states[1, step.read[step.count - 1]] = wide(history.T)
    y, states = kernel(*step.arguments())
    assert golden.rel_rmse(y[:4], wide(file["decode_y"])) <= 1e-6
    for slot, history in zip(slots, file["decode_state_out"], strict=True):
        np.testing.assert_array_equal(states[1, slot], wide(history.T))


def test_ragged_lengths_at_unaligned_offsets(kernel, plain):
    step = Step()
    for length, gap, emit in (
        (64, 0, (1, 64)), (0, 0, ()), (1, 3, (1,)), (2, 1, (1, 2)), (3, 0, (2,)), (63, 5, (31, 32)), (65, 0, (3, 64)),
        (1, 0, ()), (33, 14, (1, 2)), (2, 14, (2,)),
    ):  # fmt: skip
        step.add(length, gap, fresh=length % 2 == 0, emit=emit)
    check(kernel, plain, step)


def test_many_rows_of_one_token_keep_their_order_through_the_ring(kernel, plain):
    """Five groups of nothing else, with rows in between that read nothing, keep nothing or are absent."""
    step = Step()
    for row in range(134):
        step.add(int(row % 13 != 0), gap=row % 7 == 3, fresh=row % 5 == 0, keep=row % 11 != 0)
    assert step.end > 128
    check(kernel, plain, step)


def test_a_step_of_decodes_and_a_prefill(kernel, plain):
    step = Step()
    for row in range(70):
        step.add(1, fresh=False, emit=(1,) if row % 3 == 0 else ())
    step.add(200, fresh=False, emit=(58, 128))
    check(kernel, plain, step)


def test_nothing_to_do_leaves_everything_alone(kernel, plain):
    y, states = check(kernel, plain, Step())
    assert (y == 0).all() and np.isnan(states).all()


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_random_batches_equal_the_reference(kernel, plain, data):
    step = Step(seed=data.draw(st.integers(0, 1000)))
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 3, 4, 17, 29, 32, 64, 65]), min_size=1, max_size=24))
    for length in lengths:
        gap = data.draw(st.sampled_from([0, 0, 0, 1, 2, 30]))
        if step.end + gap + length > TOKENS:
            break
        emit = data.draw(st.lists(st.integers(-1, 70), max_size=2, unique=True))
        step.add(length, gap, fresh=data.draw(st.booleans()), keep=data.draw(st.booleans()), emit=emit)
    check(kernel, plain, step)


@settings(max_examples=4, deadline=None)
@given(cut=st.integers(1, 99), lead=st.integers(0, 40), seed=st.integers(0, 100))
def test_decode_after_a_prefill_continues_it_to_the_bit(kernel, cut, lead, seed):
    x = np.random.default_rng(seed).normal(size=(100, CHANNELS))
    uncut = Step()
    at, slot = uncut.add(100, x=x)
    y, states = (np.asarray(a) for a in kernel(*uncut.arguments()))

    first = Step()
    begin, kept = first.add(cut, gap=lead, x=x[:cut])
    head, left = (np.asarray(a) for a in kernel(*first.arguments()))
    then = Step()
    then.add(1, fresh=False)
    resumed, final = then.add(100 - cut, fresh=False, x=x[cut:], history=left[1, kept])
    tail, end = (np.asarray(a) for a in kernel(*then.arguments()))
    np.testing.assert_array_equal(head[begin : begin + cut], y[at : at + cut])
    np.testing.assert_array_equal(tail[resumed : resumed + 100 - cut], y[at + cut : at + 100])
    np.testing.assert_array_equal(end[1, final], states[1, slot])


def test_no_races_and_no_uninitialised_memory_in_bf16(monkeypatch):
    """One group a grid step here, groups of every kind among them; the last tile is a short one."""
    step = Step(tokens=100, rows=24, channels=128)
    for row in range(20):
        step.add(1, fresh=row % 3 == 0, emit=(1,) if row % 4 == 0 else ())
    for length, gap in ((40, 0), (2, 0), (1, 0), (3, 34)):
        step.add(length, gap, fresh=length % 2 == 0, emit=(1, 30))
    assert step.end == 100
    monkeypatch.setattr(tpu, "ABREAST", 2)
    arguments = step.arguments(jnp.bfloat16)
    run = functools.partial(tpu.causal_conv1d, interpret=CHECKED)
    y, states = jax.jit(run).lower(*arguments).compile(compiler_options=QUICK)(*arguments)
    want, kept = jax.jit(reference.causal_conv1d)(*arguments)
    assert not races_found()
    assert golden.rel_rmse(y, want) <= 2e-3  # one rounding to bf16 apart, here and there
    np.testing.assert_array_equal(states.astype(jnp.float32), kept.astype(jnp.float32))


def test_shapes_it_has_no_code_for_are_refused_by_name_and_left_to_the_reference(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    narrow = Step(tokens=8, rows=2, channels=24).arguments()
    with pytest.raises(ValueError, match="multiples of 128, not 24"):
        causal_conv1d(*narrow, implementation="tpu")
    assert "pallas_call" not in str(jax.make_jaxpr(causal_conv1d)(*narrow))
    assert "pallas_call" in str(jax.make_jaxpr(causal_conv1d)(*Step(tokens=8, rows=2, channels=128).arguments()))


def test_more_channels_than_vector_memory_holds_are_refused_with_their_bytes():
    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def why(channels, dtype):
        shapes = shape(dtype, 512, channels), shape(jnp.float32, 4, channels), shape(dtype, 2, 9, 3, channels)
        found = []
        jax.eval_shape(lambda *given: found.append(tpu.refusal(*given)), *shapes)
        return found[0]

    assert why(24576, jnp.float32) is None and why(49152, jnp.bfloat16) is None
    assert re.match(r"\d+ bytes of VMEM needed for 49152 channels of float32 with histories of float32, 62914560 may",
                    why(49152, jnp.float32))  # fmt: skip


@pytest.mark.aot
@pytest.mark.skipif(not compiler_installed(), reason="libtpu is not installed (extra aot)")
def test_it_compiles_for_every_chip_and_copies_no_pool():
    """A pool held in columns of 128 channels, eight of them or a multiple, is updated in place."""
    script = """
import jax, jax.numpy as jnp
from hybrid_kv.chipless.compile import compile_for
from pallas_kernels.conv1d import tpu
from pallas_kernels.rows import RaggedRows
shape = jax.ShapeDtypeStruct
def run(x, weight, pool, *rest):
    y, flat = tpu.causal_conv1d(x, weight, pool.reshape(*pool.shape[:3], -1), *rest)
    return y, flat.reshape(pool.shape)
for chip, channels, tokens, dtype in (
    ("v5e", 3072, 2048, "bfloat16"), ("v5p", 12288, 512, "bfloat16"), ("v6e", 1024, 128, "float32"),
    ("tpu7x", 12288, 2048, "float32"), ("tpu7x", 24576, 528, "float32"),
):
    rows = [shape((8,), jnp.int32) for _ in range(3)]
    slots = [shape((8,), jnp.int32)] * 2 + [shape((8, 2), jnp.int32)] * 2
    pool = shape((4, 1024, 3, channels // 128, 128), dtype)
    found = compile_for(chip, run, shape((tokens, channels), dtype), shape((4, channels), jnp.float32), pool,
                        shape((), jnp.int32), RaggedRows(*rows), *slots, donate=(2,))
    assert found.temporary_bytes < 1 << 20, found
    print(chip, found.alias_bytes >= pool.size * jnp.dtype(dtype).itemsize)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["v5e", "True", "v5p", "True", "v6e", "True", "tpu7x", "True", "tpu7x", "True"]
