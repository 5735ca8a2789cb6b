"""Ragged batches for the expanded form, with what float64 attention makes of them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from tests.kernels import mla_oracle as oracle

SCALE = 0.15


@dataclasses.dataclass(frozen=True)
class Expanded:
    """A case of the oracle whose absorbed queries come from the expanded ones.

    Attributes:
      arguments: q_nope, q_rope, w_uk, w_uv.
    """

    given: oracle.Case
    arguments: tuple

    def step(self, rank=0):
        """Arguments of `mla_expanded` from the pool on."""
        return self.given.pools[rank], 1, self.given.rows, jnp.asarray(self.given.table)

    def attention(self, **options):
        """(out [T, N, V], lse [T, N]) float64; options of the oracle."""
        out, lse = oracle.attention(self.given, scale=SCALE, **options)
        return np.einsum("tnl,nvl->tnv", out, np.asarray(self.arguments[3].astype(jnp.float32), np.float64)), lse


def expanded_case(
    lengths, contexts, *, heads=2, nope=16, value=16, q_dtype=jnp.float32, gain=1.0, seed=0, **options
) -> Expanded:
    """A random case; gain multiplies the queries, options are those of `oracle.case`."""
    given = oracle.case(lengths, contexts, heads=heads, seed=seed, **options)
    rng, latent = np.random.default_rng(seed + 1), given.latent
    count = int(given.length.sum())

    def rounded(x):
        return jnp.asarray(x, jnp.float32).astype(q_dtype)

    def exact(x):
        return np.asarray(x.astype(jnp.float32), np.float64)

    q_nope = gain * rng.normal(size=(*given.q.shape[:2], nope))
    q_nope[count:] = np.nan
    q_nope, q_rope = rounded(q_nope), rounded(gain * given.q[..., latent:])
    w_uk, w_uv = (rounded(rng.normal(size=(heads, n, latent)) / latent**0.5) for n in (nope, value))
    absorbed = np.einsum("tnd,ndl->tnl", exact(q_nope), exact(w_uk))
    given = dataclasses.replace(given, q=np.concatenate([absorbed, exact(q_rope)], axis=-1))
    return Expanded(given, (q_nope, q_rope, w_uk, w_uv))
