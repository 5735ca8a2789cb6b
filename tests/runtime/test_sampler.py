"""Draws depend on logits, seed and position alone, on any mesh, and come from what top-k and top-p leave."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hybrid_kv.runtime.sampler import SamplingInputs, of_tokens, sample, standing
from hybrid_kv.sharding import TENSOR, MeshSpec
from pallas_kernels.rows import RaggedRows

ROWS, VOCABULARY = 64, 96


@functools.cache
def _step(mesh: MeshSpec):
    spread = jax.shard_map(
        sample, mesh=mesh.build(), in_specs=(P(None, TENSOR), P()), out_specs=P(), check_vma=False
    )  # fmt: skip
    return jax.jit(spread)


def _inputs(rows=ROWS, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    each = np.arange(rows, dtype=np.int32)
    full = functools.partial(np.full, rows)
    return SamplingInputs(
        full(temperature, np.float32), full(top_k, np.int32), full(top_p, np.float32), full(seed, np.int32), each
    )


ONE = MeshSpec()


def _draw(logits, inputs, mesh=ONE):
    return np.asarray(_step(mesh)(jnp.asarray(logits, jnp.float32), inputs))


def _kept(row, top_k, top_p, temperature=1.0):
    """What may be drawn, by sorting, in float64."""
    scaled = np.asarray(row, np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")[: top_k or len(row)]
    share = np.exp(scaled[order] - scaled.max())
    share /= share.sum()
    return set(order[np.cumsum(share) - share < top_p])


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(0).normal(size=(ROWS, VOCABULARY)) * 3


@pytest.mark.parametrize("mesh", [MeshSpec(model=2), MeshSpec(dcp=4), MeshSpec(model=2, dcp=4)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_the_mesh_does_not_show_in_draws(logits, mesh, temperature):
    inputs = _inputs(temperature=temperature, top_k=20, top_p=0.9, seed=5)
    np.testing.assert_array_equal(_draw(logits, inputs, mesh), _draw(logits, inputs))


def test_greedy_takes_the_first_of_equal_logits(logits):
    tied = np.round(logits)
    np.testing.assert_array_equal(_draw(tied, _inputs(temperature=0.0), MeshSpec(dcp=4)), tied.argmax(1))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (3, 1.0), (5, 0.7), (1, 1.0), (0, 0.05), (0, 1e-9), (200, 0.9)])
def test_draws_come_from_what_top_k_and_top_p_leave(logits, top_k, top_p):
    seen = [set() for _ in range(ROWS)]
    for seed in range(40):
        for row, token in enumerate(_draw(logits, _inputs(top_k=top_k, top_p=top_p, seed=seed), MeshSpec(model=2))):
            seen[row].add(int(token))
    for row, tokens in enumerate(seen):
        assert tokens <= _kept(logits[row], top_k, top_p)
    if top_k != 1 and top_p >= 0.5:
        assert sum(len(tokens) > 1 for tokens in seen) > ROWS // 4


def test_frequencies_follow_the_softmax():
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125] + [0.0] * 4, np.float64) + 1e-30)
    logits = np.tile(row, (4096, 1))
    tokens = _draw(logits, _inputs(rows=4096, seed=11), MeshSpec(dcp=2))
    share = np.bincount(tokens, minlength=8) / 4096
    np.testing.assert_allclose(share, np.exp(row), atol=0.03)


def test_greedy_rows_beside_drawn_ones_stay_greedy(logits):
    inputs = _inputs(top_k=10)._replace(temperature=np.where(np.arange(ROWS) % 2, 0.0, 1.0).astype(np.float32))
    np.testing.assert_array_equal(_draw(logits, inputs)[1::2], logits.argmax(1)[1::2])


def test_drafts_stand_up_to_the_first_that_was_not_drawn():
    length = np.array([4, 4, 3, 1, 0, 4], np.int32)
    rows = RaggedRows(np.cumsum(length).astype(np.int32) - length, length, length * 0 + 10)
    given = np.array([5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 9, 5, 6, 7, 8])
    drawn = np.array([6, 7, 8, 1, 6, 1, 8, 1, 6, 7, 1, 3, 1, 7, 8, 1])
    np.testing.assert_array_equal(standing(jnp.asarray(given), jnp.asarray(drawn), rows, 4), [4, 2, 3, 1, 0, 1])


def test_draws_behind_drafts_are_those_of_plain_steps(logits):
    """A token's draw has the seed of its row and its own position."""
    length = np.array([3, 1, 0, 2], np.int32)
    rows = RaggedRows(np.cumsum(length).astype(np.int32) - length, length, np.array([7, 20, 0, 4], np.int32))
    inputs = _inputs(rows=4, seed=0)._replace(seed=np.array([1, 2, 3, 4], np.int32))
    each = of_tokens(inputs, rows, 6)
    np.testing.assert_array_equal(each.seed, [1, 1, 1, 2, 4, 4])
    np.testing.assert_array_equal(each.position, [8, 9, 10, 21, 5, 6])
