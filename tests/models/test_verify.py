"""A verify step gives the logits of plain decoding, and its commit the states after the tokens that stand."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hybrid_kv.models.axes import TENSOR
from hybrid_kv.models.batch import RecurrentInputs
from hybrid_kv.models.kimi_linear import KimiLinear
from hybrid_kv.models.parameters import partition_specs
from tests.models.harness import CACHE_SPECS, QUICK, Runner
from tests.models.test_bits_do_not_depend_on_the_cut import loaded, prompts

MOST, CONTEXT, ROWS = 4, 70, 4
ACCEPTED = (4, 1, 2, 0)  # the last row is absent


@cache
def _verified(mesh):
    config, _, devices = loaded(*mesh)

    @partial(jax.jit, compiler_options=QUICK)
    @partial(
        jax.shard_map, mesh=devices, in_specs=(dict(partition_specs(config).parameters), P(), CACHE_SPECS, P()),
        out_specs=(P(None, TENSOR), CACHE_SPECS), check_vma=False,
    )  # fmt: skip
    def step(params, batch, caches, accepted):
        model = KimiLinear(config, params)
        logits, caches, pending = model.verify(batch, caches, most=MOST)
        return logits, model.commit(batch, caches, pending, accepted)

    return step


def _runner(mesh):
    run = Runner(*loaded(*mesh), rows=ROWS, capacity=128, quick=True)
    run.run(run.batch([p[:CONTEXT] for p in prompts()], [0] * ROWS, pad_to=384))
    return run


def _after(run, accepted):
    """Logits of the next tokens, from the states and rows that are there."""
    pieces = [p[CONTEXT + n : CONTEXT + n + 1] if n else [] for p, n in zip(prompts(), accepted, strict=True)]
    return run.run(run.batch(pieces, [CONTEXT + n for n in accepted], pad_to=ROWS))


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
def test_whatever_stands_the_rest_goes_on_as_if_decoded_one_by_one(mesh):
    plain, drafted = _runner(mesh), _runner(mesh)
    wanted = {}
    for i in range(MOST):
        here = [n > i for n in ACCEPTED]
        pieces = [p[CONTEXT + i : CONTEXT + i + 1] if on else [] for p, on in zip(prompts(), here, strict=True)]
        logits = plain.run(plain.batch(pieces, [CONTEXT + i] * ROWS, pad_to=ROWS))
        for at, row in enumerate(row for row, on in enumerate(here) if on):
            wanted[row, i] = logits[at]
    # Tokens that stand, then drafts that do not.
    pieces = [
        p[CONTEXT : CONTEXT + n] + [(t + 1) % 500 for t in p[CONTEXT + n : CONTEXT + MOST]] if n else []
        for p, n in zip(prompts(), ACCEPTED, strict=True)
    ]
    batch = drafted.batch(pieces, [CONTEXT] * ROWS, pad_to=16)
    logits, drafted.caches = _verified(mesh)(drafted.params, batch, drafted.caches, jnp.asarray(ACCEPTED, jnp.int32))
    logits, offset = np.asarray(logits), np.cumsum([0] + [len(piece) for piece in pieces])
    for (row, i), expected in wanted.items():
        np.testing.assert_allclose(logits[offset[row] + i], expected, atol=1e-5)
    np.testing.assert_allclose(_after(drafted, ACCEPTED), _after(plain, ACCEPTED), atol=1e-5)


def test_saves_inside_the_accepted_tokens_are_the_states_there():
    """However many of them; others are not made."""
    run, plain = _runner((1, 1)), _runner((1, 1))
    pieces = [p[CONTEXT : CONTEXT + MOST] for p in prompts()]
    places = (2, 3)
    emit = [(row, e, CONTEXT + after) for row in range(ROWS) for e, after in enumerate(places)]
    batch = run.batch(pieces, [CONTEXT] * ROWS, pad_to=16, emit=emit)
    accepted = np.array(ACCEPTED, np.int32)
    before = np.asarray(run.caches.kda)
    _, run.caches = _verified((1, 1))(run.params, batch, run.caches, jnp.asarray(accepted))
    plain.run(plain.batch([p[:3] for p in pieces], [CONTEXT] * ROWS, pad_to=16, emit=emit))
    slots: RecurrentInputs = batch.recurrent
    for row, n in enumerate(accepted):
        own = int(slots.write[row])
        for e, after in enumerate(places):
            saved = int(slots.emit_slot[row, e])
            if n >= after:
                np.testing.assert_allclose(run.caches.kda[:, saved], plain.caches.kda[:, saved], atol=1e-5)
                np.testing.assert_allclose(run.caches.conv[:, saved], plain.caches.conv[:, saved], atol=1e-5)
            else:
                np.testing.assert_array_equal(run.caches.kda[:, saved], before[:, saved])
        if n == 0:
            np.testing.assert_array_equal(run.caches.kda[:, own], before[:, own])
