"""Greedy, temperature, top-k and top-p sampling with a seed per request."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_kv.typing import Array, Float, Int32


class SamplingInputs(NamedTuple):
    """Per row: temperature (0: greedy), top_k (0: off), top_p (1: off), seed and position of the draw."""

    temperature: Float[Array, R]
    top_k: Int32[Array, R]
    top_p: Float[Array, R]
    seed: Int32[Array, R]
    position: Int32[Array, R]


def sample(logits: Float[Array, "R vocabulary"], inputs: SamplingInputs) -> Int32[Array, R]:
    """One token a row. A draw depends on the row's logits, seed and position only.

    A batch that is all greedy takes no sort.
    """
    greedy = jnp.argmax(logits, -1).astype(jnp.int32)
    drawn = jax.lax.cond((inputs.temperature > 0).any(), lambda: _draw(logits, inputs), lambda: greedy)
    return jnp.where(inputs.temperature > 0, drawn, greedy)


def _draw(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    scaled = logits / jnp.maximum(inputs.temperature, 1e-6)[:, None]
    ranked = jnp.sort(scaled, -1, descending=True)
    vocabulary = logits.shape[1]
    k = jnp.where(inputs.top_k > 0, jnp.minimum(inputs.top_k, vocabulary), vocabulary)
    share = jax.nn.softmax(jnp.where(jnp.arange(vocabulary) < k[:, None], ranked, -jnp.inf), -1)
    # A token stays if the share of those ranked before it is below top_p, so the first does, also
    # where top_p rounds to 0 in fp32.
    before = jnp.cumsum(share, -1) - share
    kept = (before < inputs.top_p[:, None]) & (jnp.arange(vocabulary) < k[:, None])
    kept |= jnp.arange(vocabulary) == 0
    floor = jnp.where(kept, ranked, jnp.inf).min(-1)
    allowed = jnp.where(scaled >= floor[:, None], scaled, -jnp.inf)

    def one(row, seed, position):
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), row)

    return jax.vmap(one)(allowed, inputs.seed, inputs.position).astype(jnp.int32)
