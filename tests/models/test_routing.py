"""Expert choice agrees with the golden routing file, groups included."""

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.models.routing import combine_matrix, route
from tests.kernels import golden

CASES = {
    "kimi_linear": {"top_k": 8, "scaling": 2.446},
    "kimi_linear_biased_weights": {"top_k": 8, "scaling": 2.446, "biased_weights": True},
    "k3": {"top_k": 16, "scaling": 1.0},
    "grouped": {"top_k": 4, "scaling": None, "groups": 8, "groups_kept": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_ids_and_weights(case):
    file = golden.load("moe_routing")
    options = dict(CASES[case])
    want_ids, want = file[f"{case}_ids"], file[f"{case}_weights"]
    if options["scaling"] is None:
        options["scaling"] = float(want.sum(1).mean())
    ids, weights = route(jnp.asarray(file["logits"]), jnp.asarray(file["bias"]), renormalize=True, **options)
    order = np.argsort(ids, axis=1)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(ids), order, 1), want_ids)
    np.testing.assert_allclose(np.take_along_axis(np.asarray(weights), order, 1), want, rtol=2e-6)
    dense = combine_matrix(ids, weights, 32)
    np.testing.assert_allclose(dense.sum(1), weights.sum(1), rtol=1e-6)
    assert int((np.asarray(dense) != 0).sum()) == ids.size
