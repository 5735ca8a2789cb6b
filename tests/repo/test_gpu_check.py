"""The script for a GPU: its cases are sound, and without a card it says so."""

import functools
import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check"
parts = runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("op", ["decode", "verify", "commit", "commit_verify", "prefill"])
def test_two_forms_of_a_case_agree_and_the_pool_goes_round(op):
    case = parts["Case"](op, 2, 1 if op == "decode" else 3, 2, jnp.float32, 2 if op == "prefill" else 0)
    one, other = (jax.jit(functools.partial(case.call, form))(case.pool) for form in ("reference", "xla"))
    assert max(parts["_distance"](*pair) for pair in zip(one, other, strict=True)) < 1e-6
    assert one[-1].shape == case.pool.shape
    # The GPU form takes the same arguments and gives the same shapes.
    shapes = jax.eval_shape(functools.partial(case.call, "gpu"), case.pool)
    assert [(each.shape, each.dtype) for each in shapes] == [(each.shape, each.dtype) for each in one]


def test_the_convolution_is_a_case_too():
    case = parts["Convolution"](2, 3, 1, jnp.float32)
    one = jax.jit(functools.partial(case.call, "reference"))(case.pool)
    shapes = jax.eval_shape(functools.partial(case.call, "gpu"), case.pool)
    assert [(each.shape, each.dtype) for each in shapes] == [(each.shape, each.dtype) for each in one]


def test_nan_is_not_right():
    assert not parts["_distance"](jnp.full(2, jnp.nan), jnp.ones(2)) <= 1


def test_without_a_card_it_says_so():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "no Hopper card" in ended.stderr
