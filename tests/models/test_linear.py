"""Projections of odd widths: right, and the same bits for a token in any number of rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.models.linear import project, project_heads
from pallas_kernels.sums import steady_sum


@pytest.mark.parametrize("width", [1, 2, 15, 17, 24, 33, 49, 65])
def test_a_row_does_not_depend_on_its_company(width):
    rng = np.random.default_rng(width)
    x, w = rng.normal(size=(70, 32)).astype(np.float32), rng.normal(size=(width, 32)).astype(np.float32)
    whole = np.asarray(project(jnp.asarray(x), jnp.asarray(w)))
    np.testing.assert_allclose(whole, x @ w.T, atol=1e-5)
    for rows in (1, 8, 17, 48):
        np.testing.assert_array_equal(project(jnp.asarray(x[:rows]), jnp.asarray(w)), whole[:rows])
    heads = rng.normal(size=(70, 3, 32)).astype(np.float32)
    weights = rng.normal(size=(3, 32, width)).astype(np.float32)
    whole = np.asarray(project_heads(jnp.asarray(heads), jnp.asarray(weights)))
    np.testing.assert_allclose(whole, np.einsum("tnd,ndl->tnl", heads, weights), atol=1e-5)
    for rows in (1, 8, 17, 48):
        np.testing.assert_array_equal(project_heads(jnp.asarray(heads[:rows]), jnp.asarray(weights)), whole[:rows])


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 7, 16, 31])
def test_steady_sums_of_any_size(size):
    x = np.random.default_rng(size).normal(size=(4, size)).astype(np.float32)
    np.testing.assert_allclose(steady_sum(jnp.asarray(x)), x.sum(1, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(steady_sum(jnp.asarray(x.T), axis=0), x.T.sum(0, keepdims=True), atol=1e-5)
