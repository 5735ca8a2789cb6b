"""A mixture of experts gives the same output whatever group of devices its experts are spread over."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hybrid_kv.errors import UserError
from hybrid_kv.models.axes import TENSOR
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.ffn import MoeFfn, expert_weights
from hybrid_kv.models.parameters import check_mesh, inventory
from hybrid_kv.models.published import named
from tests.models.harness import mesh_of

WHOLE = ("data", *TENSOR)


@cache
def weights(name: str) -> tuple[KimiLinearConfig, dict[str, np.ndarray]]:
    """One layer of a tiny model."""
    config, rng = KimiLinearConfig.from_dict(named(name)), np.random.default_rng(0)
    table = {path.removeprefix("moe."): x.shape[1:] for path, x in inventory(config).items() if path.startswith("moe.")}
    scaled = {path: rng.normal(size=shape) * shape[-1] ** -0.5 for path, shape in table.items()}
    return config, {path: x.astype(np.float32) for path, x in scaled.items()}


def moe(name: str, x: np.ndarray, axes: tuple[str, ...], grown: float = 1, **mesh: int) -> np.ndarray:
    """Output for tokens [data * T, D], of which each replica has T. grown: factor of the experts' output."""
    config, params = weights(name)
    params = params | {"expert_down": params["expert_down"] * np.float32(grown)}
    config, placed = dataclasses.replace(config, expert_axes=axes), mesh_of(**mesh)
    check_mesh(config, placed.shape)
    specs = {path.removeprefix("moe."): P(*e.spec[1:]) for path, e in inventory(config).items() if path[:4] == "moe."}
    params = {path: jax.device_put(x, NamedSharding(placed, specs[path])) for path, x in params.items()}

    def layer(params, x):
        stacks = expert_weights(config, {path: w[None] for path, w in params.items()})
        return MoeFfn(config, params)(x, stacks, jnp.int32(0))

    run = jax.shard_map(
        layer, mesh=placed,
        in_specs=(specs, P("data")), out_specs=(P("data"), P("data")), check_vma=False,
    )  # fmt: skip
    y, margin = jax.jit(run)(params, jnp.asarray(x))
    assert margin.shape == x.shape[:1]
    return np.asarray(y)


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear"])
def test_every_replica_gets_the_sums_of_its_own_tokens(name):
    x = np.random.default_rng(1).normal(size=(12, 64)).astype(np.float32)
    want = moe(name, x, TENSOR)
    for axes, mesh in [(TENSOR, {"data": 2, "model": 2, "dcp": 2}), (WHOLE, {"data": 2, "model": 2, "dcp": 2}),
                       (WHOLE, {"data": 4, "dcp": 2})]:  # fmt: skip
        np.testing.assert_allclose(moe(name, x, axes, **mesh), want, atol=2e-5 * np.abs(want).max())


def test_the_latent_sum_is_complete_before_its_norm():
    """A larger output of all experts leaves the normed latent as it is, on any number of ranks."""
    x = np.random.default_rng(2).normal(size=(12, 64)).astype(np.float32)
    once, grown = moe("tiny-k3", x, TENSOR, model=2, dcp=2), moe("tiny-k3", x, TENSOR, 64, model=2, dcp=2)
    np.testing.assert_allclose(grown, once, atol=1e-3 * np.abs(once).max())
    assert np.abs(moe("tiny-kimi-linear", x, TENSOR, 64, model=2, dcp=2)).max() > 10 * np.abs(once).max()


def test_experts_have_to_divide_over_their_group_and_the_group_is_one_of_two():
    config = dataclasses.replace(weights("tiny-k3")[0], expert_axes=WHOLE)
    check_mesh(config, {"data": 2, "model": 4, "dcp": 2})
    with pytest.raises(UserError, match=r"num_experts: got 16; must be a multiple of data \* model \* dcp = 32"):
        check_mesh(config, {"data": 4, "model": 4, "dcp": 2})
    with pytest.raises(UserError, match="name its axes data"):
        check_mesh(config, {"model": 4, "dcp": 2})
    with pytest.raises(UserError, match="expert_axes"):
        dataclasses.replace(config, expert_axes=("data",))
