"""The block-hash chain: one key per hash unit, each naming its whole prefix.

    key_i = BLAKE2s-128( key_{i-1} | tokens of unit i as little-endian int32 | extra_i )

`seed` stands in for key_{-1}: it folds an optional secret and an optional salt, so prefixes under
different salts, or in different processes with different secrets, never meet. BLAKE2s (RFC 7693)
works on 32-bit words, so `chain_jnp` computes the same keys on an accelerator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

KEY_WORDS = 4
_DIGEST_BYTES = 4 * KEY_WORDS
_NO_EXTRA = bytes(_DIGEST_BYTES)


def seed(salt: str = "", secret: bytes = b"") -> np.ndarray:
    """Parent of the first unit, uint32[4]. salt separates tenants; secret separates processes."""
    text = len(salt.encode()).to_bytes(8, "little") + salt.encode() + secret
    return np.frombuffer(hashlib.blake2s(text, digest_size=_DIGEST_BYTES).digest(), "<u4").copy()


def chain(tokens: np.ndarray, unit: int, parent: np.ndarray, extras: Sequence[bytes] = ()) -> np.ndarray:
    """Keys of all whole units of `tokens`.

    tokens: int32[T]. parent: uint32[4], the seed or the key of the unit before.
    extras: optional 16-byte digest per unit (adapter, media), empty for none.
    Returns uint32[T // unit, 4]; a trailing part of a unit has no key.
    """
    count = len(tokens) // unit
    data = np.ascontiguousarray(tokens[: count * unit], dtype="<i4").tobytes()
    step, key, digest = 4 * unit, parent.astype("<u4").tobytes(), hashlib.blake2s
    out = bytearray()
    for i in range(count):
        extra = extras[i] if extras else _NO_EXTRA
        key = digest(key + data[i * step : (i + 1) * step] + extra, digest_size=_DIGEST_BYTES).digest()
        out += key
    return np.frombuffer(bytes(out), "<u4").reshape(count, KEY_WORDS).astype(np.uint32)


_IV = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], np.uint32
)
_SIGMA = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
    ],
    np.int32,
)


def _rotate(x: jax.Array, bits: int) -> jax.Array:
    return (x >> bits) | (x << (32 - bits))


def _mix(
    a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The G function on four lanes at once (columns or diagonals)."""
    a = a + b + x
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = a + b + y
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


def _compress(state: jax.Array, block: jax.Array, byte_count: jax.Array, last: jax.Array) -> jax.Array:
    """One BLAKE2s compression: state uint32[8], block uint32[16]."""
    tail = jnp.array(_IV[4:]) ^ jnp.stack(
        [byte_count, jnp.uint32(0), jnp.where(last, jnp.uint32(0xFFFFFFFF), jnp.uint32(0)), jnp.uint32(0)]
    )
    rows = (state[:4], state[4:], jnp.array(_IV[:4]), tail)

    def one_round(rows, order):
        m = block[order]
        a, b, c, d = rows
        a, b, c, d = _mix(a, b, c, d, m[0:8:2], m[1:8:2])
        b, c, d = jnp.roll(b, -1), jnp.roll(c, -2), jnp.roll(d, -3)
        a, b, c, d = _mix(a, b, c, d, m[8:16:2], m[9:16:2])
        return (a, jnp.roll(b, 1), jnp.roll(c, 2), jnp.roll(d, 3)), None

    (a, b, c, d), _ = jax.lax.scan(one_round, rows, jnp.array(_SIGMA))
    return state ^ jnp.concatenate([a, b]) ^ jnp.concatenate([c, d])


def chain_jnp(tokens: jax.Array, unit: int, parent: jax.Array) -> jax.Array:
    """`chain` without extras, as a jit-able function: int32[T], uint32[4] -> uint32[T // unit, 4]."""
    words = 2 * KEY_WORDS + unit
    blocks = -(-words // 16)
    start = jnp.array(_IV) ^ jnp.array([0x01010000 | _DIGEST_BYTES] + [0] * 7, jnp.uint32)
    counts = jnp.minimum(jnp.arange(1, blocks + 1, dtype=jnp.uint32) * 64, jnp.uint32(4 * words))

    def one_unit(key, piece):
        message = jnp.concatenate([key, piece, jnp.zeros(KEY_WORDS + blocks * 16 - words, jnp.uint32)])

        def one_block(state, item):
            block, byte_count, last = item
            return _compress(state, block, byte_count, last), None

        items = (message.reshape(blocks, 16), counts, jnp.arange(blocks) == blocks - 1)
        state, _ = jax.lax.scan(one_block, start, items)
        return state[:KEY_WORDS], state[:KEY_WORDS]

    count = tokens.shape[0] // unit
    pieces = tokens[: count * unit].reshape(count, unit).astype(jnp.int32)
    return jax.lax.scan(one_unit, parent.astype(jnp.uint32), jax.lax.bitcast_convert_type(pieces, jnp.uint32))[1]
