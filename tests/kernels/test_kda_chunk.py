"""Chunk terms agree with the golden intermediates, and a saved state may sit at any row of a chunk."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda.chunk import chunk_terms, matmul, segment_masks, state_after
from tests.kernels import golden


def test_every_intermediate_of_a_chunk():
    file = {name: jnp.asarray(x) for name, x in golden.load("kda_chunk_intermediates").items()}
    g, beta = file["log_decay"], file["beta"]
    terms = chunk_terms(file["q_norm"] * file["scale"], file["k_norm"], file["v"], g, beta)
    u = terms.u0 - matmul(terms.w, file["S_in"])
    o = matmul(terms.q_decayed, file["S_in"]) + matmul(terms.a_qk, u)
    after = terms.decay[..., None] * file["S_in"] + matmul(jnp.swapaxes(terms.kg, 1, 2), u)
    got = {"Aqk": terms.a_qk, "w": terms.w, "u0": terms.u0, "kg": terms.kg, "u": u, "o": o, "S_out": after}
    for name, value in got.items():
        assert golden.rel_rmse(value, file[name]) <= 1e-6, name
    whole = state_after(jnp.array([64]), file["S_in"][None], file["k_norm"][None], g[None], u[None])[0]
    assert golden.rel_rmse(whole, file["S_out"]) <= 1e-6


def test_segment_sums_rebuild_every_decay_of_a_pair():
    g = np.random.default_rng(0).normal(size=16)
    big_g = np.cumsum(g)
    *levels, up_to, behind = segment_masks(16) @ g
    np.testing.assert_allclose(up_to, big_g, atol=1e-12)
    np.testing.assert_allclose(behind, big_g[-1] - big_g, atol=1e-12)
    for i in range(16):
        for j in range(i):
            level = levels[(i ^ j).bit_length() - 1]
            assert np.isclose(level[i] + level[j], big_g[i] - big_g[j])


def test_a_chunk_that_is_no_power_of_two_is_refused():
    x = jnp.ones((48, 4))
    with pytest.raises(ValueError, match="power of two"):
        chunk_terms(x, x, x, x, jnp.ones(48))
