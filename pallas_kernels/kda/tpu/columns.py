"""Values that lie along lanes, one per key channel, turned into columns that multiply a state [K, V].

Spreading one lane over all lanes is the dearest thing these kernels do: four XLU cycles for eight channels, so 64 for
one column of one head, where a multiplication of the whole state costs the VPU four cycles. Two columns
whose values fit into 16 bits therefore travel as the halves of one 32-bit column.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda.tpu.token_inputs import Token


def transpose(rows: list[jax.Array]) -> jax.Array:
    """Rows [n, K] of several arrays, one under another, as columns [K, all n]; one transposition for all."""
    stacked = jnp.concatenate(rows, axis=0)
    spare = -stacked.shape[0] % 8
    if spare:
        stacked = jnp.concatenate([stacked, jnp.zeros((spare, stacked.shape[1]), stacked.dtype)], axis=0)
    return stacked.T


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _value(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def pack_exact(low: jax.Array, high: jax.Array) -> jax.Array:
    """Two fp32 arrays of values that bf16 holds, as the halves of 32-bit words."""
    return lax.shift_right_logical(_bits(low), 16) | _bits(high)


def unpack_exact(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The halves as fp32."""
    return _value(words << 16), _value(words & -(1 << 16))


def pack_close(low: jax.Array, high: jax.Array) -> jax.Array:
    """Words with `low` exact in the lower half, which as a whole are fp32 numbers closest to `high` >= 0.

    The lower half is taken as given when the upper one is rounded, so reading the word costs no mask and errs by no
    more than rounding to bf16 does, 2^-9.
    """
    given = lax.shift_right_logical(_bits(low), 16)
    upper = jnp.maximum(_bits(high) - given + (1 << 15), 0) & -(1 << 16)
    return upper | given


def unpack_close(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `pack_close` packed."""
    return _value(words << 16), _value(words)


class UpdateColumns(NamedTuple):
    """Columns of S' = diag(d) S + k u^T for some heads, as arrays or as refs that hold them.

    Attributes:
      decay: [K, H] fp32 d, or None if `key` holds 1 - d.
      key: [K, H] fp32 k, or, packed, [K / 2, H] with k of both halves of K in a word, or [K, H] with k and 1 - d.
    """

    decay: Any
    key: Any

    def update(self, h: int, state: jax.Array, u: jax.Array) -> jax.Array:
        """The new state of head h, from the old one [K, V] and u [1, V]."""
        width = state.shape[1]

        def spread(x):
            column = x[:, h : h + 1]
            return jnp.broadcast_to(column, (column.shape[0], width))

        key = spread(self.key)
        if self.decay is None:
            key, lost = unpack_close(key)
            return state - lost * state + key * u
        if key.dtype == jnp.int32:
            key = jnp.concatenate(unpack_exact(key), axis=0)
        return spread(self.decay) * state + key * u

    def store(self, refs: "UpdateColumns") -> None:
        """Puts arrays into refs of the same form."""
        for ref, value in zip(refs, self, strict=True):
            if ref is not None:
                ref[...] = value


def column_shapes(heads: int, width: int, k: jnp.dtype, state: jnp.dtype) -> list[tuple[tuple[int, int], jnp.dtype]]:
    """Shapes and dtypes of what `update_columns` gives, None left out."""
    if k != jnp.bfloat16:
        return [((width, heads), jnp.dtype(jnp.float32))] * 2
    if state == jnp.bfloat16:
        return [((width, heads), jnp.dtype(jnp.int32))]
    return [((width, heads), jnp.dtype(jnp.float32)), ((width // 2, heads), jnp.dtype(jnp.int32))]


def update_columns(x: Token, raw: jax.Array, k: jnp.dtype, state: jnp.dtype) -> UpdateColumns:
    """Columns of some pairs of row and head.

    Args:
      x: inputs of the pairs.
      raw: [H, K] fp32 raw k.
      k: dtype k came in; if bf16 the columns hold the raw k, and u has to carry its norm.
      state: dtype of the pool.
    """
    heads = raw.shape[0]
    if k != jnp.bfloat16:
        columns = transpose([x.decay, x.k])
        return UpdateColumns(columns[:, :heads], columns[:, heads : 2 * heads])
    columns = transpose([1.0 - x.decay if state == jnp.bfloat16 else x.decay, raw])
    decay, key = columns[:, :heads], columns[:, heads : 2 * heads]
    if state == jnp.bfloat16:
        return UpdateColumns(None, pack_close(key, decay))
    half = key.shape[0] // 2
    return UpdateColumns(decay, pack_exact(key[:half], key[half:]))


class DecayColumn(NamedTuple):
    """The column of diag(d) S: [K, H] fp32 d, or, for a bf16 state, [K / 2, H] with 1 - d of both halves of K."""

    words: jax.Array

    def times(self, h: int, state: jax.Array) -> jax.Array:
        """diag(d) S of head h."""
        column = self.words[:, h : h + 1]
        spread = jnp.broadcast_to(column, (column.shape[0], state.shape[1]))
        if self.words.dtype == jnp.float32:
            return spread * state
        return state - jnp.concatenate(unpack_exact(spread), axis=0) * state


def decay_column(d: jax.Array, state: jnp.dtype) -> DecayColumn:
    """Column of decays [H, K]; of a bf16 state 1 - d is rounded to bf16, see `pack_close`."""
    if state != jnp.bfloat16:
        return DecayColumn(transpose([d]))
    lost = transpose([(1.0 - d).astype(jnp.bfloat16).astype(jnp.float32)])
    half = lost.shape[0] // 2
    return DecayColumn(pack_exact(lost[:half], lost[half:]))
