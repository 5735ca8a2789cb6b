"""Random ragged batches through the TPU prefill kernel, interpreted, equal the float64 recurrence.

All batches are padded to the shape of `test_kda_tpu_prefill`, so one program for each gate serves them all.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels import golden
from tests.kernels.kda_oracle import random_inputs, recurrence, rows_of
from tests.kernels.test_kda_tpu_prefill import HEADS, ROWS, SLOTS, TENSORS, TOKENS, WIDTH, part, run

CHUNK, EMISSIONS = 64, 4
# Shift of the raw gate: decays next to 1, of all strengths, next to 0.
SHIFTS = {"weak": -8.0, "mixed": 0.0, "strong": 12.0}


class Row(NamedTuple):
    """A row behind `gap` packed tokens of slack.

    Attributes:
      resumed: starts from a state in the pool, else from zeros.
      keeps: "no" state at its end, in the slot it was "read" from, or in a "new" slot.
      emissions: (tokens of the row before it, slot): "no" slot, a "new" one, or "again" that of the emission before it,
        or of the row's end.
    """

    length: int
    gap: int
    start: int
    resumed: bool
    keeps: str
    emissions: tuple[tuple[int, str], ...]


@st.composite
def ragged_rows(draw) -> list[Row]:
    """Rows that fit into the packed axis, zero-length ones and edges of chunks among them."""
    rows, free = [], TOKENS
    for _ in range(draw(st.integers(0, ROWS))):
        gap = draw(st.sampled_from([0, 0, 0, 1, 7, 16]))
        length = draw(st.one_of(st.sampled_from([0, 1, 63, 64, 65]), st.integers(2, 160)))
        if gap + length > free:
            break
        free -= gap + length
        start = draw(st.one_of(st.just(0), st.integers(1, 300), st.sampled_from([CHUNK, 3 * CHUNK - 1])))
        edges = [p - start for p in range(0, start + length + 1, CHUNK) if p > start] + [length]
        position = st.one_of(st.integers(1, max(length, 1)), st.sampled_from(edges))
        emissions = draw(
            st.lists(st.tuples(position, st.sampled_from(["no", "new", "new", "again"])), max_size=EMISSIONS)
        )
        rows.append(Row(length, gap, start, draw(st.booleans()), draw(st.sampled_from(["no", "read", "new"])),
                        tuple(emissions)))  # fmt: skip
    return rows


def check(rows: list[Row], lower_bound: float | None, strength: str, seed: int) -> None:
    """Runs a batch whose slack, null slot and unwritten slots are all NaN, and compares all that it should leave."""
    rng = np.random.default_rng(seed)
    slots = iter(rng.permutation(np.arange(1, SLOTS)))
    states = np.full((SLOTS, HEADS, WIDTH, WIDTH), np.nan, np.float32)
    x = random_inputs(seed, TOKENS, HEADS, WIDTH, WIDTH)
    x["raw_g"] += np.float32(SHIFTS[strength])
    offset = np.cumsum([row.gap + row.length for row in rows], dtype=int) - [row.length for row in rows]
    read, write = np.zeros((2, len(rows)), int)
    emit = np.zeros((2, len(rows), EMISSIONS), int)
    covered = np.zeros(TOKENS, bool)
    wanted = {}
    outputs = np.zeros(x["v"].shape)
    for i, row in enumerate(rows):
        here = slice(offset[i], offset[i] + row.length)
        covered[here] = True
        if row.resumed:
            read[i] = next(slots, 0)
        write[i] = {"no": 0, "read": read[i], "new": next(slots, 0)}[row.keeps]
        initial = np.zeros(states.shape[1:])
        if read[i]:
            initial = states[read[i]] = rng.normal(size=initial.shape)
        for j, (tokens, slot) in enumerate(row.emissions):
            before = emit[1, i, j - 1] if j else write[i] if row.keeps == "new" else 0
            emit[:, i, j] = row.start + tokens, {"no": 0, "new": next(slots, 0), "again": before}[slot]
        if row.length:
            outputs[here], after = recurrence(part(x, here.start, here.stop), initial, lower_bound)
            for position, slot in sorted(emit[:, i].T.tolist()):
                wanted[slot] = after[max(position - row.start, 0)]
            wanted[write[i]] = after[-1]
    for name in (*TENSORS, "raw_beta"):
        x[name][~covered] = np.nan
    fields = rows_of(offset, [row.length for row in rows], [row.start for row in rows])
    o, after = run(x, states, fields, read, write, emit, lower_bound=lower_bound, dtype=jnp.float32)
    np.testing.assert_array_equal(o[~covered], 0)
    if covered.any():
        assert golden.rel_rmse(o[covered], outputs[covered]) <= 1e-6
    wanted.pop(0, None)
    for slot, state in wanted.items():
        assert golden.rel_rmse(after[slot], state) <= 1e-6
    untouched = [slot for slot in range(SLOTS) if slot not in wanted]
    np.testing.assert_array_equal(after[untouched], states[untouched])


@settings(max_examples=200, deadline=None)
@given(
    rows=ragged_rows(), bounded=st.booleans(), strength=st.sampled_from(list(SHIFTS)), seed=st.integers(0, 2**32 - 1)
)
@example(
    rows=[Row(200, 0, 30, True, "new", ((34, "new"), (35, "again"), (60, "new"), (200, "new")))],
    bounded=True, strength="strong", seed=0,
)  # fmt: skip
def test_any_batch_equals_the_recurrence(rows, bounded, strength, seed):
    check(rows, -5.0 if bounded else None, strength, seed)
