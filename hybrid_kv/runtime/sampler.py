"""Greedy, temperature, top-k and top-p sampling with a seed per request, on logits split over the tensor group.

No rank ever holds the logits of another: what travels is a number or two for each row and rank. Instead of sorting
the vocabulary, the lowest value that may be drawn is found bit by bit, from sums over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_kv.models.axes import TENSOR, tensor_rank, tensor_sum
from hybrid_kv.typing import Array, Float, Int32, UInt32
from pallas_kernels.rows import RaggedRows, tokens


class SamplingInputs(NamedTuple):
    """Per row: temperature (0: greedy), top_k (0: off), top_p (1: off), seed and position of the draw."""

    temperature: Float[Array, R]
    top_k: Int32[Array, R]
    top_p: Float[Array, R]
    seed: Int32[Array, R]
    position: Int32[Array, R]


def sample(logits: Float[Array, "R local"], inputs: SamplingInputs) -> Int32[Array, R]:
    """One token a row, equal on all ranks; runs under `shard_map`.

    logits: of this rank's part of the vocabulary, parts in the order of ranks. A draw depends on the row's logits,
    seed and position only, not on the mesh. A batch that is all greedy takes no draw.
    """
    chosen = jax.lax.cond(
        (inputs.temperature > 0).any(), lambda: _perturbed(logits, inputs), lambda: logits.astype(jnp.float32)
    )
    return _argmax(chosen)


def of_tokens(inputs: SamplingInputs, rows: RaggedRows, count: int) -> SamplingInputs:
    """Inputs of each of `count` packed tokens, for drawing what follows every token of a row.

    inputs: of the rows; `position` is that of the draw behind a row's last token, as in a step without drafts.
    """
    token = tokens(rows, count)
    each = SamplingInputs(*(field[token.row] for field in inputs))
    return each._replace(position=token.position + 1)


def standing(given: Int32[Array, T], drawn: Int32[Array, T], rows: RaggedRows, most: int) -> Int32[Array, R]:
    """How many tokens of each row stand: the first, and each draft that is what was drawn behind the token before.

    given: packed tokens; drawn: what was drawn behind each. most: tokens of a row at most.
    """
    place = rows.offset[:, None] + jnp.arange(most - 1)
    inside = jnp.arange(most - 1) < rows.length[:, None] - 1
    last = given.shape[0] - 1
    same = drawn[jnp.clip(place, 0, last)] == given[jnp.clip(place + 1, 0, last)]
    drafts = jnp.sum(jnp.cumprod((same & inside).astype(jnp.int32), axis=1), axis=1)
    return jnp.where(rows.length > 0, 1 + drafts, 0)


def _argmax(values: Float[Array, "R local"]) -> Int32[Array, R]:
    """Index of the greatest value over all ranks, the first of equals."""
    local = jnp.argmax(values, -1).astype(jnp.int32)
    best = jax.lax.all_gather(jnp.max(values, -1), TENSOR)
    index = jax.lax.all_gather(local + tensor_rank() * values.shape[1], TENSOR)
    return jnp.take_along_axis(index, jnp.argmax(best, 0)[None], 0)[0]


def _perturbed(logits: Float[Array, "R local"], inputs: SamplingInputs) -> Float[Array, "R local"]:
    """Logits of greedy rows; for others what is greatest where the draw falls (Gumbel noise on what may be drawn)."""
    scaled = logits / jnp.maximum(inputs.temperature, 1e-6)[:, None]
    noise = jax.vmap(_noise, in_axes=(0, 0, None))(inputs.seed, inputs.position, logits.shape[1])
    drawn = jnp.where(_allowed(scaled, inputs), scaled + noise, -jnp.inf)
    return jnp.where(inputs.temperature[:, None] > 0, drawn, logits)


def _noise(seed: jax.Array, position: jax.Array, local: int) -> Float[Array, " local"]:
    """Noise of a row for this rank's tokens; each token has a key of its own, whichever rank holds it."""
    key = jax.random.fold_in(jax.random.key(seed), position)
    token = tensor_rank() * local + jnp.arange(local)
    return jax.vmap(lambda t: jax.random.gumbel(jax.random.fold_in(key, t), (), jnp.float32))(token)


def _allowed(scaled: Float[Array, "R local"], inputs: SamplingInputs) -> Array:
    """Which values may be drawn: the top_k greatest, of those the greatest that reach top_p; ties stay together."""
    order = _ordered(scaled)
    top = jax.lax.pmax(jnp.max(scaled, -1), TENSOR)
    weight = jnp.exp(scaled - top[:, None])

    def count(floor: UInt32[Array, R]) -> Float[Array, R]:
        return tensor_sum(jnp.sum(order >= floor[:, None], -1, dtype=jnp.float32))

    k_floor = _greatest(lambda floor: count(floor) >= inputs.top_k.astype(jnp.float32), len(order))
    k_floor = jnp.where(inputs.top_k > 0, k_floor, 0)
    kept = jnp.where(order >= k_floor[:, None], weight, 0.0)

    def mass(floor: UInt32[Array, R]) -> Float[Array, R]:
        return tensor_sum(jnp.sum(jnp.where(order >= floor[:, None], kept, 0.0), -1))

    wanted = inputs.top_p * tensor_sum(jnp.sum(kept, -1))

    def reached(floor: UInt32[Array, R]) -> Array:
        held = mass(floor)
        return (held >= wanted) & (held > 0)  # top_p may round to 0; the greatest value always stays

    p_floor = jnp.where(inputs.top_p < 1, _greatest(reached, len(order)), 0)
    return order >= jnp.maximum(k_floor, p_floor)[:, None]


def _ordered(x: Float[Array, "R local"]) -> UInt32[Array, "R local"]:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _greatest(holds: Callable[[UInt32[Array, R]], Array], rows: int) -> UInt32[Array, R]:
    """The greatest integer of each row that `holds`, which it does for all below; 0 if for none."""

    def bit(i: jax.Array, found: UInt32[Array, R]) -> UInt32[Array, R]:
        tried = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(tried), tried, found)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(rows, jnp.uint32))
