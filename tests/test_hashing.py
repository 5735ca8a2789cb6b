"""The hash chain: names whole prefixes and all they depend on, extends, and is the same on host and device."""

import functools
import hashlib
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv import hashing
from hybrid_kv.errors import UserError
from hybrid_kv.hashing import Adapter, ExtraKeys, Media

TOKENS = np.random.default_rng(0).integers(0, 1 << 20, 200).astype(np.int32)


def chain_of(tokens, unit, extra=hashing.NO_EXTRA_KEYS, lookahead=0, salt="") -> np.ndarray:
    tokens = np.asarray(tokens, np.int32)
    extras = hashing.extra_digests(extra, 0, hashing.key_count(len(tokens), unit, lookahead), unit, lookahead)
    return hashing.chain(tokens, unit, hashing.seed(salt), extras, lookahead)


def equal_keys(a: np.ndarray, b: np.ndarray) -> list[bool]:
    return (a == b).all(1).tolist()


# Values, written out with hashlib


def written(tokens: list[int]) -> bytes:
    """Tokens of a unit as a message has them: 20 bits each where that is enough."""
    if not all(0 <= token < 1 << 20 for token in tokens):
        return struct.pack(f"<{len(tokens)}i", *tokens)
    half = -(-len(tokens) // 2)
    high = [token >> 16 for token in tokens] + [0]
    pairs = bytes(high[j] | (high[half + j] << 4) for j in range(half))
    return b"".join(struct.pack("<H", token & 0xFFFF) for token in tokens) + pairs


def test_a_key_is_the_blake2s_of_extra_tokens_lookahead_and_parent():
    tokens, unit, lookahead = [5, -1, 7, 0x3_0008, 0xF_0009, 10], 2, 1
    extra = ExtraKeys(Adapter("a", "/p"), (Media("cat", 1, 2),), np.ones((3, 2), np.float32))
    parent = hashlib.blake2s(struct.pack("<Q", 4) + b"salt" + b"s" * 16, digest_size=16).digest()
    assert hashing.seed("salt", b"s" * 16).tobytes() == parent

    def sized(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    adapter = b"A" + sized(b"a") + sized(b"/p")
    rows = b"E" + sized(b"<f4 float32 (3, 2)") + sized(np.ones(6, "<f4").tobytes())
    last = b"E" + sized(b"<f4 float32 (1, 2)") + sized(np.ones(2, "<f4").tobytes())
    parts = [
        adapter + b"M" + sized(b"cat") + struct.pack("<q", 1) + rows,
        adapter + b"M" + sized(b"cat") + struct.pack("<q", -1) + last,
    ]
    want = []
    for unit_index, part in enumerate(parts):
        covered = written(tokens[unit_index * unit : unit_index * unit + 3])
        digest = hashlib.blake2s(part, digest_size=16).digest()
        person = struct.pack("<II", unit, lookahead)
        parent = hashlib.blake2s(digest + covered + parent, digest_size=16, person=person).digest()
        want.append(np.frombuffer(parent, "<u4").tolist())
    extras = hashing.extra_digests(extra, 0, 2, unit, lookahead)
    got = hashing.chain(np.array(tokens), unit, hashing.seed("salt", b"s" * 16), extras, lookahead)
    assert got.tolist() == want


def test_nothing_extra_is_sixteen_zeros():
    assert hashing.extra_digest(hashing.NO_EXTRA_KEYS, 0, 9) == bytes(16)
    assert np.array_equal(chain_of(TOKENS, 16), hashing.chain(TOKENS, 16, hashing.seed()))


# Host and device


@pytest.mark.parametrize(("unit", "lookahead"), [(1, 0), (2, 3), (7, 1), (16, 0), (64, 2)])
def test_the_jnp_chain_equals_the_host_chain(unit, lookahead):
    extra = ExtraKeys(Adapter("a"), (Media("cat", 30, 50),))
    count = hashing.key_count(len(TOKENS), unit, lookahead)
    device = jax.jit(hashing.chain_jnp, static_argnames=("unit", "lookahead"))
    device = functools.partial(device, TOKENS, unit=unit, parent=hashing.seed("tenant"), lookahead=lookahead)
    extras = hashing.extra_digests(extra, 0, count, unit, lookahead)
    host = hashing.chain(TOKENS, unit, hashing.seed("tenant"), extras, lookahead)
    assert np.array_equal(host, np.asarray(device(extras=extras)))
    plain = hashing.chain(TOKENS, unit, hashing.seed("tenant"), lookahead=lookahead)
    assert np.array_equal(plain, np.asarray(device(extras=None)))


def test_padding_behind_a_unit_and_its_lookahead_changes_no_key_before():
    padded = jnp.concatenate([TOKENS[:35], jnp.full(61, 9, jnp.int32)])
    keys = np.asarray(hashing.chain_jnp(padded, 16, jnp.asarray(hashing.seed()), lookahead=2))
    assert np.array_equal(keys[:2], hashing.chain(TOKENS[:35], 16, hashing.seed(), lookahead=2))
    assert hashing.chain_jnp(padded[:3], 16, jnp.asarray(hashing.seed()), lookahead=2).shape == (0, 4)


@pytest.mark.parametrize(("unit", "lookahead"), [(1, 0), (4, 1), (5, 0), (64, 0)])
def test_units_with_large_and_with_negative_tokens_are_hashed_alike_on_host_and_device(unit, lookahead):
    tokens = np.random.default_rng(1).integers(0, 1 << 20, 200).astype(np.int32)
    tokens[[3, 70, 71, 140]] = 1 << 20, -1, (1 << 20) - 1, -(1 << 31)
    keys = chain_of(tokens, unit, lookahead=lookahead)
    device = hashing.chain_jnp(jnp.asarray(tokens), unit, jnp.asarray(hashing.seed()), lookahead=lookahead)
    assert np.array_equal(keys, np.asarray(device))
    parent = hashing.seed().tobytes()
    for number, key in enumerate(keys):
        covered = written(tokens[number * unit : (number + 1) * unit + lookahead].tolist())
        person = struct.pack("<II", unit, lookahead)
        parent = hashlib.blake2s(bytes(16) + covered + parent, digest_size=16, person=person).digest()
        assert key.tobytes() == parent


def test_every_bit_of_every_token_counts():
    seen = set()
    for at in range(5):
        for bit in range(32):
            tokens = np.array([1, 2, 3, 4, 5], np.uint32)
            tokens[at] ^= np.uint32(1 << bit)
            seen.add(chain_of(tokens.view(np.int32), 5)[0].tobytes())
    assert len(seen) == 5 * 32


# Growing


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 200), max_size=12), unit=st.integers(1, 40), lookahead=st.integers(0, 9),
    media=st.lists(st.builds(Media, st.sampled_from("ab"), st.integers(0, 150), st.integers(1, 60)), max_size=4),
)  # fmt: skip
def test_a_chain_that_grows_equals_one_from_scratch(cuts, unit, lookahead, media):
    extra = ExtraKeys(Adapter("a"), tuple(media), np.arange(150, dtype=np.float32)[:, None])
    growing = hashing.KeyChain(unit, hashing.seed("s"), extra, lookahead)
    parts = [growing.extend(TOKENS[:end]) for end in [*sorted(cuts), len(TOKENS)]]
    whole = chain_of(TOKENS, unit, extra, lookahead, "s")
    assert np.array_equal(np.concatenate(parts), whole) and growing.units == len(whole)
    assert growing.extend(TOKENS[:5]).shape == (0, 4)


