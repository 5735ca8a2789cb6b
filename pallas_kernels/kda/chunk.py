"""The chunk form of KDA: everything of a chunk that does not depend on the incoming state.

With G the inclusive cumulative log decay inside the chunk and i, j rows of it:

    A^qk_ij = scale q_i . (k_j exp(G_i - G_j))          i >= j
    M_ij    = beta_i k_i . (k_j exp(G_i - G_j))         i >  j
    X       = (I + M)^-1
    w       = X diag(beta) (k exp G)        u0 = X diag(beta) v
    u       = u0 - w S                      the corrections of the delta rule
    o       = (scale q exp G) S + A^qk u
    S'      = diag(exp G_C) S + (k exp(G_C - G))^T u

exp(G_i - G_j) does not factor safely through one reference, so scores are built by recursive halving:
two neighbouring blocks of s rows meet at the last row of the earlier one, and both factors, exp(sum of g
from the edge to i) and exp(sum of g from j to the edge), are at most 1 whatever the gate. All
sums are segment sums, constant 0/1 masks applied to g, never differences of a long cumulative sum. The
inverse follows the same recursion: its off-diagonal block is -X_b M_ba X_a.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import Precision
from jaxtyping import Array, Float, Int32

# Below this block size a product is a fused multiply and sum: a matrix product of 4 rows costs
# more in calls than in arithmetic.
_DIRECT = 8


class ChunkTerms(NamedTuple):
    """Terms of a chunk, named as in the formulas above; q_decayed = scale q exp G, kg = k exp(G_C - G)."""

    a_qk: Float[Array, "... C C"]
    w: Float[Array, "... C K"]
    u0: Float[Array, "... C V"]
    q_decayed: Float[Array, "... C K"]
    kg: Float[Array, "... C K"]
    decay: Float[Array, "... K"]


def matmul(a: Float[Array, "... m k"], b: Float[Array, "... k n"]) -> Float[Array, "... m n"]:
    """Matrix product in full fp32."""
    return jnp.matmul(a, b, precision=Precision.HIGHEST)


def _product(a: Float[Array, "... s s"], b: Float[Array, "... s s"]) -> Float[Array, "... s s"]:
    """a b of square blocks."""
    if a.shape[-2] < _DIRECT:
        return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)
    return matmul(a, b)


def _lower(
    a: Float[Array, "... s s"], ba: Float[Array, "... s s"], b: Float[Array, "... s s"]
) -> Float[Array, "... s2 s2"]:
    """The block matrix [[a, 0], [ba, b]]."""
    upper = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([ba, b], axis=-1)], axis=-2)


def segment_masks(chunk: int) -> np.ndarray:
    """0/1 masks [log2(chunk) + 2, chunk, chunk]; mask @ g are the segment sums each row needs.

    For the level with blocks of s rows: of a row in a later block (odd number) the sum from the block's
    first row to the row, of a row in an earlier block the sum behind the row to the block's last. Then
    two masks for the whole chunk: up to the row, and behind it.
    """
    i, m = np.arange(chunk)[:, None], np.arange(chunk)[None, :]
    masks = []
    s = 1
    while s < chunk:
        inside = i // s == m // s
        masks.append(inside & np.where(i // s % 2 == 1, m <= i, m > i))
        s *= 2
    return np.array([*masks, m <= i, m > i], np.float32)


def _blocks(x: Float[Array, "... C d"], s: int) -> Float[Array, "... n s d"]:
    """Rows cut into blocks of s."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // s, s, x.shape[-1])


def _pairs(x: Float[Array, "... n s d"]) -> tuple[Float[Array, "... h s d"], Float[Array, "... h s d"]]:
    """Earlier and later block of each pair of neighbours."""
    return x[..., 0::2, :, :], x[..., 1::2, :, :]


def chunk_terms(
    q: Float[Array, "... C K"],
    k: Float[Array, "... C K"],
    v: Float[Array, "... C V"],
    g: Float[Array, "... C K"],
    beta: Float[Array, "... C"],
) -> ChunkTerms:
    """Terms of chunks of C rows, C a power of two; rows to leave out have q, k, v, g, beta all 0.

    q and k are normalised and q carries the scale.
    """
    chunk = q.shape[-2]
    if chunk & (chunk - 1):
        raise ValueError(f"chunk: got {chunk}; halving needs a power of two")
    sums = jnp.einsum("lim,...mk->l...ik", segment_masks(chunk), g, precision=Precision.HIGHEST)
    # Without the barrier XLA computes the exponentials again in each of their many uses.
    *levels, exp_g, to_end = jax.lax.optimization_barrier(jnp.exp(sums))
    beta = beta[..., None]

    a_qk = jnp.sum(_blocks(q * k, 1), axis=-1, keepdims=True)
    x = jnp.ones_like(a_qk)
    for level, decay in enumerate(levels):
        s = 2**level
        k_a, k_b = _pairs(_blocks(k * decay, s))
        _, q_b = _pairs(_blocks(q * decay, s))
        _, beta_b = _pairs(_blocks(beta, s))
        later = jnp.stack([q_b, beta_b * k_b])
        a_ba, m_ba = jnp.einsum("z...ik,...jk->z...ij", later, k_a, precision=Precision.HIGHEST)
        x_a, x_b = _pairs(x)
        x = _lower(x_a, -_product(x_b, _product(m_ba, x_a)), x_b)
        a_a, a_b = _pairs(a_qk)
        a_qk = _lower(a_a, a_ba, a_b)
    a_qk, x = a_qk[..., 0, :, :], x[..., 0, :, :]
    return ChunkTerms(
        a_qk=a_qk,
        w=matmul(x, beta * k * exp_g),
        u0=matmul(x, beta * v),
        q_decayed=q * exp_g,
        kg=k * to_end,
        decay=exp_g[..., -1, :],
    )


def state_after(
    count: Int32[Array, "n"],
    state: Float[Array, "n H K V"],
    k: Float[Array, "n H C K"],
    g: Float[Array, "n H C K"],
    u: Float[Array, "n H C V"],
) -> Float[Array, "n H K V"]:
    """State after the first `count` rows of a chunk, from the chunk's incoming state and its u.

    S_b = diag(exp G_b) S + (k exp(G_b - G))^T u over rows up to b: u of a row does not depend on later
    rows, so any offset is reachable. Sums of g run over segments, as in `chunk_terms`.
    """
    i = jnp.arange(k.shape[-2])
    inside = i[None, :] < count[:, None]
    behind = (inside[:, None, :] & (i[None, :] > i[:, None])).astype(g.dtype)
    to_b = jnp.einsum("njm,nhmk->nhjk", behind, g, precision=Precision.HIGHEST)
    g_b = jnp.einsum("nm,nhmk->nhk", inside.astype(g.dtype), g, precision=Precision.HIGHEST)
    kept = jnp.where(inside[:, None, :, None], k * jnp.exp(to_b), 0.0)
    added = jnp.einsum("nhck,nhcv->nhkv", kept, u, precision=Precision.HIGHEST)
    return jnp.exp(g_b)[..., None] * state + added
