"""Packed MXFP4 weights hold exactly what was published, in both forms, and say what they cannot hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts import NativeMatrix, PackedMatrix
from pallas_kernels.experts.mxfp4 import unpack_host
from pallas_kernels.experts.packed import interleaved, pack
from pallas_kernels.experts.reference import unpacked
from tests.kernels.experts_cases import random_codes
from tests.kernels.golden import load

FORMS = (PackedMatrix, NativeMatrix)
_unpacked = jax.jit(unpacked)


def values_of(kind, codes, scales, interleave=False):
    slices = pack(codes, scales, interleave=interleave, native=kind is NativeMatrix)
    return np.asarray(_unpacked(kind(*map(jnp.asarray, slices))), np.float64)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("scales", [(1, 14), (120, 134), (240, 254)])
def test_every_code_with_every_scale_comes_back(kind, interleave, scales):
    codes, scale = random_codes(np.random.default_rng(0), 128, 256, scales)
    codes[0, :16], codes[0, 16:32] = 0, 0x88  # a block of zeros, and one of zeros with a sign
    scale[0, :2] = 0
    want = unpack_host(codes, scale).astype(np.float64)
    got = values_of(kind, codes, scale, interleave)
    # Beyond the smallest normal number a back end may take values for zero.
    keep = (np.abs(want) >= 2.0**-126) | (want == 0)
    if interleave:
        want, keep = interleaved(want, 0), interleaved(keep, 0)
    np.testing.assert_array_equal(got[keep], want[keep])


@pytest.mark.parametrize("kind", FORMS)
def test_the_golden_file(kind):
    file = load("mxfp4_unpack")
    missing = ((0, 0), (0, 16))  # 96 columns: the form has them in groups of 128
    codes, scales = np.pad(file["weight_packed"], missing), np.pad(file["weight_scale"], ((0, 0), (0, 1)))
    np.testing.assert_array_equal(values_of(kind, codes, scales)[:, :96], file["weight"])


@pytest.mark.parametrize(("kind", "apart"), [(PackedMatrix, 26), (NativeMatrix, 13)])
def test_scales_may_be_so_far_apart_and_no_further(kind, apart):
    codes, scales = random_codes(np.random.default_rng(1), 128, 256)
    scales[:] = 100
    scales[3, 5] = 100 + apart
    np.testing.assert_array_equal(values_of(kind, codes, scales), unpack_host(codes, scales))
    scales[3, 5] += 1
    with pytest.raises(ValueError, match=rf"weight_scale: got scales of one output that are 2\^{apart + 1} apart"):
        values_of(kind, codes, scales)
    codes[3, 80:96] = 0  # a block of zeros has no scale to speak of
    np.testing.assert_array_equal(values_of(kind, codes, scales), unpack_host(codes, scales))


def test_outputs_may_be_packed_in_parts():
    codes, scales = random_codes(np.random.default_rng(2), 256, 256)
    whole = pack(codes, scales, interleave=True)
    for part in (slice(0, 128), slice(128, 256)):
        for got, want in zip(pack(codes[part], scales[part], interleave=True), whole, strict=True):
            np.testing.assert_array_equal(got, want[:, part])


def test_packed_weights_take_four_and_a_quarter_bits():
    codes, scales = random_codes(np.random.default_rng(3), 128, 4096)
    got = pack(codes, scales, interleave=False)
    assert sum(part.nbytes for part in got[:2]) == codes.nbytes + scales.nbytes
    assert got.factors.nbytes == 128 * 4


def test_bytes_that_are_no_weights_are_refused():
    codes, scales = random_codes(np.random.default_rng(4), 96, 128)
    with pytest.raises(ValueError, match="weight_packed: got 96 outputs; interleaved"):
        pack(codes, scales, interleave=True)
    with pytest.raises(ValueError, match=r"weight_packed: got .* multiples of 128"):
        pack(codes[:, :32], scales[:, :2], interleave=False)
    with pytest.raises(ValueError, match=r"weight_packed: got .* a scale for every 32"):
        pack(codes, scales[:, :3], interleave=False)
    scales[5, 1] = 255
    with pytest.raises(ValueError, match="weight_scale: got 255"):
        pack(codes, scales, interleave=False)