def test_a_step_hashes_only_the_units_it_completes(monkeypatch):
    real, ranges = hashing.extra_digest, []
    monkeypatch.setattr(hashing, "extra_digest", lambda *args: ranges.append(args[1:]) or real(*args))
    growing = hashing.KeyChain(4, hashing.seed(), ExtraKeys(Adapter("a")), lookahead=1)
    for end in range(1, 14):
        growing.extend(TOKENS[:end])
    assert ranges == [(0, 5), (4, 9), (8, 13)]


def test_a_key_exists_once_its_lookahead_does():
    assert [hashing.key_count(n, 4, 2) for n in (0, 1, 5, 6, 9, 10)] == [0, 0, 0, 1, 1, 2]
    assert chain_of(TOKENS[:31], 16).shape == (1, 4)
    assert chain_of(TOKENS[:3], 16).shape == (0, 4)


# What separates prefixes


def test_a_key_names_its_whole_prefix():
    tokens = np.zeros(64, np.int32)
    other = tokens.copy()
    other[0] = 1
    a, b = chain_of(tokens, 16), chain_of(other, 16)
    assert not any(equal_keys(a, b))
    assert len({row.tobytes() for row in a}) == 4


def test_a_key_proves_its_lookahead_and_nothing_further():
    for changed, same in ((17, [False]), (18, [True])):
        other = TOKENS[:33].copy()
        other[changed] ^= 1
        assert equal_keys(chain_of(TOKENS[:33], 16, lookahead=2), chain_of(other, 16, lookahead=2)) == same


