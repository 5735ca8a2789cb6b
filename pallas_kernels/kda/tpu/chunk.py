"""One chunk of KDA for a pair of heads, in two phases, in VMEM.

The mathematics and the names are those of `kda.chunk`. What is particular here:

* Two heads lie side by side: a [C, C] matrix of each fills half of the 128 lanes of a "pair" matrix [C, 2C]. A
  product of pair matrices has a block diagonal right-hand side [2C, ...], one block a head.
* Decays of all levels are products of decays within blocks of 8 rows and of totals of such blocks, so one product
  with a 0/1 matrix gives all sums. Every factor is at most 1 (for `Arithmetic.midpoint` at most exp 40).
* Inverses of 16-blocks are found by substitution in fp32, all eight blocks of a pair folded into one [16, 128];
  two merges, -X_2 M_21 X_1, follow.
* `prepare` needs no state; `advance` carries it. Both are generators that yield where a matrix product has to be
  waited for, so that the kernel can run many pairs in step and the two phases of neighbouring chunks together:
  the compiler keeps near program order and would not overlap them by itself.
"""

from collections.abc import Generator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.tpu.arithmetic import Arithmetic

CHUNK = 64
WIDTH = 128  # key and value width
_BLOCK = 16  # rows inverted by substitution
_DIAGONAL, _ABOVE = 6, 7  # beside the levels 0 .. 5 in `level_map`


