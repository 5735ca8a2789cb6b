"""MXFP4 weights: two E2M1 codes a byte, one power of two for 32 columns.

The low nibble of a byte is the even column. Bit 3 of a code is the sign, the others choose one of eight magnitudes.
Scale byte s stands for 2^(s - 127), 255 for not a number. A value has one bit of mantissa, so bf16 holds every finite
one exactly. Functions for numpy run on the host, `unpack` in a compiled program.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

GROUP = 32  # columns that share a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNED = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], np.float32)  # by code
_BIAS = 127
_LARGEST = 2  # exponent of the largest magnitude, 6


def unpack_host(packed: UInt8[np.ndarray, "... C"], scale: UInt8[np.ndarray, "... G"]) -> Float[np.ndarray, "... N"]:
    """Values of packed weights, fp32, exactly: N = 2 C = 32 G columns.

    A scale so large that a value lies beyond fp32 gives infinity, scale 255 not a number.

    Raises:
      ValueError: the two shapes do not belong together.
    """
    check_shapes(packed.shape, scale.shape)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    exponent = np.repeat(scale.astype(np.int32) - _BIAS, GROUP, axis=-1)
    with np.errstate(over="ignore"):
        values = np.ldexp(_SIGNED[codes], exponent)
    return np.where(exponent == 255 - _BIAS, np.float32(np.nan), values)


def unpack(
    packed: UInt8[Array, "... C"], scale: UInt8[Array, "... G"], dtype: DTypeLike = jnp.bfloat16
) -> Float[Array, "... N"]:
    """`unpack_host` in a compiled program, as `dtype`.

    Exact, save that a back end may take values below the smallest normal number, and all of scale 0, for zero.

    Raises:
      ValueError: the two shapes do not belong together.
    """
    check_shapes(packed.shape, scale.shape)
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    # The byte is the exponent field of an fp32; field 0 would be zero and is 2^-127, half the smallest normal number.
    bits = scale.astype(jnp.int32)
    factor = jax.lax.bitcast_convert_type(jnp.where(bits == 0, 1 << 22, bits << 23), jnp.float32)
    factor = jnp.where(bits == 255, jnp.nan, factor)
    return (jnp.asarray(_SIGNED)[codes] * jnp.repeat(factor, GROUP, axis=-1)).astype(dtype)


def pack(weight: Float[np.ndarray, "... N"]) -> tuple[UInt8[np.ndarray, "... C"], UInt8[np.ndarray, "... G"]]:
    """Codes and scales of finite weights, each rounded to the nearest value, ties to the even code.

    A group's scale puts its largest weight between 4 and 8 units, and what lies above 6 becomes 6, as the OCP
    microscaling format prescribes. What `unpack_host` gave comes back unchanged if each group uses its scale that far.

    Raises:
      ValueError: the number of columns is no multiple of 32, or a weight is not finite.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"weight: got {weight.shape[-1]} columns; use a multiple of {GROUP}")
    if not np.isfinite(weight).all():
        raise ValueError("weight: got values that are not finite; only finite ones have codes")
    groups = weight.astype(np.float64).reshape(*weight.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    exponent = np.frexp(largest)[1] - 1 - _LARGEST  # of zero: any will do
    scale = np.clip(np.where(largest == 0, 0, exponent) + _BIAS, 0, 254).astype(np.uint8)
    units = np.ldexp(groups, _BIAS - scale.astype(np.int32)[..., None])
    edges = (np.array(MAGNITUDES[1:]) + np.array(MAGNITUDES[:-1])) / 2
    below, upto = np.searchsorted(edges, np.abs(units), "left"), np.searchsorted(edges, np.abs(units), "right")
    code = np.where(below % 2 == 0, below, upto)  # they differ on an edge only, by one
    codes = (code + 8 * (units < 0)).astype(np.uint8).reshape(weight.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


def check_shapes(packed: tuple[int, ...], scale: tuple[int, ...]) -> None:
    """Raises ValueError unless codes [..., 16 G] and scales [..., G] belong together."""
    if not packed or packed != (*scale[:-1], scale[-1] * GROUP // 2 if scale else -1):
        raise ValueError(
            f"weight_scale: got {list(scale)} for codes {list(packed)}; give one scale for {GROUP} columns"
        )
