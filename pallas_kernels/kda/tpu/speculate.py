"""The kernel behind verify, commit and their lazy union: one visit of each state, either half optional.

Commit. From the records of the step before, with E_t = exp(g_t+1 + ... + g_a) built as a product from the back,

    S = diag(E_0 exp g_1) S_0 + sum_t (k_t E_t) u_t^T        (t < a, every factor at most 1)

the sum being one product on the MXU (`correction`). It is rounded to the dtype of the pool before it is used.

Verify. From S, with F_i the decay from the start up to and including token i, and E_ji the one from j to i,

    [P; R] = [k_i F_i; q_i F_i] S                             one product for all tokens (`products`)
    u_i = beta_i (v_i - P_i - sum_(j < i) (k_i . k_j E_ji) u_j)
    o_i = R_i + sum_(j <= i) (q_i . k_j E_ji) u_j

so a state enters the MXU once, whatever the number of tokens. Token slots beyond a row's length come out as garbage
that reaches nothing. All of it is written for all heads, on sublanes, at once; only states are visited head by head.

An emission is a visit of its own ahead of the row's: the same commit with another count and another slot.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.kda.records import Commit, Records, emission_slot
from pallas_kernels.kda.tpu.columns import decay_column
from pallas_kernels.kda.tpu.correction import Corrections
from pallas_kernels.kda.tpu.decode import check_states
from pallas_kernels.kda.tpu.products import split, times_state
from pallas_kernels.kda.tpu.slots_dma import Order, StateStream, order_of
from pallas_kernels.kda.tpu.step_tiles import LAG, WIDTH, StepTiles
from pallas_kernels.kda.tpu.token_inputs import Token, column, decay, norm_scale, token

VMEM_LIMIT = 48 << 20


class Visits(NamedTuple):
    """Visits in order: what to read, how many records to apply, where to write, and whether tokens follow."""

    order: Order
    read: Int32[Array, "n"]
    accepted: Int32[Array, "n"]
    write: Int32[Array, "n"]
    tokens: Int32[Array, "n"]


def verify_visits(present: Bool[Array, "R"], read: Int32[Array, "R"], block: int) -> Visits:
    """One visit for each row with tokens."""
    order = order_of(present, block)
    nothing = jnp.zeros_like(read)
    return Visits(order, order.pick(read), nothing, nothing, jnp.ones_like(read))


def commit_visits(which: Commit, most: int, present: Bool[Array, "R"], block: int) -> Visits:
    """For each row the emission, if one is due, and then the row itself, if it writes anything or is `present`."""

    def both(first, second):
        return jnp.stack([first, second], axis=1).reshape(-1)

    emit = emission_slot(which)
    # A state that stays in its place need not be written.
    write = jnp.where((which.accepted <= 0) & (which.write == which.read), 0, which.write)
    order = order_of(both(emit != 0, (write != 0) | present), 2 * block)
    fields = (
        both(which.read, which.read),
        both(which.emit_after, jnp.clip(which.accepted, 0, most)),
        both(emit, write),
        both(jnp.zeros_like(emit), present.astype(jnp.int32)),
    )
    return Visits(order, *(order.pick(a) for a in fields))


class _Refs(NamedTuple):
    """Blocks of a kernel; of the half that is left out None."""

    q: Any = None
    k: Any = None
    v: Any = None
    gate: Any = None
    beta: Any = None
    old_u: Any = None
    old_k: Any = None
    old_gate: Any = None


def _kernel(
    layer: Any, bounds: Any, entry: Any, read: Any, count: Any, write: Any, follow: Any, *refs: Any, tiles: StepTiles,
    groups: int, blocks: int, most: int, commits: bool, verifies: bool, visits_per_row: int, lower_bound: float | None,
) -> None:  # fmt: skip
    given = iter(refs)

    def take(count: int, wanted: bool = True) -> list[Any]:
        return [next(given) if wanted else None for _ in range(count)]

    x = _Refs(*take(5, verifies), *take(3, commits))
    slope, bias, pool = take(3)
    out, new_u = take(2, verifies)
    (new_pool,) = take(1, commits)
    coming, arrived, cursor = take(3)
    going, left, leaving = take(3, commits)
    rows, results = take(2, verifies)
    # Committed states on their way to the MXU. From `going` they would be ordered behind each other's stores.
    (fresh,) = take(1, commits and verifies)

    group, block = pl.program_id(0), pl.program_id(1)
    heads, together = tiles.heads, tiles.rows
    pairs = heads * together
    stream = StateStream(
        pool, new_pool, layer, read, coming, going, arrived, left, cursor, leaving, bounds[blocks], groups, tiles.ahead
    )  # fmt: skip
    pl.when((group == 0) & (block == 0))(stream.begin)
    if verifies:
        out[...] = jnp.zeros(out.shape, out.dtype)
        new_u[...] = jnp.zeros(new_u.shape, new_u.dtype)
    begin, end = bounds[block], bounds[block + 1]
    slopes, biases = (jnp.concatenate([a[...]] * together, axis=0) for a in (slope, bias))
    parts = 2 if coming.dtype == jnp.bfloat16 else 3
    padded = -(-2 * most // 8) * 8

    def some_visits(step, carry):
        first = begin + step * together
        index = [first + j for j in range(together)]
        # Behind the last visit of the block the arithmetic goes on, on whatever is there, and nothing comes of it.
        known = [jnp.minimum(i, end - 1) for i in index]
        home = [entry[i] // visits_per_row - block * tiles.block for i in known]
        unit = group * stream.count
        place = [stream.arrival(unit + i) for i in known]
        after = [stream.departure(unit + i) for i in index] if commits else []
        for j in range(together):
            if commits:
                stream.make_room(after[j])

            @pl.when(index[j] < end)
            def _(j=j):
                stream.fetch(unit + index[j])
                stream.take(unit + index[j])

        stream.wipe_null(place, [read[i] for i in known])

        def load(ref, t):
            """Token t of the rows, under one another: [pairs, width]."""
            return jnp.concatenate([ref[h, t].astype(jnp.float32) for h in home], axis=0)

        tokens: list[Token] = []
        scores: list[list[tuple[jax.Array, jax.Array]]] = []

        def prepare_tokens():
            prefix = None
            for t in range(most):
                raw_beta = [column(x.beta[h, pl.ds(t, 1)], heads, group * heads) for h in home]
                y = token(
                    load(x.q, t), load(x.k, t), load(x.gate, t), jnp.concatenate(raw_beta, axis=0), slopes, biases,
                    lower_bound,
                )  # fmt: skip
                prefix = y.decay if prefix is None else prefix * y.decay
                for i, row in ((t, y.k * prefix), (most + t, y.q * prefix)):
                    for part, piece in enumerate(split(row, parts)):
                        rows[pl.ds((part * padded + i) * pairs, pairs)] = piece
                tokens.append(y)
                scores.append([_scores(tokens[j], tokens[j + 1 : t + 1]) for j in range(t + 1)])

        if commits:
            counts = jnp.concatenate([jnp.full((heads, WIDTH), count[i], jnp.int32) for i in known], axis=0)
            behind = jnp.ones((pairs, WIDTH), jnp.float32)
            w, u = [], []
            for t in reversed(range(most)):
                counted = t < counts
                key = load(x.old_k, t)
                w.append(jnp.where(counted, key * norm_scale(key) * behind, 0.0))
                u.append(jnp.where(counted, load(x.old_u, t), 0.0))
                behind = jnp.where(counted, behind * decay(load(x.old_gate, t), slopes, biases, lower_bound), behind)
            mixed = together > 1 and heads % 8 != 0
            corrections = Corrections(w, u, 2 if x.old_k.dtype == jnp.bfloat16 else 3, mixed)
            decays = decay_column(behind, coming.dtype)
        for h in range(heads + (LAG if commits and verifies else 0)):
            if verifies and h == (LAG // 2 if commits else 0):
                prepare_tokens()
            for j in range(together):
                if commits and h < heads:
                    pair = j * heads + h
                    state = decays.times(pair, coming[place[j], h].astype(jnp.float32)) + corrections.of(pair)
                    state = state.astype(going.dtype)
                    going[after[j], h] = state
                    if verifies:
                        fresh[h % (LAG + 1) * together + j] = state
                if verifies and h >= (LAG if commits else 0):
                    g = h - (LAG if commits else 0)
                    pair = j * heads + g
                    state = fresh[g % (LAG + 1) * together + j] if commits else coming[place[j], g]
                    left_rows = rows[pl.ds(pair, parts * padded, stride=pairs)].astype(jnp.bfloat16)
                    results[pl.ds(pair, padded, stride=pairs)] = times_state(left_rows, state, padded, parts)

        if verifies:
            us: list[jax.Array] = []
            os: list[jax.Array] = []
            for i, y in enumerate(tokens):
                u_i = load(x.v, i) - results[pl.ds(i * pairs, pairs)]
                o_i = results[pl.ds((most + i) * pairs, pairs)]
                for j in range(i):
                    u_i = u_i - scores[i][j][0] * us[j]
                us.append(y.beta * u_i)
                for j in range(i + 1):
                    o_i = o_i + scores[i][j][1] * us[j]
                os.append(o_i)

        if commits:
            stream.put(after, [jnp.where(i < end, write[n], 0) for i, n in zip(index, known, strict=True)], group)
        for j in range(together):
            if verifies:

                @pl.when((index[j] < end) & (follow[known[j]] != 0))
                def _(j=j):
                    for t in range(most):
                        out[home[j], t] = os[t][j * heads : (j + 1) * heads].astype(out.dtype)
                        new_u[home[j], t] = us[t][j * heads : (j + 1) * heads]

        return carry

    jax.lax.fori_loop(0, pl.cdiv(end - begin, together), some_visits, None)
    if commits:
        pl.when((group == groups - 1) & (block == blocks - 1))(stream.end)


def _scores(first: Token, later: list[Token]) -> tuple[jax.Array, jax.Array]:
    """(k_i . k_j E_ji, q_i . k_j E_ji) [H, 1] for j = `first` and i the last of the tokens behind it, or j itself."""
    key = first.k
    for y in later:
        key = key * y.decay
    last = later[-1] if later else first
    with_k, with_q = (jnp.sum(a * key, axis=1, keepdims=True) for a in (last.k, last.q))
    return with_k, with_q


def speculate(
    tokens: tuple[Array, ...] | None,
    records: Records | None,
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    visits: Visits,
    tiles: StepTiles,
    *,
    most: int,
    lower_bound: float | None,
    interpret: Any,
    name: str,
) -> tuple[Any, Any, Any]:
    """Output [R, Q, H, V], u [R, Q, H, V] and the pool; None for what the half left out would give.

    Args:
      tokens: dense q, k, v, raw gate [R, Q, H, .] and raw beta [R, Q, H], or None for commit alone.
      records: of the step before, or None for verify alone.
      visits: in the order of blocks of `tiles.block` rows.
    """
    check_states(states)
    rows, heads = (tokens or records or ())[0].shape[0], states.shape[2]
    groups, blocks = heads // tiles.heads, pl.cdiv(rows, tiles.block)
    verifies, commits = tokens is not None, records is not None
    scalars = (
        jnp.asarray(layer, jnp.int32).reshape(1), *visits.order, visits.read, visits.accepted, visits.write,
        visits.tokens,
    )  # fmt: skip
    slope = jnp.broadcast_to(jnp.exp(a_log.astype(jnp.float32))[:, None], dt_bias.shape)

    per_row = pl.BlockSpec((tiles.block, most, tiles.heads, WIDTH), lambda g, b, *_: (b, 0, g, 0))
    per_head = pl.BlockSpec((tiles.heads, WIDTH), lambda g, b, *_: (g, 0))
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    operands, specs = [], []
    if tokens is not None:
        operands += [*tokens[:4], tokens[4].astype(jnp.float32)]
        specs += [*(per_row,) * 4, pl.BlockSpec((tiles.block, most, heads), lambda g, b, *_: (b, 0, 0))]
    if records is not None:
        operands += [*records]
        specs += [per_row] * 3
    outs, out_specs = [], []
    if tokens is not None:
        dense = (rows, most, heads, WIDTH)
        outs += [jax.ShapeDtypeStruct(dense, tokens[2].dtype), jax.ShapeDtypeStruct(dense, jnp.float32)]
        out_specs += [per_row] * 2
    if commits:
        outs.append(jax.ShapeDtypeStruct(states.shape, states.dtype))
        out_specs.append(hbm)

    places = pltpu.VMEM((tiles.depth, tiles.heads, WIDTH, WIDTH), states.dtype)
    arrived = pltpu.SemaphoreType.DMA((tiles.depth,))
    pairs, padded = tiles.heads * tiles.rows, -(-2 * most // 8) * 8
    scratch = [places, arrived, pltpu.SMEM((3,), jnp.int32)]
    if commits:
        scratch += [places, arrived, pltpu.SMEM((tiles.depth,), jnp.int32)]
    if verifies:
        scratch += [pltpu.VMEM((n * padded * pairs, WIDTH), jnp.float32)
                    for n in (2 if states.dtype == jnp.bfloat16 else 3, 1)]  # fmt: skip
    if commits and verifies:
        scratch.append(pltpu.VMEM(((LAG + 1) * tiles.rows, WIDTH, WIDTH), states.dtype))
    call = pl.pallas_call(
        functools.partial(
            _kernel, tiles=tiles, groups=groups, blocks=blocks, most=most, commits=commits, verifies=verifies,
            visits_per_row=2 if commits else 1, lower_bound=lower_bound,
        ),
        out_shape=tuple(outs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(groups, blocks),
            in_specs=[*specs, per_head, per_head, hbm],
            out_specs=tuple(out_specs),
            scratch_shapes=scratch,
        ),
        input_output_aliases={len(scalars) + len(operands) + 2: len(outs) - 1} if commits else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=tiles.vmem + (8 << 20)
        ),
        interpret=interpret,
        name=name,
    )  # fmt: skip
    results = list(call(*scalars, *operands, slope, dt_bias.astype(jnp.float32), states))
    out, u = (results.pop(0), results.pop(0)) if verifies else (None, None)
    return out, u, results.pop(0) if commits else None