def test_salts_and_secrets_separate_equal_tokens_from_the_first_unit_on():
    secret = b"0123456789abcdef"
    seeds = [("", b""), ("a", b""), ("b", b""), ("", secret), ("a", secret), ("", b"b" + secret), ("b", secret)]
    chains = [hashing.chain(TOKENS, 16, hashing.seed(*one)) for one in seeds]
    for unit in range(len(chains[0])):
        assert len({chain[unit].tobytes() for chain in chains}) == len(chains)
    assert np.array_equal(hashing.seed("a", secret), hashing.seed("a", secret))
    assert len({hashing.new_secret() for _ in range(3)}) == 3


def test_the_salt_is_in_the_seed_only():
    parent = chain_of(TOKENS[:16], 16, salt="a")[0]
    assert np.array_equal(hashing.chain(TOKENS[16:], 16, parent), chain_of(TOKENS, 16, salt="a")[1:])


def test_units_and_lookaheads_of_unlike_size_never_meet():
    tokens = np.zeros(200, np.int32)
    keys = [hashing.chain(tokens, *sizes)[0] for sizes in ((16, hashing.seed()), (15, hashing.seed(), None, 1))]
    assert not np.array_equal(*keys)


def parts(extra: ExtraKeys, *ranges: tuple[int, int]) -> list[bytes]:
    return [hashing.extra_digest(extra, *one) for one in ranges]


def test_media_count_by_content_and_offset_where_they_overlap():
    extra = ExtraKeys(media=(Media("a", 0, 5), Media("b", 10, 5)))
    want = [
        ExtraKeys(media=(Media("a", 0, 5),)),
        hashing.NO_EXTRA_KEYS,
        ExtraKeys(media=(Media("a", 0, 1), Media("b", 10, 1))),
    ]
    windows = [(0, 5), (6, 10), (0, 15)]
    assert parts(extra, *windows) == [hashing.extra_digest(one, *at) for one, at in zip(want, windows, strict=True)]
    # Seen from 3, an item that began at 0 lies at -3: as from 13 one that began at 10, and not as one at 0 or 3.
    assert parts(extra, (3, 8)) == parts(ExtraKeys(media=(Media("a", 10, 9),)), (13, 18))
    assert len({*parts(extra, (0, 5), (1, 5), (3, 8)), *parts(ExtraKeys(media=(Media("a", 3, 5),)), (0, 5))}) == 4


def test_an_item_that_only_the_lookahead_reaches_counts_and_is_seen_again():
    both = ExtraKeys(media=(Media("a", 3, 2), Media("b", 5, 1)))
    first = ExtraKeys(media=both.media[:1])
    for lookahead, seen in ((1, first), (2, both)):
        digests = hashing.extra_digests(both, 0, 2, 4, lookahead)
        assert digests[0].tobytes() == hashing.extra_digest(seen, 0, 8)
        assert digests[1].tobytes() == hashing.extra_digest(ExtraKeys(media=both.media[::-1]), 4, 8)
    assert np.array_equal(hashing.extra_digests(both, 1, 1, 4, 2), hashing.extra_digests(both, 0, 2, 4, 2)[1:])


def test_the_order_of_media_means_nothing_and_their_places_do():
    a, b = Media("a", 0, 4), Media("b", 4, 4)
    assert parts(ExtraKeys(media=(a, b)), (0, 8)) == parts(ExtraKeys(media=(b, a)), (0, 8))
    swapped = ExtraKeys(media=(Media("b", 0, 4), Media("a", 4, 4)))
    assert parts(ExtraKeys(media=(a, b)), (0, 8)) != parts(swapped, (0, 8))


