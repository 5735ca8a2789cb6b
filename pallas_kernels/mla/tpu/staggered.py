"""Products of many rows: lanes one behind the other.

Side by side (`products`), the matrix units wait while all lanes weigh. With rows enough to fill them, the scores of a
lane are multiplied beside the weights of the lane before and the weighted latents of the one before that. The compiler
keeps near program order, so the order in which the parts are written is what overlaps.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mla.pages import LANES
from pallas_kernels.mla.tpu.outputs import wide
from pallas_kernels.mla.tpu.products import Products, dot

# Columns of a matrix unit.
_WIDE = 256
# Half lanes from the scores of a lane to its weights and to its weighted latents; measured.
_WEIGHTS, _VALUES = 3, 5


class Staggered(Products):
    """Scores by half of the keys, weights by token, weighted latents by columns."""

    def multiply(self, slot, beside) -> None:
        """All lanes through one block each; `beside(lane)` is written ahead of all products."""
        shape = self.shape
        if not shape.staggered:
            super().multiply(slot, beside)
            return
        scores: dict[Any, Any] = {}
        weights: dict[Any, Any] = {}
        for lane in range(shape.lanes):
            beside(lane)
        biases = [self.biases(lane) for lane in range(shape.lanes)]

        def score(lane, half):
            scores[lane, half] = self._half_scores(slot, lane, half)

        def weigh(lane, token):
            rows = slice(token * shape.heads, (token + 1) * shape.heads)
            found = jnp.concatenate([scores[lane, half][rows] for half in range(2)], axis=1)
            weights[lane, token] = self.weigh(lane, self.capped(found) + biases[lane][token], rows)

        def add(lane, part):
            weight, fade = (
                jnp.concatenate([weights[lane, token][i] for token in range(shape.queries)], axis=0) for i in range(2)
            )  # fmt: skip
            self._add_columns(slot, lane, slice(part * _WIDE, min((part + 1) * _WIDE, shape.latent)), weight, fade)

        stages = ((score, 2, 0), (weigh, shape.queries, _WEIGHTS), (add, -(-shape.latent // _WIDE), _VALUES))
        work = [
            (2 * lane + behind + 2 * part / parts, order, stage, lane, part)
            for order, (stage, parts, behind) in enumerate(stages)
            for lane in range(shape.lanes)
            for part in range(parts)
        ]
        for _, _, stage, lane, part in sorted(work, key=lambda item: item[:2]):
            stage(lane, part)

    def _groups(self, slot, lane, groups):
        """[rows, 128] of groups of all pages of a block, one group below the other."""
        pages = range(self.shape.blocks.pages)
        buffer, lane = self.held(lane)
        rows = [buffer[slot, self.place(lane, i, group)] for group in groups for i in pages]
        return self.rows(jnp.concatenate(rows, axis=0))

    def _half_scores(self, slot, lane, half) -> jax.Array:
        """[Q N, keys / 2] scores in base 2 of the first or second halves of pages: latents and tails in one product.

        A row of tails has those of both halves; the query is 0 where the other one is.
        """
        refs, shape, place = self.refs, self.shape, self.lanes.query[lane]
        query = refs.queries[place].reshape(shape.rows, shape.latent)
        tail = refs.tails[place, :, half].reshape(shape.rows, LANES)
        planes = [*(2 * plane + half for plane in range(shape.latent // LANES)), shape.blocks.groups - 1]
        keys = jnp.concatenate([self._groups(slot, lane, [plane]) for plane in planes], axis=1)
        return dot(jnp.concatenate([query, tail], axis=1), keys, 1)

    def _add_columns(self, slot, lane, columns, weight, fade) -> None:
        """Adds some columns of the weighted latents."""
        planes = range(columns.start // LANES, columns.stop // LANES)
        latent = jnp.concatenate([self._groups(slot, lane, [2 * i, 2 * i + 1]) for i in planes], axis=1)
        acc, at = self.refs.acc, (self.lanes.acc[lane], slice(None), columns)
        acc[at] = acc[at] * wide(fade, latent.shape[1]) + dot(weight, latent, 0)
