"""KDA over a mesh of eight devices, heads split over model x dcp: kernels need nothing from one another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import reference
from pallas_kernels.kda.tpu.decode import decode
from pallas_kernels.kda.tpu.prefill import prefill
from tests.kernels import golden
from tests.kernels.kda_oracle import random_inputs, rows_of

HEADS, WIDTH, TOKENS = 8, 128, 70
SPLIT = ("model", "dcp")
OPTIONS = {"lower_bound": -5.0}


def arguments(tokens):
    """Inputs of packed tokens, and two layers of a pool whose free slots are NaN."""
    x = random_inputs(2, tokens, HEADS, WIDTH, WIDTH)
    states = np.random.default_rng(2).normal(size=(2, 6, HEADS, WIDTH, WIDTH))
    states[:, [0, 4, 5]] = np.nan
    names = ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")
    return [jnp.asarray(x[name]) for name in names] + [jnp.asarray(states, jnp.float32), jnp.int32(1)]


def numbers(*each):
    return [jnp.asarray(one, jnp.int32) for one in each]


def assert_equal_on_a_mesh(kernel, plain, given):
    """The kernel on every device's heads gives what the reference gives for all of them."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), SPLIT)
    per_token, per_head = (P(None, SPLIT),) * 5, (P(SPLIT),) * 2
    specs = (*per_token, *per_head, P(None, None, SPLIT), *(jax.tree.map(lambda _: P(), tuple(given[8:]))))
    run = jax.shard_map(
        functools.partial(kernel, interpret=True, **OPTIONS),
        mesh=mesh, in_specs=specs, out_specs=(P(None, SPLIT), P(None, None, SPLIT)), check_vma=False,
    )  # fmt: skip
    got, wanted = jax.jit(run)(*given), jax.jit(functools.partial(plain, **OPTIONS))(*given)
    for one, other in zip(got, wanted, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        assert golden.rel_rmse(np.nan_to_num(one), np.nan_to_num(other)) <= 1e-6


def test_decode():
    active = jnp.array([True, False, True])
    assert_equal_on_a_mesh(decode, reference.decode, [*arguments(3), active, *numbers([1, 0, 2], [4, 0, 2], [0, 0, 5])])


def test_prefill():
    rows = rows_of([0, 3, 0], [3, 66, 0], [9, 20, 0])
    slots = numbers([1, 2, 0], [1, 3, 0], [[11], [64], [0]], [[4], [5], [0]])
    given = [*arguments(TOKENS), rows, *slots]
    assert_equal_on_a_mesh(functools.partial(prefill, chunk=64), functools.partial(reference.prefill, chunk=64), given)