def test_an_adapter_is_in_every_unit_by_name_and_path():
    chains = [
        chain_of(TOKENS, 16, ExtraKeys(adapter))
        for adapter in (None, Adapter("x"), Adapter("x", "/1"), Adapter("x", "/2"), Adapter("x/", "1"))
    ]
    for unit in range(12):
        assert len({chain[unit].tobytes() for chain in chains}) == len(chains)
    digests = hashing.extra_digests(ExtraKeys(Adapter("x")), 0, 3, 16)
    assert digests.any() and (digests == digests[0]).all()


def test_embeddings_count_by_the_rows_in_reach_their_type_and_shape():
    rows = np.arange(40, dtype=np.float32).reshape(20, 2)
    other = rows.copy()
    other[17] += 1
    near, far = (parts(ExtraKeys(embeddings=r), (0, 16), (0, 18)) for r in (rows, other))
    assert near[0] == far[0] and near[1] != far[1]
    forms = [rows, rows.view(np.int32), rows.astype(">f4"), rows.reshape(10, 4), rows[:, :1]]
    assert len({hashing.extra_digest(ExtraKeys(embeddings=r), 0, 20) for r in forms}) == len(forms)
    assert hashing.extra_digest(ExtraKeys(embeddings=rows), 20, 36) == bytes(16)


def test_no_kind_reads_as_another():
    text = "x"
    rows = np.frombuffer(b"xxxx", np.uint8).reshape(1, 4)
    kinds = [
        ExtraKeys(Adapter(text)), ExtraKeys(media=(Media(text, 0, 1),)), ExtraKeys(embeddings=rows),
        ExtraKeys(Adapter(text, text)), ExtraKeys(Adapter(text), (Media(text, 0, 1),)),
    ]  # fmt: skip
    keys = {chain_of(TOKENS[:16], 16, one)[0].tobytes() for one in kinds}
    keys |= {chain_of(TOKENS[:16], 16, salt=salt)[0].tobytes() for salt in ("", text)}
    assert len(keys) == len(kinds) + 2


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: hashing.seed(secret=b"short"), "secret: got 'bytes of length 5'"),
        (lambda: Adapter(""), "adapter.name: got ''"), (lambda: Media("", 0, 1), "media.content: got ''"),
        (lambda: Media("a", -1, 1), "media.offset: got -1"), (lambda: Media("a", 0, 0), "media.length: got 0"),
        (lambda: ExtraKeys(embeddings=np.zeros(3)), "extra_keys.embeddings: got 'ndarray'"),
        (lambda: hashing.KeyChain(0, hashing.seed()), "unit: got 0"),
        (lambda: hashing.KeyChain(4, hashing.seed(), lookahead=-1), "lookahead: got -1"),
        (lambda: hashing.chain(TOKENS, 16, hashing.seed(), np.zeros((3, 4), np.uint32)), "extras: got"),
    ],
)  # fmt: skip
def test_what_cannot_be_hashed_is_refused(make, named):
    with pytest.raises(UserError, match=named):
        make()


WRONG_TYPES = """
from hybrid_kv import hashing
from hybrid_kv.hashing import Adapter, ExtraKeys, KeyChain, Media, seed
for make in (
    lambda: seed(3), lambda: seed(secret="a" * 20), lambda: Adapter("a", None), lambda: Media(b"a", 0, 1),
    lambda: Media("a", 0.5, 1), lambda: ExtraKeys("x"), lambda: ExtraKeys(media=["x"]),
    lambda: ExtraKeys(embeddings=[[1.0]]), lambda: KeyChain(4, seed(), None),
):
    try:
        make()
    except hashing.UserError as error:
        print(error.field)
"""


def test_values_of_another_type_are_refused_by_name():
    # In an interpreter of its own, where nothing but the library checks types.
    done = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, check=True)
    want = ["salt", "secret", "adapter.path", "media.content", "media.offset", "extra_keys.adapter"]
    assert done.stdout.split() == [*want, "extra_keys.media", "extra_keys.embeddings", "extra_keys"]
