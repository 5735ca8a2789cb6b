"""The hash chain: names whole prefixes, extends, and is the same on host and device."""

import jax
import numpy as np
import pytest

from hybrid_kv import hashing


@pytest.mark.parametrize("unit", [1, 2, 7, 16, 64])
def test_the_jnp_chain_equals_the_host_chain(unit):
    tokens = np.random.default_rng(unit).integers(0, 1 << 20, 200).astype(np.int32)
    host = hashing.chain(tokens, unit, hashing.seed("tenant"))
    device = jax.jit(hashing.chain_jnp, static_argnums=1)(tokens, unit, hashing.seed("tenant"))
    assert np.array_equal(host, np.asarray(device))


def test_extending_a_chain_equals_hashing_from_scratch():
    tokens = np.arange(100, dtype=np.int32)
    whole = hashing.chain(tokens, 8, hashing.seed())
    first = hashing.chain(tokens[:40], 8, hashing.seed())
    rest = hashing.chain(tokens[40:], 8, first[-1])
    assert np.array_equal(whole, np.concatenate([first, rest]))


def test_a_key_names_its_whole_prefix():
    tokens = np.zeros(64, np.int32)
    other = tokens.copy()
    other[0] = 1
    a, b = (hashing.chain(t, 16, hashing.seed()) for t in (tokens, other))
    assert not (a == b).all(1).any()
    assert len({row.tobytes() for row in a}) == 4


def test_salts_secrets_and_extras_separate_equal_tokens():
    tokens = np.arange(32, dtype=np.int32)
    seeds = [hashing.seed(), hashing.seed("a"), hashing.seed("b"), hashing.seed("", b"a"), hashing.seed("a", b"a")]
    chains = [hashing.chain(tokens, 16, s) for s in seeds]
    chains.append(hashing.chain(tokens, 16, seeds[0], [b"x" * 16, bytes(16)]))
    assert len({c.tobytes() for c in chains}) == len(chains)


def test_a_part_of_a_unit_has_no_key():
    assert hashing.chain(np.arange(31, dtype=np.int32), 16, hashing.seed()).shape == (1, 4)
    assert hashing.chain(np.arange(3, dtype=np.int32), 16, hashing.seed()).shape == (0, 4)
