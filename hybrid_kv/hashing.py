"""The block-hash chain: one key per hash unit, each naming its whole prefix and all it depends on.

    key_i = BLAKE2s-128( extra_i | tokens [iH, (i+1)H + L) | key_{i-1} )

H: tokens of a unit. L: lookahead tokens, which a key proves besides its own (0: none). Both are in BLAKE2s's
personalisation, so chains of unlike H or L never meet. extra_i: 16 bytes, `extra_digest` of what the content of
the same range depends on besides tokens: adapter, media, embeddings; zeros where there is nothing. The extra goes
first, since units mostly have the same one: BLAKE2s with it inside is made once and copied.

The n tokens of a unit are written in 20 bits each if all of them are in [0, 2**20): the low 16 bits of each as
little-endian, then h = ceil(n / 2) bytes with the high 4 bits of token j and of token j + h. Otherwise they are n
little-endian int32. The length of the message says which, and all else in it has a fixed length, so no message reads as
another; and 64 tokens with parent and extra are three blocks of BLAKE2s.

`seed` stands in for key_{-1}: it folds an optional secret and an optional salt, so prefixes under
different salts, or in processes with different secrets, never meet. BLAKE2s (RFC 7693) works on 32-bit
words, so `chain_jnp` computes the same keys on an accelerator. 128 bits: no collision is ever met by accident; a
caller that could search 2**64 prefixes for one is kept from it by a secret, since nothing can be searched without it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import secrets
import struct
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.errors import UserError

KEY_WORDS = 4
_DIGEST_BYTES = 4 * KEY_WORDS
_LEAST_SECRET = 16
# Tokens below 2**_NARROW are written in so many bits.
_NARROW = 20


def new_secret() -> bytes:
    """A secret for `seed`, 32 random bytes; processes that shall find each other's prefixes share one."""
    return secrets.token_bytes(32)


