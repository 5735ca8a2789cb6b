"""MXFP4 weights for the TPU kernel: from the published bytes to words that unpack in few operations.

A matrix [out, in] is kept turned, with inputs along rows of registers and outputs along lanes. The kernel multiplies
with weights in e5m2, which holds any e2m1 value times a power of two: sign, five bits of exponent, two of mantissa.
What it wants of a code is therefore s000eem0, to which the exponent of the block is added:

    byte = s<<7 | c<<1      c = 0 .. 7 for 0.5, zero, 1, 1.5, 2, 3, 4, 6

so that c + 2 S is exponent and first bit of the mantissa of all magnitudes but zero. Zero stands in the place of 0.75,
without a sign, and is wiped. Two codes share a byte: one lies as above, bits 4 to 6 are c of the other and bit 0 its
sign. Exponents S are relative to the largest of an output, and what that means, `factors`, multiplies the sums.

Where the codes of 128 inputs lie. A word has four bytes and each belongs to another block of 32 inputs, as do the four
bytes of a word of scales: a row of scales, spread over sublanes, is added as it is. With q the byte, r the row of eight
and v = 0 .. 3 the register that is unpacked, input 32 q + 8 v + r becomes row 4 (8 v + r) + q of the product. Tokens
have their columns in that order (`interleaved`); so has the hidden layer, because gate and up are packed so.

tpu7x converts e2m1 to e5m2 itself, two operations in place of four; S is then at least that of 0.5, and the range of
scales half as wide. Its words hold the published codes, nibble 4 z + q of row r of register u for input
32 q + 16 u + 2 r + z, so that the rows of the product are the same.

Everything is NumPy on the host and works on any range of outputs, in multiples of 128 where they are interleaved.
"""

from typing import NamedTuple

import numpy as np

GROUP, BLOCK = 128, 32
# Rows of a tile of words.
_TILE = 8
# Largest exponent S: with the two bits of a code it stays below that of infinity.
_TOP = 27
# S of 0.5 as tpu7x converts it.
_CONVERTED = 14
# From magnitude of e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) to c.
_C = np.array([1, 0, 2, 3, 4, 5, 6, 7], np.uint8)


class PackedSlice(NamedTuple):
    """Some outputs of one matrix; see `weights.PackedMatrix`.

    Attributes:
      codes: int32 [in / 8, out].
      scales: int32 [in / 128, out], rows of zeros up to a multiple of 8.
      factors: float32 [1, out].
    """

    codes: np.ndarray
    scales: np.ndarray
    factors: np.ndarray


