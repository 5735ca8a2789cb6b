"""Experts, the reference: the contract, and bits that depend on nothing but the token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.models.linear import project
from pallas_kernels.experts import SILU, ExpertWeights, expert_ffn, situ
from pallas_kernels.experts.reference import product
from tests.kernels.experts_cases import random_experts, routing, truth
from tests.kernels.golden import load, rel_rmse

LAYERS, LOCAL, WIDTH, HIDDEN, TOTAL = 2, 3, 128, 128, 12
EXPERTS = random_experts(0, LAYERS, LOCAL, WIDTH, HIDDEN)


def tokens(count: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, HIDDEN)).astype(np.float32), *routing(rng, count, 4, TOTAL)


@pytest.mark.parametrize("form", ["plain", "packed", "native"])
@pytest.mark.parametrize("activation", [SILU, situ(4.0, 25.0), situ(1.0)])
def test_reference_gives_the_contract(form, activation):
    x, ids, weights = tokens(9)
    got = jax.jit(lambda *a: expert_ffn(*a, activation=activation))(
        x, ids, weights, EXPERTS.forms[form], jnp.int32(1), jnp.int32(4)
    )
    assert rel_rmse(got, truth(x, ids, weights, EXPERTS, 1, 4, activation)) < 1e-6


def test_situ_is_that_of_the_golden_file():
    file = load("misc_ops")
    gate, up = file["situ_gate"], file["situ_up"]
    for activation, name in ((situ(4.0, 25.0), "situ_beta4_linear25"), (situ(1.0), "situ_beta1_nolinear")):
        for form in (activation, activation.plain):
            assert rel_rmse(form(jnp.asarray(gate), jnp.asarray(up)), file[name]) < 1e-6


def test_bits_do_not_depend_on_the_other_tokens_given_such_a_product():
    x, ids, weights = tokens(48, 1)
    plain = EXPERTS.forms["plain"]
    experts = ExpertWeights(*(w.astype(jnp.float32) for w in plain))

    @jax.jit
    def run(x, ids, weights):
        return expert_ffn(x, ids, weights, experts, 0, 3, activation=SILU, product=project)

    whole = run(x, ids, weights)
    for part in (slice(0, 1), slice(5, 22)):
        np.testing.assert_array_equal(run(x[part], ids[part], weights[part]), whole[part])


def test_reference_is_the_loop_over_experts_to_the_bit():
    """Rounded as a model in that dtype rounds: shares, products, activation and the sum after each expert."""
    x, ids, weights = tokens(7, 2)
    x = jnp.asarray(x, jnp.bfloat16)
    gate, up, down = (w[0] for w in EXPERTS.forms["plain"])

    @jax.jit
    def loop(x, ids, weights):
        routed = jnp.zeros_like(x)
        for e in range(LOCAL):
            share = jnp.sum(jnp.where(ids == 3 + e, weights, 0.0), axis=1).astype(x.dtype)
            hidden = jax.nn.silu(product(x, gate[e])) * product(x, up[e])
            routed = routed + share[:, None] * product(hidden, down[e])
        return routed

    got = jax.jit(lambda *a: expert_ffn(*a, EXPERTS.forms["plain"], 0, 3, activation=SILU))(x, ids, weights)
    np.testing.assert_array_equal(got.astype(jnp.float32), loop(x, ids, weights).astype(jnp.float32))


def test_nothing_to_do():
    x, ids, weights = map(jnp.asarray, tokens(4))
    none = EXPERTS.forms["plain"]
    assert expert_ffn(x[:0], ids[:0], weights[:0], none, 0, 0, activation=SILU).shape == (0, HIDDEN)
    np.testing.assert_array_equal(expert_ffn(x, ids[:, :0], weights[:, :0], none, 0, 0, activation=SILU), 0)
    np.testing.assert_array_equal(expert_ffn(x, ids, weights, none, 0, 100, activation=SILU), 0)


@pytest.mark.parametrize(("name", "bounds"), [("beta", (0.0,)), ("linear_beta", (4.0, -1.0))])
def test_bounds_that_are_none_are_refused(name, bounds):
    with pytest.raises(ValueError, match=f"{name}: got"):
        situ(*bounds)
