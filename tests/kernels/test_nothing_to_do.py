"""Steps without rows or without tokens launch nothing, whatever the implementation."""

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels.conv1d import causal_conv1d
from pallas_kernels.kda import Commit, Records, kda_commit, kda_commit_verify, kda_decode, kda_prefill, kda_verify
from pallas_kernels.rows import RaggedRows

HEADS, WIDTH, MOST, CHANNELS = 2, 128, 3, 256
FORMS = pytest.mark.parametrize("form", ["tpu", "xla", "reference"])
SIZES = pytest.mark.parametrize(("tokens", "rows"), [(0, 2), (0, 0), (4, 0)])


def full(value, *shape, dtype=jnp.float32):
    return jnp.full(shape, value, dtype)


def arguments(tokens, rows):
    """Inputs of NaN, a pool of ones, rows of zeros."""
    wide, slots = full(jnp.nan, tokens, HEADS, WIDTH), full(0, rows, dtype=jnp.int32)
    token = [*[wide] * 4, full(jnp.nan, tokens, HEADS)]
    constants = [full(0.0, HEADS), full(0.0, HEADS, WIDTH), full(1.0, 1, 4, HEADS, WIDTH, WIDTH), 0]
    emit = [full(0, rows, 1, dtype=jnp.int32)] * 2
    records = Records(*[full(jnp.nan, rows, MOST, HEADS, WIDTH)] * 3)
    return token, constants, RaggedRows(*[slots] * 3), slots, emit, records, Commit(*[slots] * 5)


@FORMS
@SIZES
def test_kda_gives_zeros_and_the_pool_it_was_given(form, tokens, rows):
    token, constants, ragged, slots, emit, records, which = arguments(tokens, rows)
    how = {"lower_bound": None, "implementation": form}
    pool = constants[2]
    results = {
        "prefill": kda_prefill(*token, *constants, ragged, slots, slots, *emit, **how),
        "verify": kda_verify(*token, *constants, ragged, slots, most=MOST, **how),
    }
    if rows == 0:
        active = full(False, tokens, dtype=bool)
        if tokens == 0:
            results["decode"] = kda_decode(*token, *constants, active, *[slots] * 3, **how)
        assert kda_commit(records, *constants, which, **how) is pool
        results["commit and verify"] = kda_commit_verify(*token, *constants, ragged, records, which, **how)
    for name, (out, *_) in results.items():
        assert out.shape == (tokens, HEADS, WIDTH), name
        assert (out == 0).all(), name
    assert results["prefill"][1] is pool
    assert results["verify"][1].u.shape == (rows, MOST, HEADS, WIDTH)
    assert "decode" not in results or results["decode"][1] is pool
    assert rows or results["commit and verify"][2] is pool


@pytest.mark.parametrize("form", ["xla", "reference"])
def test_a_lazy_step_without_tokens_is_a_commit(form):
    token, constants, ragged, *_ = arguments(0, 1)
    records = Records(*[full(1.0, 1, MOST, HEADS, WIDTH)] * 3)
    which = Commit(*(full(n, 1, dtype=jnp.int32) for n in (2, 1, 2, 0, 0)))
    how = {"lower_bound": None, "implementation": form}
    _, _, states = kda_commit_verify(*token, *constants, ragged, records, which, **how)
    assert (states == kda_commit(records, *constants, which, **how)).all()
    assert not (states == constants[2]).all()


@pytest.mark.parametrize("form", ["tpu", "reference"])
@SIZES
def test_the_convolution_gives_zeros_and_the_pool_it_was_given(form, tokens, rows):
    _, _, ragged, slots, emit, _, _ = arguments(tokens, rows)
    pool = full(1.0, 1, 4, 3, CHANNELS)
    x, weight = full(jnp.nan, tokens, CHANNELS), full(1.0, 4, CHANNELS)
    run = functools.partial(causal_conv1d, implementation=form)
    y, after = run(x, weight, pool, 0, ragged, slots, slots, *emit)
    assert y.shape == x.shape and (y == 0).all()
    assert after is pool
