"""Decode context parallelism around an attention, for use under `shard_map`.

The W ranks of an axis hold different heads and different tokens. Queries are gathered, so that each rank attends to its
own tokens for all heads of the group; then the partial results go to the ranks that own the heads:

* reduce-scatter: every rank learns all LSEs, scales its partial by exp(l_r - l), and the scaled ones are summed on
  their way. Bytes a token and head of the group: out L, LSE 4 W.
* all-to-all: partials and LSEs of a head go to its owner, which merges them. No collective has to wait for the LSEs; W
  partials of the own heads are held, in all as much as one partial of all heads.

Only the latent width travels, never the context.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.mla import merge

Attend = Callable[[Array, Array], tuple[Array, Array]]


def gather_heads(
    q_latent: Float[Array, "T N L"], q_rope: Float[Array, "T N P"], axis: str
) -> tuple[Float[Array, "T WN L"], Float[Array, "T WN P"]]:
    """Absorbed queries of all heads of the group, in one collective."""
    both = jax.lax.all_gather(jnp.concatenate([q_latent, q_rope], axis=-1), axis, axis=1, tiled=True)
    return both[..., : q_latent.shape[-1]], both[..., q_latent.shape[-1] :]


def reduce_scatter(
    out: Float[Array, "T WN L"], lse: Float[Array, "T WN"], axis: str
) -> tuple[Float[Array, "T N L"], Float[Array, "T N"]]:
    """Merged output and LSE of the own heads, from this rank's partial of all heads."""
    share, total = merge.weights(jax.lax.all_gather(lse, axis))
    rank, heads = jax.lax.axis_index(axis), lse.shape[1] // jax.lax.axis_size(axis)
    mine = merge.scaled(out, share[rank]).astype(out.dtype)
    merged = jax.lax.psum_scatter(mine, axis, scatter_dimension=1, tiled=True)
    return merged, jax.lax.dynamic_slice_in_dim(total, rank * heads, heads, axis=1)


def all_to_all(
    out: Float[Array, "T WN L"], lse: Float[Array, "T WN"], axis: str
) -> tuple[Float[Array, "T N L"], Float[Array, "T N"]]:
    """The same by sending each head's partials to its owner."""

    def send(x: Array) -> Array:
        """[T, W N, ...] of this rank's tokens -> [W, T, N, ...] of the own heads, by the rank whose tokens they are."""
        ranks = jax.lax.axis_size(axis)
        parts = jnp.moveaxis(x.reshape(x.shape[0], ranks, -1, *x.shape[2:]), 1, 0)
        return jax.lax.all_to_all(parts, axis, split_axis=0, concat_axis=0)

    return merge.merge_lse(send(out), send(lse))


_COMBINE = {"reduce_scatter": reduce_scatter, "all_to_all": all_to_all}


def context_parallel(
    attend: Attend,
    q_latent: Float[Array, "T N L"],
    q_rope: Float[Array, "T N P"],
    axis: str,
    *,
    exchange: str = "reduce_scatter",
) -> tuple[Float[Array, "T N L"], Float[Array, "T N"]]:
    """Attention of the own heads to the tokens of all ranks.

    Args:
      attend: (q_latent, q_rope) of any heads -> partial output and LSE over the tokens of this rank.
      axis: mesh axis of the group; of size 1 it costs nothing.
      exchange: "reduce_scatter" or "all_to_all", see the module.

    Raises:
      ValueError: another exchange.
    """
    if exchange not in _COMBINE:
        raise ValueError(f"exchange: got {exchange!r}; there are {' and '.join(_COMBINE)}")
    if jax.lax.axis_size(axis) == 1:
        return attend(q_latent, q_rope)
    return _COMBINE[exchange](*attend(*gather_heads(q_latent, q_rope, axis)), axis)
