"""Latent attention in float64, sequence by sequence, and the pools that tests attend to."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.mla.pages import pool_shape
from pallas_kernels.rows import RaggedRows

# Rows of a section, for rows of a page.
SECTIONS = {320: 64, 544: 32, 768: 256, 1024: 256}


@dataclasses.dataclass(frozen=True)
class Case:
    """Ragged rows over a striped cache. keys [R, most, LP] and q [T, N, LP] float32; slack of q is NaN.

    Attributes:
      length, context: [R] new and cached tokens.
      pools: one per rank, [2, B, *page]; layer 0 and all that no row wrote is NaN.
    """

    keys: np.ndarray
    q: np.ndarray
    length: np.ndarray
    context: np.ndarray
    table: np.ndarray
    pools: tuple
    latent: int
    stripe: dict

    @property
    def rows(self) -> RaggedRows:
        offset = np.cumsum(self.length) - self.length
        return RaggedRows(*(jnp.asarray(a, jnp.int32) for a in (offset, self.length, self.context)))

    @property
    def queries(self):
        """q_latent and q_rope."""
        return self.q[..., : self.latent], self.q[..., self.latent :]


def local_rows(positions, n, shards, interleave):
    """(column, rank, row) of positions, from the formulas of the stripe."""
    column, off = np.divmod(positions, n * shards)
    return column, off // interleave % shards, off // (interleave * shards) * interleave + off % interleave


def page_of(rows, latent, planes):
    """One page in the form of the pool, from rows [n, LP]."""
    if not planes:
        return rows
    n = len(rows)
    if n > 256:
        section = SECTIONS[n]
        return np.concatenate([page_of(rows[at : at + section], latent, planes) for at in range(0, n, section)])
    tails = np.concatenate([rows[: n // 2, latent:], rows[n // 2 :, latent:]], axis=1)
    return np.concatenate([*np.split(rows[:, :latent], latent // 128, axis=1), tails], axis=0)


def case(
    lengths, contexts, *, heads=2, n=16, shards=1, interleave=1, planes=False, latent=64, position=16, tokens=None,
    columns=None, dtype=np.float32, seed=0,
):  # fmt: skip
    """Random rows whose context and new tokens are cached. columns, tokens: sizes of table and packed axis."""
    rng = np.random.default_rng(seed)
    length, context = np.asarray(lengths), np.asarray(contexts)
    total, width = length + context, latent + position
    columns = columns or max(1, -(-int(max(total)) // (n * shards)))
    tokens = tokens or int(length.sum()) + 3
    table = (rng.permutation(len(total) * columns) + 1).reshape(len(total), columns).astype(np.int32)
    keys = rng.normal(size=(len(total), max(1, int(max(total))), width)).astype(np.float32)
    # As the pool will hold them.
    keys = np.asarray(jnp.asarray(keys).astype(dtype).astype(jnp.float32))
    pools = []
    for rank in range(shards):
        pages = np.full((table.max() + 1, n, width), np.nan, np.float32)
        for row, count in enumerate(total):
            at = np.arange(count)
            column, home, place = local_rows(at, n, shards, interleave)
            own = home == rank
            pages[table[row, column[own]], place[own]] = keys[row, at[own]]
        forms = np.stack([page_of(page, latent, planes) for page in pages])
        pool = np.full(pool_shape(2, len(pages), n, latent, position, planes=planes), np.nan, np.float32)
        pool[1] = forms
        pools.append(jnp.asarray(pool).astype(dtype))
    q = np.full((tokens, heads, width), np.nan, np.float32)
    q[: length.sum()] = rng.normal(size=(length.sum(), heads, width))
    return Case(
        keys, q, length, context, table, tuple(pools), latent, {"shards": shards, "interleave": interleave}
    )  # fmt: skip


def attention(given: Case, *, scale, rank=None, causal=True, window=None, soft_cap=None, cache_scale=1.0):
    """(out [T, N, L], lse [T, N]) float64; keys of one rank only, or of all."""
    tokens, heads, _ = given.q.shape
    out, lse = np.zeros((tokens, heads, given.latent)), np.full((tokens, heads), -np.inf)
    n = given.pools[0].shape[2] * given.pools[0].shape[3] // given.keys.shape[2]
    at = 0
    for row, (length, context) in enumerate(zip(given.length, given.context, strict=True)):
        position = np.arange(context + length)
        home = local_rows(position, n, given.stripe["shards"], given.stripe["interleave"])[1]
        keys = given.keys[row, : context + length].astype(np.float64) * cache_scale
        for own in range(context, context + length):
            seen = position <= (own if causal else context + length - 1)
            if window is not None:
                seen &= position > own - window
            if rank is not None:
                seen &= home == rank
            if seen.any():
                s = scale * given.q[at].astype(np.float64) @ keys[seen].T
                s = s if soft_cap is None else soft_cap * np.tanh(s / soft_cap)
                top = s.max(-1, keepdims=True)
                w = np.exp(s - top)
                out[at] = w / w.sum(-1, keepdims=True) @ keys[seen, : given.latent]
                lse[at] = (top + np.log(w.sum(-1, keepdims=True)))[:, 0]
            at += 1
    return out, lse
