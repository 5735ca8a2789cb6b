"""Unpacks the words of `experts.packed` in vector memory: seven operations for 4,096 weights, five on tpu7x."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

WEIGHT = jnp.float8_e5m2
# Inputs in a word of codes and in a word of scales; rows of a register.
WORD_INPUTS, SCALE_INPUTS, _ROWS = 8, 128, 8
_ZERO = 0x02  # the code of zero


def _bytes(octet: int) -> Any:
    """A word of four equal bytes."""
    word = octet * 0x01010101
    return jnp.int32(word - (1 << 32) if word >> 31 else word)


def unpack(codes: Any, scales: Any, target: Any, *, native: bool, first: Any = 0, columns: Any = slice(None)) -> None:
    """Writes the weights [n, N] in e5m2 to `target`, rows in the order of `packed.interleaved`.

    Args:
      codes, scales: refs [.., N'], int32.
      target: ref [n, N], n a multiple of 128.
      native: the words of `weights.NativeMatrix`.
      first: row of scales to begin at.
      columns: of codes and scales.
    """
    for group in range(target.shape[0] // SCALE_INPUTS):
        scale = scales[pl.ds(first + group, 1), columns]
        for half in range(2):
            start = (first + group) * (SCALE_INPUTS // WORD_INPUTS) + _ROWS * half
            words = codes[pl.ds(start if isinstance(start, int) else pl.multiple_of(start, _ROWS), _ROWS), columns]
            row = SCALE_INPUTS * group + SCALE_INPUTS // 2 * half
            target[row : row + SCALE_INPUTS // 2] = (_converted if native else _assembled)(words, scale)


def _assembled(words: Int32[Array, "8 N"], scale: Int32[Array, "1 N"]) -> Array:
    """Weights [64, N], their fields cut out of the words."""
    first = words & _bytes(0x8E)
    second = lax.shift_right_logical(words, jnp.int32(3)) & _bytes(0x0E)
    second |= lax.shift_left(words, jnp.int32(7)) & _bytes(0x80)
    scale = jnp.broadcast_to(scale, words.shape)
    return jnp.concatenate([_scaled(x, x ^ _bytes(_ZERO), scale) for x in (first, second)])


def _converted(words: Int32[Array, "8 N"], scale: Int32[Array, "1 N"]) -> Array:
    """Weights [64, N], by the conversion that tpu7x has."""
    codes = pltpu.bitcast(pltpu.bitcast(words, jnp.float4_e2m1fn).astype(WEIGHT), jnp.int32)
    scale = jnp.broadcast_to(scale, codes.shape)
    return _scaled(codes, codes, scale)


def _scaled(codes: Int32[Array, "n N"], nonzero: Int32[Array, "n N"], scale: Int32[Array, "n N"]) -> Array:
    """Weights from unscaled ones, zero where the byte of `nonzero` is."""
    # Bytes do not carry: a code with its exponent stays below infinity.
    keep = pltpu.bitcast(nonzero, jnp.int8) != jnp.int8(0)
    return pltpu.bitcast(jnp.where(keep, pltpu.bitcast(codes + scale, jnp.int8), jnp.int8(0)), WEIGHT)