def seed(salt: str = "", secret: bytes = b"") -> np.ndarray:
    """Parent of the first unit, uint32[4].

    salt: separates tenants; "" is none. secret: separates processes, b"" is none, then keys depend on
    content alone. Raises UserError for values of another type and for a secret under 16 bytes.
    """
    if not isinstance(salt, str):
        raise UserError("salt", salt, 'give a text; "" is none')
    if not isinstance(secret, bytes) or 0 < len(secret) < _LEAST_SECRET:
        # The value stays out of the message.
        fix = f'give at least {_LEAST_SECRET} bytes, as hashing.new_secret() does, or b"" for none'
        raise UserError("secret", f"{type(secret).__name__} of length {len(secret)}", fix)
    return _words(_digest(_sized(_text(salt)) + secret))


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A set of weights that all rows of a request are computed with. The path counts: names are used again."""

    name: str
    path: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "path"):
            if not isinstance(getattr(self, field), str):
                raise UserError(f"adapter.{field}", getattr(self, field), "give a text")
        if not self.name:
            raise UserError("adapter.name", self.name, "give a name; a request without an adapter has adapter=None")


@dataclasses.dataclass(frozen=True)
class Media:
    """An image, sound or the like that stands in for `length` tokens from position `offset` on.

    content: names what is in it, such as a digest of its bytes; equal content may be shared, so unlike must differ.
    """

    content: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.content, str) or not self.content:
            raise UserError("media.content", self.content, "give a text that names the content, such as its digest")
        for field, least in (("offset", 0), ("length", 1)):
            value = getattr(self, field)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not least <= value < 1 << 31:
                raise UserError(f"media.{field}", value, f"use a whole number of tokens in [{least}, 2**31)")


@dataclasses.dataclass(frozen=True, eq=False)
class ExtraKeys:
    """What the content of a prefix depends on besides its tokens.

    media: in any order. embeddings: [P, width], row p taken in place of the token at position p; None for none.
    """

    adapter: Adapter | None = None
    media: tuple[Media, ...] = ()
    embeddings: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None and not isinstance(self.adapter, Adapter):
            raise UserError("extra_keys.adapter", self.adapter, "give a hashing.Adapter or None")
        if not isinstance(self.media, tuple) or not all(isinstance(item, Media) for item in self.media):
            raise UserError("extra_keys.media", self.media, "give a tuple of hashing.Media")
        rows = self.embeddings
        if rows is not None and not (isinstance(rows, np.ndarray) and rows.ndim == 2):
            raise UserError("extra_keys.embeddings", type(rows).__name__, "give a numpy array [positions, width]")


NO_EXTRA_KEYS = ExtraKeys()


def extra_digest(extra: ExtraKeys, start: int, stop: int) -> bytes:
    """16 bytes over all that positions [start, stop) depend on besides tokens; zeros if there is nothing.

    The adapter counts everywhere, media by content and offset from `start` (negative if an item began before) where
    they overlap the range, embeddings by the rows in it. Every kind has a tag and every part its length, so none
    reads as another.
    """
    parts = []
    if extra.adapter is not None:
        parts += [b"A", _sized(_text(extra.adapter.name)), _sized(_text(extra.adapter.path))]
    found = [item for item in extra.media if item.offset < stop and item.offset + item.length > start]
    for item in sorted(found, key=lambda item: (item.offset, item.content)):
        offset = (int(item.offset) - start).to_bytes(8, "little", signed=True)
        parts += [b"M", _sized(_text(item.content)), offset]
    if extra.embeddings is not None and len(rows := extra.embeddings[start:stop]):
        form = f"{rows.dtype.str} {rows.dtype.name} {rows.shape}"
        parts += [b"E", _sized(form.encode()), _sized(rows.tobytes())]
    return _digest(b"".join(parts)) if parts else bytes(_DIGEST_BYTES)


def extra_digests(extra: ExtraKeys, first: int, count: int, unit: int, lookahead: int = 0) -> np.ndarray:
    """`extra_digest` of units first .. first + count - 1, each with its lookahead: uint32[count, 4]."""
    starts = range(first * unit, (first + count) * unit, unit)
    data = b"".join(extra_digest(extra, start, start + unit + lookahead) for start in starts)
    return _words(data).reshape(count, KEY_WORDS)


def key_count(tokens: int, unit: int, lookahead: int = 0) -> int:
    """Units of `tokens` tokens that have a key: those whose own tokens and lookahead tokens exist."""
    if unit < 1:
        raise UserError("unit", unit, "use at least 1 token")
    if lookahead < 0:
        raise UserError("lookahead", lookahead, "use 0 or more tokens")
    return max(tokens - lookahead, 0) // unit


def chain(
    tokens: np.ndarray, unit: int, parent: np.ndarray, extras: np.ndarray | None = None, lookahead: int = 0
) -> np.ndarray:
    """Keys of all units of `tokens` that are complete with their lookahead.

    tokens: int32[T], from the start of a unit. parent: uint32[4], the seed or the key of the unit before.
    extras: uint32[U, 4] from `extra_digests`, a row for each key at least; None for zeros.
    Returns uint32[(T - lookahead) // unit, 4].
    """
    count = key_count(len(tokens), unit, lookahead)
    if extras is not None:
        _check_extras(extras.shape, count)
    if not count:
        return np.zeros((0, KEY_WORDS), np.uint32)
    own = np.ascontiguousarray(tokens, "<i4")
    if lookahead:
        covered = own[np.arange(count)[:, None] * unit + np.arange(unit + lookahead)]
    else:
        covered = own[: count * unit].reshape(count, unit)
    narrow = np.bitwise_or.reduce(covered.view("<u4"), 1) < 1 << _NARROW
    empty = hashlib.blake2s(digest_size=_DIGEST_BYTES, person=_person(unit, lookahead))
    key = parent.astype("<u4").tobytes()
    keys: list[bytes] = []
    for start, stop in _runs(narrow, extras):
        begun = empty.copy()
        begun.update(bytes(_DIGEST_BYTES) if extras is None else extras[start].astype("<u4").tobytes())
        for (piece,) in _pieces(covered[start:stop], bool(narrow[start])):
            link = begun.copy()
            link.update(piece)
            link.update(key)
            key = link.digest()
            keys.append(key)
    return _words(b"".join(keys)).reshape(count, KEY_WORDS)


def _runs(narrow: np.ndarray, extras: np.ndarray | None) -> Iterator[tuple[int, int]]:
    """Units (start, stop) that follow each other with the same extra and tokens written the same way."""
    if extras is None and narrow.all():
        return iter([(0, len(narrow))])
    other = narrow[1:] != narrow[:-1]
    if extras is not None:
        other |= (extras[1 : len(narrow)] != extras[: len(narrow) - 1]).any(1)
    return itertools.pairwise([0, *(np.flatnonzero(other) + 1).tolist(), len(narrow)])


def _pieces(tokens: np.ndarray, narrow: bool) -> Iterator[tuple[bytes]]:
    """The tokens of units, i32[U, n], as the messages have them."""
    if narrow:
        count, n = tokens.shape
        half = -(-n // 2)
        halves = tokens.view("<u2")
        high = halves[:, 1::2].astype(np.uint8)
        packed = np.empty((count, 2 * n + half), np.uint8)
        packed[:, : 2 * n].view("<u2")[:] = halves[:, ::2]
        packed[:, 2 * n :] = high[:, :half]
        packed[:, 2 * n : 3 * n - half] |= high[:, half:] << 4
    data = packed if narrow else tokens
    return struct.iter_unpack(f"{data.nbytes // len(data)}s", data.tobytes())


class KeyChain:
    """The keys of a token sequence that grows, each unit hashed once.

    unit, lookahead: tokens. parent: uint32[4], the seed. extra: of the whole sequence, in absolute positions.
    """

    def __init__(self, unit: int, parent: np.ndarray, extra: ExtraKeys = NO_EXTRA_KEYS, lookahead: int = 0) -> None:
        key_count(0, unit, lookahead)  # refuses sizes that cannot be
        if not isinstance(extra, ExtraKeys):
            raise UserError("extra_keys", extra, "give hashing.ExtraKeys")
        self.unit, self.lookahead, self.extra = unit, lookahead, extra
        self.units = 0
        self._parent = parent

    def extend(self, tokens: np.ndarray) -> np.ndarray:
        """Keys of the units that became complete since the last call, uint32[new, 4].

        tokens: int32[N], the whole sequence so far. Only what belongs to new units is read; one shorter than before
        has none.
        """
        new = max(key_count(len(tokens), self.unit, self.lookahead) - self.units, 0)
        first = self.units * self.unit
        if not new:
            return np.zeros((0, KEY_WORDS), np.uint32)
        extras = None
        if self.extra.adapter is not None or self.extra.media or self.extra.embeddings is not None:
            extras = extra_digests(self.extra, self.units, new, self.unit, self.lookahead)
        fresh = tokens[first : first + new * self.unit + self.lookahead]
        keys = chain(fresh, self.unit, self._parent, extras, self.lookahead)
        self.units += new
        self._parent = keys[-1]
        return keys


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _digest(data: bytes) -> bytes:
    return hashlib.blake2s(data, digest_size=_DIGEST_BYTES).digest()


def _person(unit: int, lookahead: int) -> bytes:
    return unit.to_bytes(4, "little") + lookahead.to_bytes(4, "little")


def _words(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<u4").astype(np.uint32)


def _check_extras(shape: tuple[int, ...], count: int) -> None:
    if len(shape) != 2 or shape[0] < count or shape[1] != KEY_WORDS:
        raise UserError("extras", shape, f"give uint32[{count}, {KEY_WORDS}], a row for each key")


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


def _bytes(words: jax.Array) -> jax.Array:
    """Unsigned integers [n] as little-endian bytes, uint8."""
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)


def _length(parts: list[jax.Array]) -> int:
    return sum(part.shape[0] for part in parts)


def chain_jnp(
    tokens: jax.Array, unit: int, parent: jax.Array, extras: jax.Array | None = None, lookahead: int = 0
) -> jax.Array:
    """`chain`, bit for bit, as a function that can be jitted with `unit` and `lookahead` static.

    tokens: int32[T]. parent: uint32[4]. extras: uint32[U, 4], None for zeros.
    Returns uint32[(T - lookahead) // unit, 4]. A key depends on nothing behind its lookahead, so tokens may be padded
    to a fixed T and the keys of units that are not complete yet ignored.
    """
    count = key_count(tokens.shape[0], unit, lookahead)
    extras = jnp.zeros((count, KEY_WORDS), jnp.uint32) if extras is None else extras
    _check_extras(extras.shape, count)
    size, half = unit + lookahead, -(-(unit + lookahead) // 2)
    blocks = -(-(2 * _DIGEST_BYTES + 4 * size) // 64)
    # RFC 7693, parameter block: digest length, no key, fanout 1, depth 1; personalisation in the last two words.
    start = jnp.array(_IV) ^ jnp.array([0x01010000 | _DIGEST_BYTES, 0, 0, 0, 0, 0, unit, lookahead], jnp.uint32)

    def message(key: jax.Array, piece: jax.Array, extra: jax.Array) -> tuple[jax.Array, jax.Array]:
        """uint32[blocks, 16] and how many bytes of it count."""
        high = jnp.pad((piece >> 16).astype(jnp.uint8), (0, 2 * half - size))
        low = _bytes((piece & 0xFFFF).astype(jnp.uint16))
        narrow = [_bytes(extra), low, high[:half] | (high[half:] << 4), _bytes(key)]
        wide = [_bytes(extra), _bytes(piece), _bytes(key)]
        padded = [jnp.pad(jnp.concatenate(parts), (0, 64 * blocks - _length(parts))) for parts in (narrow, wide)]
        fits = (piece >> _NARROW == 0).all()
        words = jax.lax.bitcast_convert_type(jnp.where(fits, padded[0], padded[1]).reshape(-1, 4), jnp.uint32)
        return words.reshape(blocks, 16), jnp.where(fits, _length(narrow), _length(wide)).astype(jnp.uint32)

    def one_unit(key, item):
        words, length = message(key, *item)

        def one_block(state, item):
            block, before = item
            after = _compress(state, block, jnp.minimum(before + 64, length), before + 64 >= length)
            return jnp.where(before < length, after, state), None

        state, _ = jax.lax.scan(one_block, start, (words, 64 * jnp.arange(blocks, dtype=jnp.uint32)))
        return state[:KEY_WORDS], state[:KEY_WORDS]

    at = jnp.arange(count)[:, None] * unit + jnp.arange(unit + lookahead)
    pieces = jax.lax.bitcast_convert_type(tokens.astype(jnp.int32)[at], jnp.uint32)
    return jax.lax.scan(one_unit, parent.astype(jnp.uint32), (pieces, extras[:count].astype(jnp.uint32)))[1]
