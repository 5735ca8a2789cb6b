"""Choice of experts: sigmoid scores, correction bias for selection, optional groups."""

import jax
import jax.numpy as jnp

from hybrid_kv.typing import Array, Float, Int32


def route(
    logits: Float[Array, "T X"],
    bias: Float[Array, "X"],
    *,
    top_k: int,
    scaling: float,
    renormalize: bool,
    groups: int = 1,
    groups_kept: int = 1,
    biased_weights: bool = False,
) -> tuple[Int32[Array, "T k"], Float[Array, "T k"]]:
    """Experts of each token and their weights, fp32.

    Selection is by score + bias. With groups > 1 each group is scored by the sum of its two best biased
    scores, the best `groups_kept` stay, and experts of the others are excluded (-inf, not zero).
    Weights are the unbiased scores of the chosen experts, unless `biased_weights`.
    """
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    biased = scores + bias.astype(jnp.float32)
    choice = biased
    if groups > 1:
        grouped = biased.reshape(biased.shape[0], groups, -1)
        best = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        _, kept = jax.lax.top_k(best, groups_kept)
        stays = jnp.any(kept[:, :, None] == jnp.arange(groups), axis=1)
        choice = jnp.where(stays[:, :, None], grouped, -jnp.inf).reshape(biased.shape)
    _, ids = jax.lax.top_k(choice, top_k)
    weights = jnp.take_along_axis(biased if biased_weights else scores, ids, axis=1)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return ids, weights * scaling


def selection_margin(
    logits: Float[Array, "T X"], bias: Float[Array, "X"], *, top_k: int, groups: int = 1, groups_kept: int = 1
) -> Float[Array, "T"]:
    """How far, in biased score, each token was from choosing another expert (or group of experts).

    Below the rounding noise of fp32 the choice depends on the order in which sums were formed.
    """
    biased = jax.nn.sigmoid(logits.astype(jnp.float32)) + bias.astype(jnp.float32)

    def gap(scores: Array, kept: int) -> Array:
        if kept >= scores.shape[-1]:
            return jnp.full(scores.shape[0], jnp.inf)
        best = jax.lax.top_k(scores, kept + 1)[0]
        return best[:, kept - 1] - best[:, kept]

    if groups == 1:
        return gap(biased, top_k)
    grouped = biased.reshape(biased.shape[0], groups, -1)
    best = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
    _, kept = jax.lax.top_k(best, groups_kept)
    stays = jnp.any(kept[:, :, None] == jnp.arange(groups), axis=1)
    inside = jnp.where(stays[:, :, None], grouped, -jnp.inf).reshape(biased.shape)
    return jnp.minimum(gap(best, groups_kept), gap(inside, top_k))


def combine_matrix(ids: Int32[Array, "T k"], weights: Float[Array, "T k"], experts: int) -> Float[Array, "T X"]:
    """Weight of every expert for every token, 0 for those not chosen."""
    chosen = ids[:, :, None] == jnp.arange(experts)
    return jnp.sum(jnp.where(chosen, weights[:, :, None], 0.0), axis=1)
