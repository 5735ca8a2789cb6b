"""KDA over a mesh of eight devices, heads split over model x dcp: kernels need nothing from one another."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
# Each program runs once.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def arguments(tokens):
    """Inputs of packed tokens, and two layers of a pool whose free slots are NaN."""
    x = random_inputs(2, tokens, HEADS, WIDTH, WIDTH)
    states = np.random.default_rng(2).normal(size=(2, 6, HEADS, WIDTH, WIDTH))
    states[:, [0, 4, 5]] = np.nan
    names = ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")
    return [jnp.asarray(x[name]) for name in names] + [jnp.asarray(states, jnp.float32), jnp.int32(1)]


def numbers(*each):
    return [jnp.asarray(one, jnp.int32) for one in each]


def decode_arguments():
    active = jnp.array([True, False, True])
    return [*arguments(3), active, *numbers([1, 0, 2], [4, 0, 2], [0, 0, 5])]


def prefill_arguments():
    rows = rows_of([0, 3, 0], [3, 66, 0], [9, 20, 0])
    return [*arguments(TOKENS), rows, *numbers([1, 2, 0], [1, 3, 0], [[11], [64], [0]], [[4], [5], [0]])]


# Kernels and what they are called with; imported by the process that looks for races as well.
DECODE = decode, decode_arguments
PREFILL = functools.partial(prefill, chunk=64), prefill_arguments


def eight_devices():
    return Mesh(np.array(jax.devices()).reshape(2, 4), SPLIT)


def on_a_mesh(kernel, given):
    """The kernel on every device's heads."""
    per_token, per_head = (P(None, SPLIT),) * 5, (P(SPLIT),) * 2
    specs = (*per_token, *per_head, P(None, None, SPLIT), *(jax.tree.map(lambda _: P(), tuple(given[8:]))))
    run = jax.shard_map(
        functools.partial(kernel, **OPTIONS),
        mesh=eight_devices(), in_specs=specs, out_specs=(P(None, SPLIT), P(None, None, SPLIT)), check_vma=False,
    )  # fmt: skip
    return jax.jit(run, compiler_options=QUICK)(*given)


@pytest.mark.parametrize(
    ("case", "plain"), [(DECODE, reference.decode), (PREFILL, functools.partial(reference.prefill, chunk=64))]
)
def test_each_device_gives_what_the_reference_gives_for_its_heads(case, plain):
    kernel, given = case[0], case[1]()
    got = on_a_mesh(functools.partial(kernel, interpret=True), given)
    wanted = jax.jit(functools.partial(plain, **OPTIONS), compiler_options=QUICK)(*given)
    for one, other in zip(got, wanted, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        assert golden.rel_rmse(np.nan_to_num(one), np.nan_to_num(other)) <= 1e-6


def test_eight_devices_at_once_race_nowhere_and_give_what_one_gives(repo_root):
    command = [sys.executable, "-m", "tests.kernels.mesh_with_checks"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["early read"] and not found["right"], "the detection has to work where it is relied on"
    assert not found["decode"] and not found["prefill"]
    assert found["decode error"] <= 1e-6 and found["prefill error"] <= 1e-6
