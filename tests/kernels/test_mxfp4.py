"""MXFP4 codes are read as the golden file says, on the host and in a program, and written so that they read back."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts.mxfp4 import GROUP, MAGNITUDES, pack, unpack, unpack_host
from tests.kernels import golden


def test_every_value_of_the_golden_file_is_exact():
    file = golden.load("mxfp4_unpack")
    got = unpack_host(file["weight_packed"], file["weight_scale"])
    np.testing.assert_array_equal(got, file["weight"])
    for dtype in (jnp.float32, jnp.bfloat16):
        program = jax.jit(unpack, static_argnums=2)
        np.testing.assert_array_equal(program(file["weight_packed"], file["weight_scale"], dtype), file["weight"])


def test_host_and_program_agree_on_every_byte_and_scale():
    packed = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 1, 16), (1, 256, 1)).reshape(-1, 16)
    scale = np.tile(np.arange(256, dtype=np.uint8)[:, None], (16, 1))
    host = unpack_host(packed, scale)
    program = np.asarray(jax.jit(unpack, static_argnums=2)(packed, scale, jnp.float32))
    tiny = (np.abs(host) < np.finfo(np.float32).tiny) | (scale == 0)
    np.testing.assert_array_equal(program[~tiny], host[~tiny])
    assert np.isnan(host[scale[:, 0] == 255]).all()
    np.testing.assert_array_equal(host[scale[:, 0] == 127][0, :8], [0, 0, 0.5, 0, 1, 0, 1.5, 0])
    finite = np.isfinite(host)
    np.testing.assert_array_equal(host.astype(jnp.bfloat16).astype(np.float32)[finite], host[finite])


def test_what_was_unpacked_packs_to_the_same_codes():
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (5, 64), dtype=np.uint8)
    scale = rng.integers(100, 140, (5, 4), dtype=np.uint8)
    packed[:, ::16] |= 0x77  # some weight of each group needs the scale
    again, scales = pack(unpack_host(packed, scale))
    np.testing.assert_array_equal(scales, scale)
    np.testing.assert_array_equal(unpack_host(again, scales), unpack_host(packed, scale))


def test_rounding_is_to_the_nearest_value_ties_to_even_codes():
    low, high = np.array(MAGNITUDES[:-1]), np.array(MAGNITUDES[1:])
    weight = np.zeros((3, GROUP), np.float32)
    weight[:, 31] = 4.0  # fixes the scale at 1
    weight[0, :7], weight[1, :7], weight[2, :7] = (low + high) / 2, low * 0.55 + high * 0.45, low * 0.45 + high * 0.55
    got = unpack_host(*pack(-weight))
    even = [MAGNITUDES[i + i % 2] for i in range(7)]
    np.testing.assert_array_equal(-got[:, :7], [even, low, high])
    assert (-unpack_host(*pack(np.full((1, GROUP), -7.9, np.float32))) == 6).all()
    assert (unpack_host(*pack(np.zeros((2, GROUP), np.float32))) == 0).all()


def test_random_weights_come_back_within_half_a_step():
    weight = np.random.default_rng(1).normal(size=(64, 96)).astype(np.float32)
    error = np.abs(unpack_host(*pack(weight)) - weight).reshape(64, 3, GROUP)
    largest = np.abs(weight).reshape(64, 3, GROUP).max(-1, keepdims=True)
    assert (error <= largest / 4).all()  # from 8 down to 6 units is a quarter; else a half step of 2 out of 4


@pytest.mark.parametrize(("shape", "match"), [((2, 33), "33 columns"), ((0,), None)])
def test_other_numbers_of_columns_are_refused(shape, match):
    weight = np.zeros(shape, np.float32)
    if match is None:
        assert [part.shape for part in pack(weight)] == [(0,), (0,)]
        return
    with pytest.raises(ValueError, match=match):
        pack(weight)


def test_what_has_no_code_and_scales_that_do_not_fit_are_refused():
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite"):
            pack(np.full((1, GROUP), bad, np.float32))
    for function, shapes in itertools.product((unpack, unpack_host), ([(4, 16), (4, 2)], [(4, 16), (3, 1)])):
        with pytest.raises(ValueError, match="weight_scale"):
            function(*((jnp if function is unpack else np).zeros(shape, np.uint8) for shape in shapes))
