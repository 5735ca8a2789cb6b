"""Merge of partial attentions by their log-sum-exp.

l = log sum_m exp(l_m),  o = sum_m o_m exp(l_m - l), natural logs; an empty source has l_m = -inf.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.sums import steady_sum


def weights(
    lses: Float[Array, "M ..."],
) -> tuple[Float[Array, "M ..."], Float[Array, "..."]]:
    """Weight exp(l_m - l) of each source (0 for empties) and the total l (-inf if all are empty)."""
    top = jnp.max(lses, axis=0)
    # -inf minus -inf is NaN: an all-empty column takes reference 0, where exp(-inf) is 0.
    anchor = jnp.where(jnp.isneginf(top), 0.0, top)
    parts = jnp.exp(lses - anchor)
    total = steady_sum(parts, axis=0)[0]
    safe = jnp.where(total > 0, total, 1.0)
    return parts / safe, jnp.where(total > 0, anchor + jnp.log(safe), -jnp.inf)


def scaled(out: Float[Array, "... L"], weight: Float[Array, "..."]) -> Float[Array, "... L"]:
    """out * weight in fp32, exactly 0 where the weight is 0 even if `out` is NaN there."""
    weight = weight[..., None]
    return jnp.where(weight > 0, out.astype(jnp.float32) * weight, 0.0)


def merge_lse(
    outs: Float[Array, "M T N L"], lses: Float[Array, "M T N"]
) -> tuple[Float[Array, "T N L"], Float[Array, "T N"]]:
    """See `mla.api.merge_lse`. One partial and one accumulator are live at a time."""
    share, total = weights(lses.astype(jnp.float32))

    def add(acc, x):
        return acc + scaled(*x), None

    merged, _ = jax.lax.scan(add, jnp.zeros(outs.shape[1:], jnp.float32), (outs, share))
    return merged.astype(outs.dtype), total
