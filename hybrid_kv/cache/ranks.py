"""Prefix counts over a few thousand lanes in two or three passes.

A cumulative sum compiles to a scan of logarithmic depth, some twenty small loops; counting the bits of packed words
takes three, whatever the number of lanes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_WORD = 32


def ranks(mask: jax.Array) -> jax.Array:
    """Marked lanes before each lane: bool[n] -> i32[n]."""
    count = mask.shape[0]
    bits = _padded(mask.astype(jnp.uint32)).reshape(-1, _WORD)
    shift = jnp.arange(_WORD, dtype=jnp.uint32)
    words = (bits << shift).sum(1, dtype=jnp.uint32)
    base = _before(jax.lax.population_count(words).astype(jnp.int32))
    below = words[:, None] & ((jnp.uint32(1) << shift) - 1)
    return (jax.lax.population_count(below).astype(jnp.int32) + base[:, None]).reshape(-1)[:count]


def sums(values: jax.Array) -> jax.Array:
    """Sum of the lanes before each lane: i32[n] -> i32[n]."""
    words = _padded(values).reshape(-1, _WORD)
    inside = jnp.where(jnp.tri(_WORD, k=-1, dtype=bool), words[:, None, :], 0).sum(2, dtype=jnp.int32)
    base = _before(words.sum(1, dtype=jnp.int32))
    return (inside + base[:, None]).reshape(-1)[: values.shape[0]]


def ragged(before: jax.Array, items: jax.Array) -> jax.Array:
    """Lane that each item of a ragged list belongs to.

    before: i32[n] `sums` of the lanes' lengths. items: i32[w] positions in the list, within its length. -> i32[w].
    """
    most = jnp.iinfo(jnp.int32).max
    padding = -before.shape[0] % _WORD
    words = jnp.pad(before, (0, padding), constant_values=most).reshape(-1, _WORD)
    word = (words[None, :, 0] <= items[:, None]).sum(1, dtype=jnp.int32) - 1
    inside = (words[word] <= items[:, None]).sum(1, dtype=jnp.int32) - 1
    return word * _WORD + inside


def _padded(values: jax.Array) -> jax.Array:
    return jnp.pad(values, (0, -values.shape[0] % _WORD))


def _before(counts: jax.Array) -> jax.Array:
    """Exclusive sums: a few numbers all against all, many in words again."""
    count = counts.shape[0]
    if count > _WORD:
        return sums(counts)
    lane = jnp.arange(count)
    return jnp.where(lane[:, None] < lane[None, :], counts[:, None], 0).sum(0, dtype=jnp.int32)
