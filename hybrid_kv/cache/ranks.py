"""Prefix counts over a few thousand lanes in two or three passes, and order without sorting.

A cumulative sum compiles to a scan of logarithmic depth, some twenty small loops; counting the bits of packed words
takes three, whatever the number of lanes. A sort is a call out of the program (`schedule.programs`): what is to be put
in order here is short, or several runs that are in order already.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def sorted_few(values: jax.Array) -> jax.Array:
    """A few numbers in ascending order, all compared with all: i32[n] -> i32[n]."""
    return jnp.zeros_like(values).at[merged([values])].set(values)


def merged(runs: Sequence[jax.Array], ascending: Sequence[bool] = ()) -> jax.Array:
    """Place of every lane of several runs i32[n], one after the other, in the stable ascending order of all: i32[sum].

    ascending: of each run, whether it is in order already (left out: none is); only such a run may be long.
    """
    known = [*ascending, *[False] * (len(runs) - len(ascending))]
    places = []
    for a, keys in enumerate(runs):
        place = jnp.arange(keys.shape[0], dtype=jnp.int32) if known[a] else _before_each(keys, keys, by_lane=True)
        for b, others in enumerate(runs):
            if a != b and known[b]:
                side = "right" if b < a else "left"
                place += jnp.searchsorted(others, keys, side=side, method="scan").astype(jnp.int32)
            elif a != b:
                place += _before_each(keys, others, ties=b < a)
        places.append(place)
    return jnp.concatenate(places)


def _before_each(keys: jax.Array, others: jax.Array, ties: bool = False, by_lane: bool = False) -> jax.Array:
    """How many of `others` go before each key. ties: equal ones do; by_lane: those of them in a lower lane do."""
    less, same = others[None, :] < keys[:, None], others[None, :] == keys[:, None]
    if by_lane:
        same &= jnp.arange(others.shape[0])[None, :] < jnp.arange(keys.shape[0])[:, None]
    before = less | same if ties or by_lane else less
    return before.sum(1, dtype=jnp.int32)


def _padded(values: jax.Array) -> jax.Array:
    return jnp.pad(values, (0, -values.shape[0] % _WORD))


def _before(counts: jax.Array) -> jax.Array:
    """Exclusive sums: a few numbers all against all, many in words again."""
    count = counts.shape[0]
    if count > _WORD:
        return sums(counts)
    lane = jnp.arange(count)
    return jnp.where(lane[:, None] < lane[None, :], counts[:, None], 0).sum(0, dtype=jnp.int32)
