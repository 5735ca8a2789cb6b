"""A step planned in rounds: `schedule` in two programs, of which the second is seldom needed.

What a program has inside costs time to compile and, with XLA's CPU runtime, also time to call, executed or not. So
`plan` goes on until the step is planned, or until somebody would have to be preempted; `clear` preempts, and `plan`
goes on. Both together do what `schedule` does, bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import LAST_PREFILL, PLANNED, CacheState, counters_of
from hybrid_kv.cache.transitions import give_up, to_abort
from hybrid_kv.schedule.order import last_running
from hybrid_kv.schedule.step import Turns, begin, chunk_turn, decode_turn, finish, is_idle, lacks_room

# Words of a note, which goes from round to round: `Turns` follows. BEGUN: the step is open. CROWDED: the next turn
# needs room. STEP: there is a step. CHUNKS: it has prefills. IDLE: nothing is in flight.
BEGUN, CROWDED, STEP, CHUNKS, IDLE, _HEAD = range(6)


def blank(config: CacheConfig) -> np.ndarray:
    """The note that a step begins with, i32[N]."""
    return np.zeros(_HEAD + 5 + counters_of(config) + 2 * config.max_requests, np.int32)


def plan(config: CacheConfig, state: CacheState, note: jax.Array) -> tuple[CacheState, jax.Array]:
    """Go on with a step: (state, note), and it is planned unless CROWDED."""
    turns = _read(config, note)
    fresh = 1 - note[BEGUN]
    state, turns = jax.lax.fori_loop(0, fresh, lambda _, carry: begin(config, carry[0]), (state, turns))
    decodes = (~turns.decoded & ~turns.stop).astype(jnp.int32)
    carry = (state, turns, jnp.zeros((), bool))
    carry = jax.lax.fori_loop(0, decodes, lambda _, carry: decode_turn(config, *carry[:2]), carry)

    def goes_on(carry):
        _, turns, crowded = carry
        return ~turns.stop & ~crowded

    state, turns, crowded = jax.lax.while_loop(goes_on, lambda carry: chunk_turn(config, *carry[:2]), carry)
    done = turns.stop.astype(jnp.int32)
    state = jax.lax.fori_loop(0, done, lambda _, state: finish(config, state, turns), state)
    counters = state.counters
    step = turns.stop & (counters[PLANNED] > turns.start[PLANNED])
    chunks = step & (counters[LAST_PREFILL] == counters[PLANNED])
    head = jnp.stack([jnp.ones((), bool), crowded, step, chunks, is_idle(state)]).astype(jnp.int32)
    return state, _write(head, turns)


def clear(config: CacheConfig, state: CacheState, note: jax.Array, slot: jax.Array) -> CacheState:
    """Preempt for whoever has the next turn; or with a `slot`, not -1, `abort` it: both take everything from requests,
    one after the other, and so are one program."""
    turns, aborts = _read(config, note), slot >= 0
    state, left = jax.lax.fori_loop(
        0, aborts.astype(jnp.int32), lambda _, carry: to_abort(config, carry[0], slot),
        (state, jnp.zeros((config.max_requests,), bool)),
    )  # fmt: skip

    def more(carry):
        state, left = carry
        return left.any() | (~aborts & lacks_room(config, state, turns))

    def one(carry):
        state, left = carry
        row = jnp.where(aborts, jnp.argmax(left).astype(jnp.int32), last_running(config, state))
        return give_up(config, state, row, ~aborts), left.at[row].set(False)

    return jax.lax.while_loop(more, one, (state, left))[0]


def _write(head: jax.Array, turns: Turns) -> jax.Array:
    flags = jnp.stack([turns.decoded, turns.deferring, turns.rows, turns.stop, turns.short]).astype(jnp.int32)
    cached = jax.lax.bitcast_convert_type(turns.cached, jnp.int32)
    return jnp.concatenate([head, flags, turns.start, turns.tried.astype(jnp.int32), cached])


def _read(config: CacheConfig, note: jax.Array) -> Turns:
    flags, rest = note[_HEAD : _HEAD + 5], note[_HEAD + 5 :]
    size, slots = counters_of(config), config.max_requests
    return Turns(
        start=rest[:size],
        decoded=flags[0] > 0,
        deferring=flags[1] > 0,
        tried=rest[size : size + slots] > 0,
        rows=flags[2],
        stop=flags[3] > 0,
        short=flags[4] > 0,
        cached=jax.lax.bitcast_convert_type(rest[size + slots :], jnp.float32),
    )
