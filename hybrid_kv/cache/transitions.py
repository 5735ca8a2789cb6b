"""Pure transitions of the cache state: arrive, commit, withdraw, abort, reset.

Each takes (config, state, ...) and returns a new state; a transition that cannot be made returns
the state it was given and says so. `hybrid_kv.schedule` adds the one that plans a step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import pool
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.publish import publish_state, publish_turn_end, publish_units
from hybrid_kv.cache.state import FREE, NEXT_SEQ, PREEMPTED, WAITING, CacheState, RequestLayout, initial_state, layout

# On the host or on a device.
Ints = jax.Array | np.ndarray


class Outcome(NamedTuple):
    """What the device and the sampler made of a step, by request slot.

    produced i32[R]: tokens appended. finished bool[R]: the request ends with this step.
    unit_keys u32[R, A, 4]: keys of the hash units that the appended tokens complete, in order.
    """

    produced: Ints
    finished: Ints
    unit_keys: Ints


def keys_per_append(config: CacheConfig) -> int:
    """Units that `max_append` more tokens can complete at most."""
    return -(-config.max_append // config.unit)


def arrive(
    config: CacheConfig, state: CacheState, prompt: jax.Array, flags: jax.Array, keys: jax.Array
) -> tuple[CacheState, jax.Array]:
    """Queue a request: (state, slot), slot -1 and the same state if all slots are taken.

    prompt: tokens. flags: `lookup.SKIP_READ`, `lookup.SALTED`. keys: uint32[U, 4] of its whole units.
    """
    fields = layout(config)
    status = state.requests[:, fields.STATUS]
    free = (status == FREE).any()
    slot = jnp.argmax(status == FREE).astype(jnp.int32)
    row = jnp.zeros((fields.size,), jnp.int32)
    row = row.at[jnp.array([fields.STATUS, fields.SEQ, fields.PROMPT, fields.KNOWN, fields.FLAGS])].set(
        jnp.stack([jnp.int32(WAITING), state.counters[NEXT_SEQ], prompt, prompt, flags]).astype(jnp.int32)
    )
    at = jnp.where(free, slot, config.max_requests)
    state = state._replace(
        requests=state.requests.at[at].set(row, mode="drop"),
        keys=state.keys.at[at].set(keys, mode="drop"),
        counters=state.counters.at[NEXT_SEQ].add(free.astype(jnp.int32)),
    )
    return state, jnp.where(free, slot, -1)


def commit(config: CacheConfig, state: CacheState, outcome: Outcome) -> CacheState:
    """Make the step in flight visible: lengths, keys, emitted states; end finished requests.

    Call it once the step has been handed to the device and cannot be dropped any more.
    """
    fields = layout(config)
    state = pool.compact(config, state)
    requests = state.requests
    scheduled = requests[:, fields.SCHEDULED]
    emit_turn = requests[:, fields.EMIT_TURN]
    requests = requests.at[:, fields.COMPUTED].add(scheduled).at[:, fields.SCHEDULED].set(0)
    requests = requests.at[:, fields.TURN].set(jnp.where(emit_turn > 0, emit_turn, requests[:, fields.TURN]))
    requests = requests.at[:, fields.EMIT_TURN].set(0)
    requests = requests.at[:, fields.ADMITTED].set(jnp.where(scheduled > 0, 0, requests[:, fields.ADMITTED]))
    state = publish_units(config, state._replace(requests=requests))
    pinned = (scheduled > 0) & (
        (requests[:, fields.emit_position] > 0).any(1)
        | (requests[:, fields.read] > 0).any(1)
        | (requests[:, fields.copy_source] > 0).any(1)
    )
    state = _for_rows(config, pinned, _settle, state)
    state = _append(config, state, outcome)
    return _for_rows(config, jnp.asarray(outcome.finished), _end, state)


def withdraw(config: CacheConfig, state: CacheState) -> CacheState:
    """Forget the step in flight: nothing it would have written is ever published.

    Requests keep the blocks they were given; copies that were planned stay due.
    """
    fields = layout(config)
    emitting = (state.requests[:, fields.emit_position] > 0).any(1)
    state = _for_rows(config, emitting, _drop_emissions, pool.compact(config, state))
    requests = state.requests.at[:, fields.SCHEDULED].set(0).at[:, fields.EMIT_TURN].set(0)
    return state._replace(requests=requests)


def abort(config: CacheConfig, state: CacheState, slot: jax.Array) -> CacheState:
    """End a request at any moment; what its committed steps published stays, the rest never was."""
    fields = layout(config)
    live = jnp.arange(config.max_requests) == slot
    live &= state.requests[:, fields.STATUS] != FREE
    return _for_rows(config, live, _end, pool.compact(config, state))


def reset(config: CacheConfig, state: CacheState) -> tuple[CacheState, jax.Array]:
    """Forget all cached content: (state, done). Refused, state unchanged, while a request runs."""
    empty = initial_state(config)
    idle = (state.requests[:, layout(config).STATUS] <= WAITING).all()
    kept = empty._replace(requests=state.requests, keys=state.keys, counters=state.counters)
    return jax.tree.map(lambda new, old: jnp.where(idle, new, old), kept, state), idle


def preempt(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """Take everything from a running request and put it back in the queue at its old place.

    Whatever this step had planned for it is planned no more, so its turn-end state can be filed.
    """
    fields = layout(config)
    before = state.requests[row]
    planned = state.requests.at[row, fields.EMIT_TURN].set(0)
    state = release_request(config, state._replace(requests=planned), row)
    keep = jnp.array([fields.SEQ, fields.PROMPT, fields.KNOWN, fields.FLAGS])
    again = jnp.zeros_like(before).at[keep].set(before[keep])
    again = again.at[fields.STATUS].set(WAITING).at[fields.PREEMPTIONS].set(before[fields.PREEMPTIONS] + 1)
    return state._replace(requests=state.requests.at[row].set(again), counters=state.counters.at[PREEMPTED].add(1))


def release_request(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """Publish a request's turn-end state and drop its references; the row is left blank.

    Tables are freed from their end, so the tail of a prefix is reused before its head.
    """
    fields = layout(config)
    state = publish_turn_end(config, state, row)
    request = state.requests[row]
    for position, group in enumerate(config.geometry.attention):
        first = config.column_offset[position]
        table = jax.lax.dynamic_slice(state.tables, (row, first), (1, config.columns[position]))[0]
        state = pool.release(config, state, config.group_pool[group], table[::-1])
        state = pool.release(config, state, config.group_pool[group], request[fields.copy_source][position])
    emitted = request[fields.emit_slot].reshape(fields.wanted, fields.recurrent)
    for position, group in enumerate(config.geometry.recurrent):
        slots = jnp.stack([request[s][position] for s in (fields.running, fields.turn_slot, fields.read)])
        state = pool.release(config, state, config.group_pool[group], jnp.concatenate([slots, emitted[:, position]]))
    return state._replace(requests=state.requests.at[row].set(0), tables=state.tables.at[row].set(0))


def _for_rows(config: CacheConfig, mask: jax.Array, body, state: CacheState) -> CacheState:
    """Apply `body(config, state, row)` to the marked request slots, in slot order."""
    rows = jnp.nonzero(mask, size=config.max_requests, fill_value=0)[0].astype(jnp.int32)
    return jax.lax.fori_loop(0, mask.sum(dtype=jnp.int32), lambda i, s: body(config, s, rows[i]), state)


def _end(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    return release_request(config, state, row)


def _settle(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """Publish the emitted states of one row and drop the pins of what it read and copied from."""
    fields = layout(config)
    request = state.requests[row]
    slots = request[fields.emit_slot].reshape(fields.wanted, fields.recurrent)
    for which in range(fields.wanted):
        state = publish_state(config, state, row, request[fields.emit_position][which], slots[which])
    for position, group in enumerate(config.geometry.attention):
        state = pool.release(config, state, config.group_pool[group], request[fields.copy_source][position])
    for position, group in enumerate(config.geometry.recurrent):
        state = pool.release(config, state, config.group_pool[group], request[fields.read][position])
    request = request.at[fields.copy_source].set(0).at[fields.read].set(0)
    return _drop_emissions(config, state._replace(requests=state.requests.at[row].set(request)), row)


def _drop_emissions(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """Drop a row's references to the slots it emitted to; published ones stay cached."""
    fields: RequestLayout = layout(config)
    request = state.requests[row]
    slots = request[fields.emit_slot].reshape(fields.wanted, fields.recurrent)
    for position, group in enumerate(config.geometry.recurrent):
        state = pool.release(config, state, config.group_pool[group], slots[:, position])
    request = request.at[fields.emit_position].set(0).at[fields.emit_slot].set(0)
    return state._replace(requests=state.requests.at[row].set(request))


def _append(config: CacheConfig, state: CacheState, outcome: Outcome) -> CacheState:
    """Lengthen the known tokens and file the keys of the units they complete."""
    fields = layout(config)
    before = state.requests[:, fields.KNOWN]
    after = before + outcome.produced
    rows = jnp.arange(config.max_requests)
    keys = state.keys
    for nth in range(keys_per_append(config)):
        unit = before // config.unit + nth
        at = jnp.where(unit < after // config.unit, unit, config.units)
        keys = keys.at[rows, at].set(outcome.unit_keys[:, nth], mode="drop")
    return state._replace(requests=state.requests.at[:, fields.KNOWN].set(after), keys=keys)
