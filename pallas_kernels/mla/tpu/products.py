"""Products and softmax: all lanes through one block each."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mla.pages import LANES
from pallas_kernels.mla.tpu.outputs import UNSEEN, wide
from pallas_kernels.mla.tpu.state import Work

# Share of the lanes whose copies are written with the weights where lanes have several buffers; measured.
_NEAR = 5 / 8


class Products(Work):
    """The straight-line code."""

    def multiply(self, slot, beside) -> None:
        """All lanes through one block each.

        `beside(lane)` starts copies, and the compiler keeps loads of a buffer behind copies into it. So it is written
        with the weights, where no buffer is read. Where lanes have several buffers, a part of it stands with products
        of other lanes, since scalar work takes longer than the weights.
        """
        shape = self.shape
        each = shape.lanes // shape.groups
        parts = [range(g * each, (g + 1) * each) for g in range(shape.groups)]
        scores: dict[int, Any] = {}
        weights: dict[int, Any] = {}
        near = round(each * _NEAR) if shape.buffers > 1 else each

        def weigh(part):
            for lane in part:
                if lane % each < near:
                    beside(lane)
                weights[lane] = self.weigh(lane, scores.pop(lane))

        def ahead(lane):
            if lane < shape.lanes and lane % each >= near:
                beside(lane)

        for lane in parts[0]:
            scores[lane] = self.scores(slot, lane)
            ahead(lane + each)
        weigh(parts[0])
        for earlier, part in itertools.pairwise(parts):
            for done, lane in zip(earlier, part, strict=True):
                self.values(slot, done, *weights.pop(done))
                scores[lane] = self.scores(slot, lane)
                ahead(lane + each)
            weigh(part)
        for first, lane in zip(parts[0], parts[-1], strict=True):
            self.values(slot, lane, *weights.pop(lane))
            ahead(first)

    def rows(self, x) -> Any:
        """Rows as they enter products; the interpreter of some platforms has no mixed ones."""
        return x.astype(jnp.bfloat16) if self.interpreted else x

    def _latent(self, slot, lane):
        """[keys, L] latents of a block, put together from its planes."""
        (buffer, lane), blocks = self.held(lane), self.shape.blocks
        planes = []
        for plane in range(self.shape.latent // LANES):
            places = [self.place(lane, i, 2 * plane + half) for half in range(2) for i in range(blocks.pages)]
            halves = [buffer[slot, place] for place in places]
            planes.append(jnp.concatenate(halves, axis=0))
        return self.rows(jnp.concatenate(planes, axis=1))

    def scores(self, slot, lane) -> jax.Array:
        """[Q N, keys] scores in base 2, unseen keys far below."""
        refs, shape, state = self.refs, self.shape, self.lanes
        rows, blocks = shape.rows, shape.blocks
        place = state.query[lane]
        query = refs.queries[place].reshape(rows, shape.latent)
        tail = jnp.concatenate([refs.tails[place, :, half].reshape(rows, LANES) for half in range(2)], axis=0)
        buffer, held = self.held(lane)
        pages = [buffer[slot, self.place(held, i, blocks.groups - 1)] for i in range(blocks.pages)]
        tails = jnp.concatenate(pages, axis=0)
        score = dot(query, self._latent(slot, lane), 1)
        both = dot(tail, self.rows(tails), 1)
        score += jnp.concatenate([both[:rows], both[rows:]], axis=1)
        score = self.capped(score)
        bias = [jnp.broadcast_to(b, (shape.heads, b.shape[1])) for b in self.biases(lane)]
        return score + (jnp.concatenate(bias, axis=0) if shape.queries > 1 else bias[0])

    def capped(self, score) -> jax.Array:
        """Scores in base 2, with the soft cap if there is one."""
        cap = self.shape.visible.soft_cap
        return score if cap is None else jnp.tanh(score) * (cap * math.log2(math.e))

    def biases(self, lane) -> list[jax.Array]:
        """[1, keys] for each token of a unit: 0 for keys that it sees, far below for others. The lane goes on."""
        refs, shape, state = self.refs, self.shape, self.lanes
        visible = shape.visible
        block = state.block[lane]
        state.block[lane] += 1
        turn: Any = 0 if shape.period == 1 else jax.lax.rem(block, shape.period)
        first = (block - turn) * shape.span
        place = refs.place[turn] + refs.hidden[lane]
        found = []
        for token in range(shape.queries):
            own = state.position[lane] - first + token
            seen = place <= own if visible.causal else place < state.end[lane] - first
            if visible.window is not None:
                seen &= place > own - visible.window
            found.append(jnp.where(seen, 0.0, UNSEEN))
        return found

    def weigh(self, lane, score, rows=slice(None)) -> tuple[jax.Array, jax.Array]:
        """Weights of the block in bf16 and the factor of what was before, for some rows; updates maximum and sum.

        Maximum, sum and factor lie in all 128 lanes, since a column would have to be spread for each use.
        """
        refs, at = self.refs, (self.lanes.acc[lane], rows)
        keys = score.shape[1]
        old = refs.top[at]
        top = jnp.maximum(old, jnp.max(score, axis=1, keepdims=True))
        fade = jnp.exp2(old - top)
        weight = jnp.exp2(score - wide(top, keys))
        if keys % LANES:
            share = jnp.sum(weight, axis=1, keepdims=True) * (1 / LANES)
        else:
            share = functools.reduce(jnp.add, [weight[:, i : i + LANES] for i in range(0, keys, LANES)])
        refs.total[at] = refs.total[at] * fade + share
        refs.top[at] = top
        return weight.astype(jnp.bfloat16), fade

    def values(self, slot, lane, weight, fade) -> None:
        """Adds the weighted latents."""
        refs, acc = self.refs, self.lanes.acc[lane]
        refs.acc[acc] = refs.acc[acc] * wide(fade, self.shape.latent) + dot(weight, self._latent(slot, lane), 0)


def dot(a, b, axis) -> jax.Array:
    """a [m, k] with b [n, k] (axis 1) or [k, n] (axis 0), in fp32."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