def sum_matrix(arithmetic: Arithmetic) -> np.ndarray:
    """0/1 matrix whose product with `parts` of g gives the sums of `prepare`, [n C, C] or [n C, 2C].

    For each row: sum up to it and behind it in its block of 8; then, unless the midpoint form makes them
    needless, for blocks of 2 and of 4 the sum up to it in odd blocks and behind it in even ones.
    """
    i, m = np.arange(CHUNK)[:, None], np.arange(CHUNK)[None, :]
    eight = i // 8 == m // 8
    sums = [eight & (m <= i), eight & (m > i)]
    if not arithmetic.midpoint:
        sums += [(i // s == m // s) & np.where(i // s % 2 == 1, m <= i, m > i) for s in (2, 4)]
    matrix = np.concatenate(sums).astype(np.float32)
    return matrix if arithmetic.exact else np.concatenate([matrix, matrix], axis=1)


def level_map() -> np.ndarray:
    """[C, 2C]: at (i, j) of either head the level at which rows i > j part, else _DIAGONAL or _ABOVE."""
    i, j = np.arange(CHUNK)[:, None], np.arange(2 * CHUNK)[None, :] % CHUNK
    level = np.frexp((i ^ j).astype(np.float64))[1] - 1
    return np.where(i > j, level, np.where(i == j, _DIAGONAL, _ABOVE)).astype(np.int32)


def beta_selector(heads: int) -> np.ndarray:
    """0/1 matrix [3 heads, pairs * 2C]: from three parts of each head's column to both halves of a pair's lanes.

    Broadcasting a column over lanes by a matrix product leaves the shuffle unit alone, which is short here. The
    last head of an odd number is its own partner.
    """
    first = np.arange(0, heads, 2)
    pairs = np.stack([first, np.minimum(first + 1, heads - 1)], axis=1)  # [pairs, 2]
    head = np.repeat(pairs.ravel(), CHUNK)[None, :]
    return (np.arange(3 * heads)[:, None] % heads == head).astype(np.float32)


class Constants(NamedTuple):
    """Arrays in VMEM that all pairs share."""

    sums: jax.Array
    level: jax.Array


class Prepared(NamedTuple):
    """What `advance` needs of a chunk and pair, all but `inverse` and `decay` operands.

    Attributes:
      read: per head [2C, K] the rows k exp G, then the rows scale q exp G.
      kg: [2C, K] k exp(G_C - G), the first head's rows first.
      a_qk: [C, 2C] pair matrix.
      m: [C, 2C] rows of M that merges need: below the diagonal 16-blocks of 32-blocks (32 rows, of blocks 1 and
        3), then below the diagonal 32-block (32 rows).
      inverse: [16, 2C] inverses of the 16-blocks, folded.
      decay: [2, K] exp G_C of each head.
    """

    read: tuple[jax.Array, jax.Array]
    kg: jax.Array
    a_qk: jax.Array
    m: jax.Array
    inverse: jax.Array
    decay: jax.Array


def _lanes(rows: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (rows, 2 * CHUNK), 1)


def _stack(a: jax.Array, b: jax.Array) -> jax.Array:
    """[[a, 0], [0, b]] of equal shapes."""
    zero = jnp.zeros_like(a)
    rows = [jnp.concatenate([a, zero], axis=1), jnp.concatenate([zero, b], axis=1)]
    return jnp.concatenate(rows, axis=0)


def _keep(x: jax.Array, first: int, lanes: int) -> jax.Array:
    """Operand x with all but some lanes zero. On words, so that packed rows need not be unpacked."""
    bits = pltpu.bitcast(x, jnp.int32)
    lane = _lanes(bits.shape[0])
    inside = (lane >= first) & (lane < first + lanes)
    return pltpu.bitcast(jnp.where(inside, bits, 0), x.dtype)


def _keep_block(x: jax.Array, b: int) -> jax.Array:
    """Operand x with all lanes zero but those of 16-block b of either head."""
    bits = pltpu.bitcast(x, jnp.int32)
    return pltpu.bitcast(jnp.where(_lanes(bits.shape[0]) % CHUNK // _BLOCK == b, bits, 0), x.dtype)


def _eights(x: jax.Array) -> list[jax.Array]:
    return [x[8 * b : 8 * b + 8] for b in range(x.shape[0] // 8)]


class _Decays(NamedTuple):
    """Decay factors of one head, [C, K] each: of levels 8, 16, 32, up to a row, behind it; and of the chunk [1, K]."""

    eight: jax.Array
    sixteen: jax.Array
    thirtytwo: jax.Array
    up_to: jax.Array
    behind: jax.Array
    whole: jax.Array


def _decays(up_to: list[jax.Array], behind: list[jax.Array]) -> _Decays:
    """From decays up to and behind each row within its block of 8, by products with the totals of blocks."""
    after, before = list(up_to), list(behind)  # within blocks of n eights
    total = [jnp.broadcast_to(x[7:8], x.shape) for x in up_to]  # of each such block
    levels = []
    for n in (1, 2, 4):
        # Between neighbouring blocks of n: what leads out of the earlier, and into the later.
        levels.append([after[b] if b // n % 2 else before[b] for b in range(8)])
        for b in range(8):
            if b // n % 2:
                after[b] = after[b] * total[b // n - 1]
            else:
                before[b] = before[b] * total[b // n + 1]
        total = [a * b for a, b in zip(total[0::2], total[1::2], strict=True)]
    eight, sixteen, thirtytwo, up, down = (jnp.concatenate(x, axis=0) for x in (*levels, after, before))
    return _Decays(eight, sixteen, thirtytwo, up, down, whole=total[0][:1])


def _later(x: jax.Array, n: int) -> jax.Array:
    """Rows of the odd blocks of n, in order, n a multiple of 8."""
    return jnp.concatenate([x[at : at + n] for at in range(n, x.shape[0], 2 * n)], axis=0)


def _earlier(x: jax.Array, n: int) -> jax.Array:
    """x with the rows of the odd blocks of n zero, n a multiple of 8."""
    zero = jnp.zeros_like(x[:n])
    return jnp.concatenate([x[at : at + n] if at // n % 2 == 0 else zero for at in range(0, x.shape[0], n)], axis=0)


def _place(later: jax.Array, n: int) -> list[jax.Array | None]:
    """Inverse of `_later` as eights, None where the rows were left out."""
    eights = _eights(later)
    out: list[jax.Array | None] = [None] * (CHUNK // 8)
    for b in range(CHUNK // 8):
        if 8 * b // n % 2:
            out[b] = eights.pop(0)
    return out


def _inverse_norm(x: jax.Array) -> jax.Array:
    return lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6)


def normalise(x: jax.Array) -> jax.Array:
    """Rows over their L2 norm, fp32."""
    x = x.astype(jnp.float32)
    return x * _inverse_norm(x)


def prepare(
    q: list[jax.Array],
    k: list[jax.Array],
    raw_gate: list[jax.Array],
    gate: list[jax.Array],
    beta: tuple[jax.Array, jax.Array],
    constants: Constants,
    arithmetic: Arithmetic,
    scale: float,
) -> Generator[None, None, Prepared]:
    """Everything of a chunk that does not depend on the state, for a pair of heads.

    Args:
      q, k, raw_gate: [C, K] of each head, raw; slots that are no tokens hold 0, 0 and `NEUTRAL_GATE`.
      gate: [2, K] of each head, see `Arithmetic.gate_constants`.
      beta: parts and selector whose product is the pair matrix [C, 2C] of beta, see `beta_selector`.
      scale: K^-0.5 of the true key width.

    Yields None between stages.
    """
    ar, level = arithmetic, constants.level
    g = [ar.log_decay(r, c[0:1], c[1:2]) for r, c in zip(raw_gate, gate, strict=True)]
    parts = jnp.concatenate([ar.parts(x) for x in g], axis=1)
    yield None
    sums = ar.dot(constants.sums, parts)
    yield None
    q_f32, k_f32, own = [], [], []
    for q_h, k_h in zip(q, k, strict=True):
        q_f, k_f = q_h.astype(jnp.float32), k_h.astype(jnp.float32)
        q_scale, k_scale = _inverse_norm(q_f) * scale, _inverse_norm(k_f)
        q_f32.append(q_f * q_scale)
        k_f32.append(k_f * k_scale)
        if not ar.midpoint:
            own.append(jnp.sum(q_f * k_f, axis=1, keepdims=True) * (q_scale * k_scale))
    yield None

    def head(rows: int, h: int) -> jax.Array:
        return sums[rows * CHUNK : (rows + 1) * CHUNK, h * WIDTH : (h + 1) * WIDTH]

    up_to = [ar.exp(head(0, h)) for h in range(2)]
    behind = [ar.exp(head(1, h)) for h in range(2)]
    decays = [_decays(_eights(a), _eights(b)) for a, b in zip(up_to, behind, strict=True)]
    yield None
    # Everywhere products are rounded, not factors: one rounding of an operand instead of three.
    read = tuple(
        jnp.concatenate([ar.round(k_f32[h] * decays[h].up_to), ar.round(q_f32[h] * decays[h].up_to)], axis=0)
        for h in range(2)
    )
    kg = jnp.concatenate([ar.round(k_f32[h] * decays[h].behind) for h in range(2)], axis=0)
    decay = jnp.concatenate([decays[h].whole for h in range(2)], axis=0)

    def scores(rows: list[list[jax.Array]], keys: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """q k^T and k k^T [., 2C] of decayed rows of q and of k, and decayed keys, of each head."""
        pair = jnp.concatenate([jnp.concatenate(x, axis=1) for x in rows], axis=0)
        out = ar.dot(pair, _stack(keys[0], keys[1]), transposed=True)
        half = out.shape[0] // 2
        return out[:half], out[half:]

    def late_scores(which: str, n: int) -> tuple[jax.Array, jax.Array]:
        """Only rows of later blocks of n, with keys of earlier ones."""
        d = [getattr(x, which) for x in decays]
        rows = [[ar.round(_later(x_h * d_h, n)) for x_h, d_h in zip(x, d, strict=True)] for x in (q_f32, k_f32)]
        return scores(rows, [ar.round(_earlier(k_h * d_h, n)) for k_h, d_h in zip(k_f32, d, strict=True)])

    # Levels 32 and 16: M of these takes part in merges only.
    a_qk = [jnp.zeros((8, 2 * CHUNK), jnp.float32)] * 8
    m = [jnp.zeros((8, 2 * CHUNK), jnp.float32)] * 8
    beta_pair = jnp.dot(*beta, preferred_element_type=jnp.float32)

    def take(into: list[jax.Array], rows: list[jax.Array | None], mask) -> None:
        for b, x in enumerate(rows):
            if x is not None:
                into[b] = jnp.where(mask(level[8 * b : 8 * b + 8]), x, into[b])

    s_q, s_k = late_scores("thirtytwo", 32)
    yield None
    # Keys of later rows were left out, so the rest of these rows is zero.
    a_qk[4:] = _eights(s_q)
    below_32 = ar.round(s_k * beta_pair[32:])
    s_q, s_k = late_scores("sixteen", 16)
    yield None
    take(a_qk, _place(s_q, 16), lambda x: x == 4)
    below_16 = ar.round(jnp.where(_later(level, 16) == 4, s_k * _later(beta_pair, 16), 0.0))
    if ar.midpoint:
        # Referenced to the edge between the two eights of a 16-block.
        left, right = [], []
        for h in range(2):
            x = _eights(head(0, h)), _eights(head(1, h))
            against = [ar.exp(-x[b % 2 == 0][b]) for b in range(8)]
            along = [_eights(up_to[h] if b % 2 else behind[h])[b] for b in range(8)]
            left.append(jnp.concatenate([along[b] if b % 2 else against[b] for b in range(8)], axis=0))
            right.append(jnp.concatenate([against[b] if b % 2 else along[b] for b in range(8)], axis=0))
        rows = [[ar.round(x_h * d_h) for x_h, d_h in zip(x, left, strict=True)] for x in (q_f32, k_f32)]
        s_q, s_k = scores(rows, [ar.round(k_h * d_h) for k_h, d_h in zip(k_f32, right, strict=True)])
        yield None
        take(a_qk, list(_eights(s_q)), lambda x: (x < 4) | (x == _DIAGONAL))
        take(m, list(_eights(s_k)), lambda x: x < 4)
    else:
        s_q, s_k = late_scores("eight", 8)
        yield None
        take(a_qk, _place(s_q, 8), lambda x: x == 3)
        take(m, _place(s_k, 8), lambda x: x == 3)
        odd = lax.broadcasted_iota(jnp.int32, (CHUNK, WIDTH), 0) % 2 == 1
        for number in (2, 1, 0):
            if number:
                d = [ar.exp(head(1 + number, h)) for h in range(2)]
            else:
                d = [jnp.where(odd, ar.exp(x), 1.0) for x in g]
            rows = [[ar.round(x_h * d_h) for x_h, d_h in zip(x, d, strict=True)] for x in (q_f32, k_f32)]
            s_q, s_k = scores(rows, rows[1])
            yield None
            take(a_qk, list(_eights(s_q)), lambda x, number=number: x == number)
            take(m, list(_eights(s_k)), lambda x, number=number: x == number)
        own_pair = jnp.where(_lanes(CHUNK) < CHUNK, own[0], own[1])
        take(a_qk, list(_eights(own_pair)), lambda x: x == _DIAGONAL)
    m = [x * b for x, b in zip(m, _eights(beta_pair), strict=True)]
    yield None

    # Fold: the diagonal 16-block b of head h keeps its lanes 64 h + 16 b.
    block = _lanes(8) % CHUNK // _BLOCK
    folded = []
    for half in range(2):
        diagonal = m[half]
        for b in range(1, 4):
            diagonal = jnp.where(block == b, m[2 * b + half], diagonal)
        folded.append(diagonal)
    inverse = yield from _substitute(folded)
    return Prepared(
        read=(read[0], read[1]),
        kg=kg,
        a_qk=ar.round(jnp.concatenate(a_qk, axis=0)),
        m=jnp.concatenate([below_16, below_32], axis=0),
        inverse=jnp.concatenate(inverse, axis=0),
        decay=decay,
    )


def _substitute(m: list[jax.Array]) -> Generator[None, None, list[jax.Array]]:
    """(I + M)^-1 of folded strictly lower 16-blocks, as two eights, column after column."""
    lane, row = _lanes(8), lax.broadcasted_iota(jnp.int32, (8, 2 * CHUNK), 0)
    first = lane // _BLOCK * _BLOCK
    x = [(lane % _BLOCK == row + 8 * half).astype(jnp.float32) for half in range(2)]
    for j in range(_BLOCK - 1):
        pivot = x[j // 8][j % 8 : j % 8 + 1]
        for half in range(j // 8, 2):  # rows up to j are done
            column = jnp.take_along_axis(m[half], first + j, axis=1, mode="promise_in_bounds")
            x[half] = x[half] - column * pivot
        if j % 4 == 3:
            yield None
    return x


def advance(
    x: Prepared,
    v: list[jax.Array],
    beta: jax.Array,
    state: list[jax.Array],
    arithmetic: Arithmetic,
) -> Generator[None, None, tuple[list[jax.Array], list[jax.Array], jax.Array]]:
    """Outputs and new states of a pair of heads.

    Args:
      v: [C, V] of each head.
      beta: [1, 2C] of both heads.
      state: [K, V] of each head, fp32.

    Yields None between stages.

    Returns:
      Outputs [C, V] of each head, states [K, V] of each head, and u [C, 2 V].
    """
    ar = arithmetic
    zero = jnp.zeros((_BLOCK, 2 * CHUNK), ar.dtype)

    def diagonal(rows: list[jax.Array]) -> jax.Array:
        """A block diagonal right-hand side [2C, 2C] from the 16-blocks of rows of a pair matrix."""
        halves = [r if r is zero else _keep(r, h * CHUNK, CHUNK) for h in range(2) for r in rows]
        return jnp.concatenate(halves, axis=0)

    # 16-blocks of rows, unfolded: of X, and of X diag(beta), which is what is wanted in the end.
    plain, scaled = ([_keep_block(f, b) for b in range(4)] for f in (ar.round(x.inverse), ar.round(x.inverse * beta)))
    read = [ar.dot(x.read[h], ar.round(state[h])) for h in range(2)]
    y = ar.round(ar.dot(x.m[:32], diagonal(plain)))
    yield None
    z = ar.dot(jnp.concatenate([plain[1], plain[3]], axis=0), diagonal([zero, y[:16], zero, y[16:]]))
    yield None
    plain[3] = plain[3] - ar.round(z[16:])
    z = ar.round(z * beta)
    scaled[1], scaled[3] = scaled[1] - z[:16], scaled[3] - z[16:]
    y = ar.round(ar.dot(x.m[32:], diagonal([scaled[0], scaled[1], zero, zero])))
    yield None
    z = ar.dot(jnp.concatenate(plain[2:], axis=0), diagonal([zero, zero, y[:16], y[16:]]))
    yield None
    z = ar.round(z)
    scaled[2:] = [scaled[2] - z[:16], scaled[3] - z[16:]]
    right = [ar.round(v[h].astype(jnp.float32) - read[h][:CHUNK]) for h in range(2)]
    u = ar.round(ar.dot(jnp.concatenate(scaled, axis=0), _stack(right[0], right[1])))
    yield None
    left = jnp.concatenate([x.a_qk, x.kg.T], axis=0)
    both = ar.dot(left, _stack(u[:, :WIDTH], u[:, WIDTH:]))
    yield None
    out, after = [], []
    for h in range(2):
        mine = both[:, h * WIDTH : (h + 1) * WIDTH]
        out.append(read[h][CHUNK:] + mine[:CHUNK])
        decay = jnp.broadcast_to(x.decay[h : h + 1], (WIDTH, WIDTH)).T
        after.append(decay * state[h] + mine[CHUNK:])
    return out, after, u
