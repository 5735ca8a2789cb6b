"""Rank-Q updates of states on the MXU: sum over t of w_t u_t^T for each head, w and u [Q, H, .] with heads on sublanes.

On the VPU each w_t would have to be spread over lanes, which costs more XLU time than a whole decode step has. So
w is transposed once for eight heads, all tokens and all pairs of bf16 parts lying along lanes, and each head brings a
right side in which only its own u are not zero. The sum over the parts and tokens is then the contraction.

Where eight heads belong to several requests, zero times a w that is not finite would carry one's accident into
another's state. Such a w is left out there and its u, which no other head meets, made NaN.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda.tpu.products import split

# Pairs of parts of w and u whose products are kept.
_PAIRS = {2: ((0, 0), (0, 1), (1, 0)), 3: ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))}


class Corrections:
    """w_t u_t^T summed over t, of one head at a time."""

    def __init__(self, w: list[jax.Array], u: list[jax.Array], parts: int, mixed: bool) -> None:
        """Prepares all heads.

        Args:
          w, u: for each token [H, K] and [H, V] fp32.
          parts: bf16 parts, 3 for fp32 accuracy.
          mixed: whether eight neighbouring heads may belong to several requests.
        """
        pairs = _PAIRS[parts]
        if mixed:
            broken = [jnp.sum(x * 0.0, axis=1, keepdims=True) for x in w]  # 0 or NaN
            u = [x + b for x, b in zip(u, broken, strict=True)]
            w = [jnp.where(x * 0.0 == 0.0, x, 0.0) for x in w]
        self.left, self.right = [], []
        for first in range(0, w[0].shape[0], 8):
            w_parts = [split(_tile(x, first), parts) for x in w]
            u_parts = [split(_tile(x, first), parts) for x in u]
            rows = jnp.concatenate([x[i] for i, _ in pairs for x in w_parts], axis=0)
            self.left.append(rows.T.astype(jnp.bfloat16))
            self.right.append(jnp.concatenate([x[j] for _, j in pairs for x in u_parts], axis=0))

    def of(self, h: int) -> jax.Array:
        """[K, V] fp32 of head h."""
        tile, place = divmod(h, 8)
        right = self.right[tile]
        mine = lax.broadcasted_iota(jnp.int32, right.shape, 0) % 8 == place
        return jnp.dot(
            self.left[tile], jnp.where(mine, right, 0.0).astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )


def _tile(x: jax.Array, first: int) -> jax.Array:
    """Eight heads of x, with zeros behind the last."""
    x = x[first : first + 8]
    spare = 8 - x.shape[0]
    return jnp.concatenate([x, jnp.zeros((spare, x.shape[1]), x.dtype)], axis=0) if spare else x