def scale_rows(inputs: int) -> int:
    """Rows of scales of so many inputs: whole tiles, else XLA keeps a stack in another layout and copies all of it."""
    return -(-inputs // (GROUP * _TILE)) * _TILE


def interleaved(x: np.ndarray, axis: int) -> np.ndarray:
    """An axis in the order of the kernel's products: of every 128, place 4 j + q holds what was at 32 q + j."""
    axis %= x.ndim
    shape = x.shape
    split = x.reshape(*shape[:axis], shape[axis] // GROUP, GROUP // BLOCK, BLOCK, *shape[axis + 1 :])
    return split.swapaxes(axis + 1, axis + 2).reshape(shape)


def pack(weight_packed: np.ndarray, weight_scale: np.ndarray, *, interleave: bool, native: bool = False) -> PackedSlice:
    """Device form of published MXFP4 bytes.

    Args:
      weight_packed: uint8 [out, in / 2], two codes a byte, the low nibble for the even input.
      weight_scale: uint8 [out, in / 32], exponents biased by 127.
      native: words of `weights.NativeMatrix` instead of `weights.PackedMatrix`.
      interleave: outputs in the order of `interleaved`: for gate and up, whose outputs are the inputs of down.

    Raises:
      ValueError: widths are no multiple of 128, a scale is not a number (255), or the scales of an output are too
        far apart for e5m2.
    """
    outputs, inputs = weight_packed.shape[0], 2 * weight_packed.shape[1]
    if inputs % GROUP or weight_scale.shape != (outputs, inputs // BLOCK):
        raise ValueError(
            f"weight_packed: got {weight_packed.shape} with scales {weight_scale.shape}; the packed form needs inputs "
            f"in multiples of {GROUP} and a scale for every {BLOCK}"
        )
    if interleave and outputs % GROUP:
        raise ValueError(f"weight_packed: got {outputs} outputs; interleaved they come in multiples of {GROUP}")
    if interleave:
        weight_packed, weight_scale = interleaved(weight_packed, 0), interleaved(weight_scale, 0)
    nibbles = np.stack([weight_packed & 15, weight_packed >> 4], axis=-1).reshape(outputs, inputs)
    magnitude = nibbles & 7
    exponents, factors = _exponents(magnitude, weight_scale, _CONVERTED if native else 1)
    # Converted codes have an exponent already.
    octets = (exponents - (_CONVERTED if native else 0) << 2).astype(np.uint8).reshape(outputs, -1, 4)
    scales = np.ascontiguousarray(octets.transpose(1, 0, 2)).view("<i4")[..., 0]
    scales = np.pad(scales, ((0, scale_rows(inputs) - len(scales)), (0, 0)))
    words = (_native if native else _fields)(nibbles)
    return PackedSlice(words, scales, factors)


def _fields(nibbles: np.ndarray) -> np.ndarray:
    """Words of `weights.PackedMatrix` [in / 8, out] from published codes [out, in]."""
    outputs, inputs = nibbles.shape
    magnitude = nibbles & 7
    code = _C[magnitude]
    sign = np.where(magnitude > 0, nibbles >> 3, 0).astype(np.uint8)
    # [out, group, q, half of v, v % 2, r]
    code, sign = (a.reshape(outputs, inputs // GROUP, 4, 2, 2, 8) for a in (code, sign))
    octets = sign[..., 0, :] << 7 | code[..., 1, :] << 4 | code[..., 0, :] << 1 | sign[..., 1, :]
    words = np.ascontiguousarray(octets.transpose(1, 3, 4, 0, 2)).view("<i4")[..., 0]
    return words.reshape(inputs // 8, outputs)


def _native(nibbles: np.ndarray) -> np.ndarray:
    """Words of `weights.NativeMatrix` [in / 8, out] from published codes [out, in]."""
    outputs, inputs = nibbles.shape
    codes = np.where(nibbles == 8, 0, nibbles).astype(np.uint8)  # zero has no sign
    # [out, group, q, half of the group, r, z]
    codes = codes.reshape(outputs, inputs // GROUP, 4, 2, 8, 2)
    # A byte has the nibbles of q and q + 1.
    octets = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
    words = np.ascontiguousarray(octets.transpose(1, 3, 4, 0, 5, 2)).reshape(-1, outputs, 4).view("<i4")
    return words[..., 0]


def _exponents(magnitude: np.ndarray, scale: np.ndarray, least: int) -> tuple[np.ndarray, np.ndarray]:
    """S of each block [out, blocks], at least `least`, and factors [1, out]."""
    outputs = scale.shape[0]
    used = magnitude.reshape(outputs, -1, BLOCK).any(axis=2)
    exponent = np.where(used, scale.astype(np.int32), 0)
    if (exponent == 255).any():
        raise ValueError("weight_scale: got 255, which is not a number; the tensor is damaged")
    largest = exponent.max(axis=1, keepdims=True, initial=0)
    # Small scales are kept small, so that the factor is a normal number.
    top = np.maximum(np.minimum(_TOP, largest + 13), least)
    relative = np.where(used, top - (largest - exponent), least)
    if (relative < least).any():
        apart = int((largest - exponent)[used].max())
        raise ValueError(
            f"weight_scale: got scales of one output that are 2^{apart} apart; this packed "
            f"form holds up to 2^{_TOP - least}: take the form that is not native, or else bf16"
        )
    return relative, np.ldexp(np.float32(1), largest - 113 - top).astype(np.float32).T
