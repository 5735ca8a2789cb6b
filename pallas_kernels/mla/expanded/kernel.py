"""One step of expanded attention: a group of query tiles and a block of keys, many heads.

    s  = k q^T                      [keys, queries], in base 2: log2 e and the scale are in q
    p  = exp2(s - m)                m: reference of each query
    l += sum over keys of p         o^T += v^T p

Everything lies so that no product needs a transposition: q^T and p are the weights of the matrix units, k and v^T pass
through, and m and l are rows of lanes. A step of kind OPEN does no more than that: m is what an earlier step left, so a
score is weighted as it leaves the matrix unit, and the products of all heads form one stream. EDGE adds -inf to
hidden scores. FIRST finds the maximum and rescales o and l by exp2(m - m').

If later scores exceed m so far that l, or the products with p, might leave fp32, the log-sum-exp is reported as NaN;
the caller sees it and repeats the call with FIRST throughout.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.expanded.plan import (
    EDGE,
    FIRST,
    FRESH,
    KEPT,
    LAST,
    OPEN,
    RESUMED,
    SKIP,
    START,
    TURN,
    block_of,
    group_of,
    kind_of,
)  # fmt: skip
from pallas_kernels.mla.visible import Visible

LANES, WIDTH = 128, 192  # of keys without and with the position key
QUERIES, KEYS = 256, 256  # of a tile and a block: both sides of a matrix unit

# Rows of the state of a tile and head: output transposed, sums of weights by sublane, reference in all sublanes.
OUT, SUMS, ANCHOR, STATE = slice(0, 128), slice(128, 136), slice(136, 144), 144

# Below every score; hidden scores lie further below, so that their weight is 0 also where there is no reference yet.
_LOWEST, _HIDDEN = -1e30, -2e30


# Keys whose scores give the reference at the start, and the largest sum of weights that leaves room for values.
_FEW, _MOST = 32, 2.0**100


def staggered(heads: Sequence[Any], stages: list[tuple[int, Callable[[Any, Any], Any]]]) -> None:
    """Emits the stages of all heads, each so many heads behind the first stage.

    A stage maps the head and the result of the stage before it to its result. The compiler keeps near program order, so
    this order decides what overlaps. Stages that fall together are emitted in the order given.
    """
    results: dict[int, Any] = {}
    for i in range(len(heads) + max(delay for delay, _ in stages)):
        for delay, stage in stages:
            if 0 <= i - delay < len(heads):
                results[i - delay] = stage(heads[i - delay], results.get(i - delay))


def fold(x: jax.Array, op: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """[8, queries] of [keys, queries], by sublane: a tree of whole registers."""
    parts = list(x.reshape(-1, 8, x.shape[-1]))
    while len(parts) > 1:
        parts = [op(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class Refs(NamedTuple):
    """Plan in SMEM; operands of H heads and G tiles in VMEM; the state in HBM as other pieces left it; scratch."""

    step: Any
    turn: Any
    following: Any
    owner: Any
    offset: Any
    length: Any
    start: Any
    nope_hbm: Any  # [T, 128 N]
    rope_hbm: Any  # [T, 64 N]
    nope: Any  # [keys, 128 H]
    rope: Any  # [keys, 64]
    at: Any  # [keys, 128] positions in all lanes
    value: Any  # [128 H, keys]
    out_before: Any  # results of other pieces, not read
    lse_before: Any
    kept_before: Any  # [N, tiles, STATE, queries] in HBM
    out: Any  # [G queries, 128 H]
    lse: Any  # [H, G, 1, queries]
    kept: Any  # [N, tiles, STATE, queries] in HBM, the same as kept_before
    nope_q: Any  # [2, G queries, 128 H] of this group and the next, in turn
    rope_q: Any  # [2, G queries, 64 H]
    q: Any  # [H, G, 192, queries] transposed
    state: Any  # [H, G, STATE, queries]
    bias: Any  # [keys, queries] 0 or _HIDDEN
    made: Any  # SMEM [G] whether the tile of this group has a state
    place: Any  # SMEM [1] which of the two places holds the queries of this group
    arrived: Any  # DMA semaphores [2 places, 2]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def kernel(*refs: Any, sees: Visible) -> None:
    """See the module. Grid: groups of heads, steps of the plan."""
    r = Refs(*refs)
    program, step, turn = pl.program_id(0), r.step[pl.program_id(1)], r.turn[pl.program_id(1)]
    heads, tiles = r.q.shape[:2]
    group = group_of(step)
    here = pl.ds(program * heads, heads), pl.ds(group * tiles, tiles)

    programs = pl.num_programs(0)

    @pl.when((program == 0) & (pl.program_id(1) == 0))
    def first_queries():
        r.place[0] = 0
        for copy in _fetch(r, program, group, 0):
            copy.start()

    @pl.when((turn & (FRESH | RESUMED)) > 0)
    def begin():
        for t in range(tiles):
            r.made[t] = (turn & RESUMED) // RESUMED
        place = r.place[0]
        following = r.following[group]
        next_program = jnp.where(following > group, program, program + 1)

        @pl.when(next_program < programs)
        def start():
            for copy in _fetch(r, next_program, following, 1 - place):
                copy.start()

        for copy in _fetch(r, program, group, place):
            copy.wait()

    @pl.when((turn & RESUMED) > 0)
    def resumed():
        pltpu.sync_copy(r.kept_before.at[here], r.state)

    def clear_tile(t):
        lax.fori_loop(0, heads, lambda h, carry: _clear(r, (h, t)), None)

    # Tiles that come without START: of another piece, or to be made now.
    @pl.when((turn & TURN) > 0)
    def prepare():
        def one(t, carry):
            fresh = (kind_of(step, t) == FIRST) & (r.made[t] == 0)
            pl.when(fresh)(functools.partial(clear_tile, t))

            @pl.when(fresh | ((turn & RESUMED) > 0))
            def turn_tile():
                r.made[t] = 1
                for h in range(heads):
                    _turn(r, (h, t))

            return carry

        lax.fori_loop(0, tiles, one, None)

    def for_heads(most, run):
        size = math.gcd(heads, most)
        lax.fori_loop(0, heads // size, lambda i, carry: run([i * size + j for j in range(size)]), None)

    def one_pair(pair, carry):
        both = pair * 2, pair * 2 + 1
        opened = (kind_of(step, both[0]) == OPEN) & (kind_of(step, both[1]) == OPEN)

        @pl.when(opened)
        def together():
            _known(r, [(h, t) for t in both for h in range(heads)], sees, hides=False)

        @pl.when(jnp.logical_not(opened) & (kind_of(step, both[0]) + kind_of(step, both[1]) > SKIP))
        def apart():
            lax.fori_loop(both[0], both[1] + 1, one_tile, None)

        return carry

    def one_tile(t, carry):
        kind = kind_of(step, t)
        each = [(h, t) for h in range(heads)]

        @pl.when(kind != SKIP)
        def hide():
            _hide(r, r.owner[block_of(step)], group * tiles + t, sees)

        @pl.when((kind == OPEN) | (kind == EDGE))
        def edge():
            _known(r, each, sees, hides=True)

        @pl.when(kind == START)
        def start():
            r.made[t] = 1
            _start(r, each, sees)

        @pl.when(kind == FIRST)
        def first():
            for_heads(4, lambda part: _first(r, [(h, t) for h in part], sees))

        return carry

    lax.fori_loop(0, tiles // 2, one_pair, None)
    if tiles % 2:
        one_tile(tiles - 1, None)

    @pl.when((turn & LAST) > 0)
    def last():
        @pl.when((turn & KEPT) > 0)
        def keep():
            def one(t, carry):
                pl.when(r.made[t] == 0)(functools.partial(clear_tile, t))
                return carry

            lax.fori_loop(0, tiles, one, None)
            pltpu.sync_copy(r.state, r.kept.at[here])

        r.place[0] = 1 - r.place[0]

        def tile_results(t, carry):
            for h in range(heads):
                _results(r, (h, t))
            return carry

        lax.fori_loop(0, tiles, tile_results, None)


def _fetch(r: Refs, program: Any, group: Any, place: Any) -> list[Any]:
    """Copies of the queries of a group of heads and tiles."""
    rows = pl.ds(group * r.nope_q.shape[1], r.nope_q.shape[1])

    def copy(i, source, target):
        columns = pl.ds(program * target.shape[2], target.shape[2])
        return pltpu.make_async_copy(source.at[rows, columns], target.at[place], r.arrived.at[place, i])

    return [copy(0, r.nope_hbm, r.nope_q), copy(1, r.rope_hbm, r.rope_q)]


def _clear(r: Refs, at: Any) -> None:
    """The state of a query that has seen no key."""
    r.state[*at, : ANCHOR.start] = jnp.zeros((ANCHOR.start, QUERIES), jnp.float32)
    r.state[*at, ANCHOR] = jnp.full((8, QUERIES), _LOWEST, jnp.float32)


def _of(head: Any) -> Any:
    """The lanes, or rows, of a head among those that lie side by side."""
    return pl.ds(head * LANES, LANES)


def _score(r: Refs, sees: Visible, at: Any) -> jax.Array:
    h, t = at
    s = _product(jnp.concatenate([r.nope[:, _of(h)], r.rope[...]], axis=1), r.q[h, t])
    return sees.capped(s, math.log2(math.e))


def _add_up(r: Refs, at: Any, p: jax.Array) -> jax.Array:
    r.state[*at, SUMS] += fold(p, jnp.add)
    return p.astype(jnp.bfloat16)


def _add(r: Refs, at: Any, o: jax.Array) -> None:
    r.state[*at, OUT] += o


def _reference(r: Refs, at: Any) -> jax.Array:
    return r.state[*at, ANCHOR.start : ANCHOR.start + 1]


def _known(r: Refs, each: Sequence[Any], sees: Visible, hides: bool) -> None:
    """The reference known; all keys seen, or some hidden."""

    def soften(at, s):
        s -= _reference(r, at)
        return _add_up(r, at, jnp.exp2(s + r.bias[...] if hides else s))

    staggered(
        each,
        [
            (0, lambda at, _: _score(r, sees, at)),
            (12, lambda at, p: _product(r.value[_of(at[0])], p)),
            (6, soften),
            (13, functools.partial(_add, r)),
        ],
    )


def _hide(r: Refs, row: Any, tile: Any, sees: Visible) -> None:
    """The bias of a tile against the keys of a row."""
    within = tile * QUERIES - r.offset[row] + lax.broadcasted_iota(jnp.int32, (1, QUERIES), 1)
    own = jnp.where((within >= 0) & (within < r.length[row]), r.start[row] + within, -1)
    at = jnp.concatenate([r.at[...]] * (QUERIES // LANES), axis=1)
    seen = at <= own
    if sees.window is not None:
        seen &= at > own - sees.window
    r.bias[...] = jnp.where(seen, 0.0, _HIDDEN)


def _turn(r: Refs, at: Any) -> None:
    """Transposes the queries of a head and tile."""
    h, t = at
    place, rows = r.place[0], pl.ds(t * QUERIES, QUERIES)
    r.q[h, t, :LANES] = r.nope_q[place, rows, _of(h)].T
    if h % 2 == 0:  # two heads side by side fill the lanes
        narrow = WIDTH - LANES
        found = r.rope_q[place, rows, h * narrow : (h + 2) * narrow].T
        r.q[h, t, LANES:] = found[:narrow]
        if h + 1 < r.q.shape[0]:
            r.q[h + 1, t, LANES:] = found[narrow:]


def _start(r: Refs, each: Sequence[Any], sees: Visible) -> None:
    """The first keys: transposes the queries; the maximum over a few keys, of which all see one, is the reference."""

    def soften(at, s):
        s = s + r.bias[...]
        reference = jnp.max(fold(s[:_FEW], jnp.maximum), axis=0, keepdims=True)
        r.state[*at, ANCHOR] = jnp.broadcast_to(reference, (8, QUERIES))
        p = jnp.exp2(s - reference)
        r.state[*at, SUMS] = fold(p, jnp.add)
        return p.astype(jnp.bfloat16)

    def put(at, o):
        r.state[*at, OUT] = o

    staggered(
        each,
        [
            (2, lambda at, _: _score(r, sees, at)),
            (10, lambda at, p: _product(r.value[_of(at[0])], p)),
            (6, soften),
            (11, put),
            (0, lambda at, _: _turn(r, at)),
        ],
    )


def _first(r: Refs, each: Sequence[Any], sees: Visible) -> None:
    """Some keys hidden; turns the queries, and takes the running maximum for the reference."""

    def top(at, s):
        s = s + r.bias[...]
        old = r.state[*at, ANCHOR]
        new = jnp.maximum(old, jnp.max(fold(s, jnp.maximum), axis=0, keepdims=True))
        fade = jnp.exp2(old - new)
        r.state[*at, ANCHOR] = new
        r.state[*at, SUMS] *= fade
        return s, new[:1], fade[:1]

    def soften(at, found):
        s, new, fade = found
        return _add_up(r, at, jnp.exp2(s - new)), fade

    def weigh(at, found):
        p, fade = found
        return _product(r.value[_of(at[0])], p), fade

    def fade_and_add(at, found):
        o, fade = found
        r.state[*at, OUT] = r.state[*at, OUT] * fade + o

    staggered(
        each,
        [
            (0, lambda at, _: _score(r, sees, at)),
            (8, weigh),
            (6, soften),
            (3, top),
            (10, fade_and_add),
        ],
    )


def _results(r: Refs, at: Any) -> None:
    """Output and log-sum-exp of the queries of a tile and head."""
    h, t = at
    total = jnp.sum(r.state[h, t, SUMS], axis=0, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    out = r.state[h, t, OUT] * (1.0 / safe)
    r.out[pl.ds(t * QUERIES, QUERIES), _of(h)] = out.astype(r.out.dtype).T
    lse = math.log(2.0) * (_reference(r, (h, t)) + jnp.log2(safe))
    r.lse[h, t] = jnp.where(total == 0, -jnp.inf, jnp.where(total < _MOST, lse, jnp.nan))
