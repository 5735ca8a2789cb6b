"""How the residual stream lies on the tensor group: whole on every rank, or split by tokens.

Mixers and feed-forwards read the same with either. They are given the tokens that a rank holds, compute on all tokens
of the step, and give what is to be added to the tokens that the rank holds:

    x = layout.gather(x)              all tokens
    y = ...                           partial sums over some axes of the group, equal over the others
    return layout.reduce(y, axes)     complete sums of the tokens that this rank holds

Split by tokens, rank r of n holds tokens r T / n to (r + 1) T / n - 1. A reduce-scatter and the next gather send
together what a sum for everyone sends, and all that is between them, norms and the mixes of the attention residual with
their bank, is 1 / n of the work and of the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from hybrid_kv.errors import UserError
from hybrid_kv.models.axes import DCP, MODEL, TENSOR, tensor_rank, tensor_sum
from hybrid_kv.typing import Array, Float, Int32
from pallas_kernels.sums import steady_sum


class Replicated:
    """Every rank holds all tokens."""

    def gather(self, x: Float[Array, "held D"]) -> Float[Array, "T D"]:
        """What all ranks hold."""
        return x

    def reduce(self, y: Float[Array, "T D"], axes: tuple[str, ...] = TENSOR) -> Float[Array, "held D"]:
        """Sum over those axes of the tensor group that y is a partial sum over, of the tokens that this rank holds.

        y: the same along all other axes of the group.
        """
        return tensor_sum(y, axes)

    def own(self, y: Float[Array, "T *values"]) -> Float[Array, "held *values"]:
        """The tokens that this rank holds, of what is equal on all ranks."""
        return y

    def pick(
        self, read: Callable[[Int32[Array, "Q"]], Float[Array, "Q D"]], wanted: Int32[Array, "Q"], held: int
    ) -> Float[Array, "Q D"]:
        """What `read` makes of the wanted tokens, on all ranks.

        read: takes indices of tokens among those that this rank holds. wanted: tokens of the step. held: tokens that
        this rank holds.
        """
        return read(wanted)


@dataclass(frozen=True)
class BySequence(Replicated):
    """Every rank holds its part of the tokens; the tensor group has to divide those of a step.

    exchange: collective of the scattered sum, "reduce_scatter" or "all_to_all". Both send as much; where XLA makes a
    sum for everyone of the former, which sends twice as much, the latter stays what it is and adds up in fp32.
    """

    exchange: str = "reduce_scatter"

    def gather(self, x: Float[Array, "held D"]) -> Float[Array, "T D"]:
        return jax.lax.all_gather(x, TENSOR, axis=0, tiled=True)

    def reduce(self, y: Float[Array, "T D"], axes: tuple[str, ...] = TENSOR) -> Float[Array, "held D"]:
        mine = _held_along(y, axes)
        if not axes:
            return mine
        if self.exchange == "reduce_scatter":
            return jax.lax.psum_scatter(mine, axes, scatter_dimension=0, tiled=True)
        parts = mine.reshape(jax.lax.axis_size(axes), -1, y.shape[1])
        parts = jax.lax.all_to_all(parts, axes, split_axis=0, concat_axis=0, tiled=True)
        return steady_sum(parts.astype(jnp.float32), axis=0)[0].astype(y.dtype)

    def own(self, y: Float[Array, "T *values"]) -> Float[Array, "held *values"]:
        return _held_along(y, ())

    def pick(
        self, read: Callable[[Int32[Array, "Q"]], Float[Array, "Q D"]], wanted: Int32[Array, "Q"], held: int
    ) -> Float[Array, "Q D"]:
        if 2 * wanted.shape[0] >= jax.lax.axis_size(TENSOR) * held:  # a sum would send them twice
            return self.gather(read(jnp.arange(held)))[wanted]
        local = wanted - tensor_rank() * held
        mine = (local >= 0) & (local < held)
        return tensor_sum(jnp.where(mine[:, None], read(jnp.clip(local, 0, held - 1)), 0))


def _held_along(y: Float[Array, "T *values"], axes: tuple[str, ...]) -> Float[Array, "some *values"]:
    """The tokens that this rank and those along `axes` hold, in the order of ranks."""
    ranks = jax.lax.axis_size(TENSOR)
    if y.shape[0] % ranks:
        fix = f"a stream split by tokens takes a multiple of the {ranks} devices of a tensor group: fill the step up"
        raise UserError("tokens", y.shape[0], fix)
    parts = y.reshape(jax.lax.axis_size(MODEL), jax.lax.axis_size(DCP), -1, *y.shape[1:])
    for place, axis in enumerate(TENSOR):
        if axis not in axes:
            parts = jax.lax.dynamic_index_in_dim(parts, jax.lax.axis_index(axis), place)
    return parts.reshape(-1, *y.shape[1:])
