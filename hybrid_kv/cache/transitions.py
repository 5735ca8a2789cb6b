"""Pure transitions of the cache state: arrive, commit, propose, withdraw, abort, reset.

Each takes (config, state, ...) and returns a new state; a transition that cannot be made returns
the state it was given and says so. `hybrid_kv.schedule` adds the one that plans a step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import index, log, pool
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.lookup import named_units
from hybrid_kv.cache.publish import (
    confirm_states,
    leave_prefill,
    publish_turn_end,
    publish_units,
    withdraw_states,
    withdraw_units,
)
from hybrid_kv.cache.state import (
    DONE,
    FREE,
    NEXT_SEQ,
    PLANNED,
    PREEMPTED,
    WAITING,
    CacheState,
    forget_all,
    layout,
)
from hybrid_kv.cache.statistics import take_back
from hybrid_kv.cache.windows import leave_windows, part

# On the host or on a device.
Ints = jax.Array | np.ndarray


class Outcome(NamedTuple):
    """What the device and the sampler made of a step, by request slot.

    produced i32[R]: tokens appended; a row that verified drafts keeps one less of them. finished bool[R]: the request
    ends with this step. unit_keys u32[R, A, 4]: keys of the hash units that the appended tokens complete, in order.
    """

    produced: Ints
    finished: Ints
    unit_keys: Ints


def keys_per_append(config: CacheConfig) -> int:
    """Units that `max_append` more tokens can complete at most."""
    return -(-config.max_append // config.unit)


def arrive(
    config: CacheConfig,
    state: CacheState,
    prompt: jax.Array,
    flags: jax.Array,
    keys: jax.Array,
    priority: jax.Array | int = 0,
) -> tuple[CacheState, jax.Array]:
    """Queue a request: (state, slot), slot -1 and the same state if all slots are taken.

    prompt: tokens. flags: `lookup.SKIP_READ`, `lookup.SALTED`. keys: uint32[U, 4] of its whole units. priority: see
    `CacheConfig.priority`.
    """
    fields = layout(config)
    status = state.requests[:, fields.STATUS]
    free = (status == FREE).any()
    slot = jnp.argmax(status == FREE).astype(jnp.int32)
    row = jnp.zeros((fields.size,), jnp.int32)
    names = (fields.STATUS, fields.SEQ, fields.PROMPT, fields.KNOWN, fields.FLAGS, fields.PRIORITY)
    values = (jnp.int32(WAITING), state.counters[NEXT_SEQ], prompt, prompt, flags, jnp.asarray(priority))
    row = row.at[jnp.array(names)].set(jnp.stack([jnp.asarray(value, jnp.int32) for value in values]))
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
    scheduled, verified = requests[:, fields.SCHEDULED], requests[:, fields.VERIFYING]
    start = requests[:, fields.COMPUTED]
    kept = scheduled - verified + jnp.where(verified > 0, jnp.maximum(outcome.produced - 1, 0), 0)
    computed = start + kept
    step = config.geometry.hit_unit
    # Of the boundaries that were crossed, the last one stays in each slot of the ring.
    top = jnp.minimum(computed, requests[:, fields.EMIT_TURN]) // step
    slot = jnp.arange(fields.turns, dtype=jnp.int32)
    boundary = (top[:, None] - (top[:, None] - slot) % fields.turns) * step
    crossed = (requests[:, fields.EMIT_TURN, None] > 0) & (boundary > start[:, None])
    turn = jnp.where(crossed, boundary, requests[:, fields.turn])
    ran = scheduled > 0
    admitted = jnp.where(ran, 0, requests[:, fields.ADMITTED])
    over = jnp.array([fields.SCHEDULED, fields.VERIFYING, fields.EMIT_TURN, fields.DRAFTS])
    requests = requests.at[:, over].set(0).at[:, fields.turn].set(turn)
    requests = requests.at[:, fields.COMPUTED].set(computed).at[:, fields.ADMITTED].set(admitted)
    counters = state.counters.at[DONE].set(state.counters[PLANNED])
    state = _append(config, state._replace(requests=requests, counters=counters), outcome)
    state = publish_units(config, state)
    pinned = ran & (
        (requests[:, fields.emit_position] > 0).any(1)
        | (requests[:, fields.read] > 0).any(1)
        | (requests[:, fields.copy_source] > 0).any(1)
    )
    state = _for_rows(config, pinned, _settle, state)
    state = leave_windows(config, state, ran)
    return _for_rows(config, jnp.asarray(outcome.finished), release_request, state)


def propose(config: CacheConfig, state: CacheState, drafts: jax.Array) -> CacheState:
    """Say how many draft tokens (i32[R], `max_drafts` at most) every request wants verified in its next row."""
    drafts = jnp.clip(jnp.asarray(drafts, jnp.int32), 0, config.max_drafts)
    return state._replace(requests=state.requests.at[:, layout(config).DRAFTS].set(drafts))


def withdraw(config: CacheConfig, state: CacheState) -> CacheState:
    """Forget the step in flight: nothing it would have written is ever published.

    Requests that ran before keep the blocks they were given; those admitted by this step wait again, since they may
    share content that it would have written.
    """
    fields = layout(config)
    scheduled, admitted = state.requests[:, fields.SCHEDULED] > 0, state.requests[:, fields.ADMITTED] > 0
    state = _for_rows(config, scheduled, _forget_plan, pool.compact(config, state))
    state = _for_rows(config, scheduled & ~admitted, _settle, state)
    state = take_back(_for_rows(config, admitted, _wait_again, state))
    return state._replace(counters=state.counters.at[DONE].set(state.counters[PLANNED]))


def abort(config: CacheConfig, state: CacheState, slot: jax.Array) -> CacheState:
    """End a request at any moment; what its committed steps published stays, the rest never was."""
    fields = layout(config)
    live = jnp.arange(config.max_requests) == slot
    live &= state.requests[:, fields.STATUS] != FREE

    def end(config, state, row):
        # The step still runs, so what it overwrites is not filed.
        emit_turn, scheduled = state.requests[row, fields.EMIT_TURN], state.requests[row, fields.SCHEDULED]
        state = _forget_plan(config, state, row)
        state = state._replace(requests=state.requests.at[row, fields.EMIT_TURN].set(emit_turn))
        return release_request(config, leave_prefill(config, state, row, scheduled == 0), row)

    return _for_rows(config, live, end, pool.compact(config, state))


def reset(config: CacheConfig, state: CacheState) -> tuple[CacheState, jax.Array]:
    """Forget all cached content: (state, done). Refused, state unchanged, while a request runs."""
    idle = (state.requests[:, layout(config).STATUS] <= WAITING).all()
    empty = forget_all(config, state)
    if log.is_kept(state):
        empty = log.cleared(empty)
    return jax.tree.map(lambda new, old: jnp.where(idle, new, old), empty, state), idle


def preempt(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """Take everything from a running request and put it back in the queue at its old place.

    Whatever this step had planned for it is planned no more, so its turn-end state can be filed.
    """
    fields = layout(config)
    state = leave_prefill(config, _forget_plan(config, state, row), row, jnp.ones((), bool))
    state = _wait_again(config, state, row)
    return state._replace(
        requests=state.requests.at[row, fields.PREEMPTIONS].add(1), counters=state.counters.at[PREEMPTED].add(1)
    )


def _wait_again(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    fields = layout(config)
    before = state.requests[row]
    state = release_request(config, state, row)
    keep = jnp.array([fields.SEQ, fields.PROMPT, fields.KNOWN, fields.FLAGS, fields.PRIORITY, fields.PREEMPTIONS])
    again = jnp.zeros_like(before).at[keep].set(before[keep]).at[fields.STATUS].set(WAITING)
    return state._replace(requests=state.requests.at[row].set(again))


def release_request(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """Publish a request's turn-end state and drop its references; the row is left blank.

    Tables are freed from their end, so the tail of a prefix is reused before its head. States of the prefix count as
    used now, like its rows: one is worth nothing without the other.
    """
    fields, geometry = layout(config), config.geometry
    state = _refresh_states(config, publish_turn_end(config, state, row), row)
    for position, group in enumerate(geometry.paged):
        if geometry.groups[group].kind.windowed:
            state = part(config, state, row, position, jnp.int32(config.columns[position]))
    request = state.requests[row]
    emitted = request[fields.emit_slot].reshape(fields.emissions, fields.recurrent)
    turns = request[fields.turn_slot].reshape(fields.turns, fields.recurrent)
    held = []
    for position, group in enumerate(geometry.paged):
        first = config.column_offset[position]
        table = jax.lax.dynamic_slice(state.tables, (row, first), (1, config.columns[position]))[0]
        held += [(group, table[::-1]), (group, request[fields.copy_source][position : position + 1])]
    for position, group in enumerate(geometry.recurrent):
        own, read = (request[part][position : position + 1] for part in (fields.running, fields.read))
        held.append((group, jnp.concatenate([own, turns[:, position], read, emitted[:, position]])))
    state = _drop(config, state, held)
    return state._replace(requests=state.requests.at[row].set(0), tables=state.tables.at[row].set(0))


def _refresh_states(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    fields = layout(config)
    if not (config.prefix_caching and config.geometry.recurrent):
        return state
    request = state.requests[row]
    named = named_units(config, request[fields.KNOWN]) * config.unit
    lengths = jnp.sort(jnp.append(request[fields.points], request[fields.HIT]))
    lengths = jnp.where(lengths <= jnp.minimum(request[fields.COMPUTED], named), lengths, 0)
    keys = state.keys[row, jnp.maximum(lengths // config.unit - 1, 0)]
    for group in config.geometry.recurrent:
        found = jnp.where(lengths > 0, index.find(state.entries, index.tag(keys, group)).block, 0)
        state = pool.refresh(config, state, config.group_pool[group], found)
    return state


def _for_rows(config: CacheConfig, mask: jax.Array, body, state: CacheState) -> CacheState:
    """Apply `body(config, state, row)` to the marked request slots, in slot order."""
    rows = jnp.nonzero(mask, size=config.max_requests, fill_value=0)[0].astype(jnp.int32)
    return jax.lax.fori_loop(0, mask.sum(dtype=jnp.int32), lambda i, s: body(config, s, rows[i]), state)


def _settle(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """Drop the pins of what a row read, copied from and saved; what it saved was filed when it was planned, and counts
    from now on."""
    fields, geometry = layout(config), config.geometry
    request = state.requests[row]
    emitted = request[fields.emit_slot].reshape(fields.emissions, fields.recurrent)
    # In a step that is withdrawn they have lost their keys.
    state = confirm_states(config, state, row, request[fields.emit_position], emitted)
    pinned = []
    for position, group in enumerate(geometry.paged):
        pinned.append((group, request[fields.copy_source][position : position + 1]))
    for position, group in enumerate(geometry.recurrent):
        read = request[fields.read][position : position + 1]
        pinned.append((group, jnp.concatenate([read, emitted[:, position]])))
    state = _drop(config, state, pinned)
    request = request.at[fields.copy_source].set(0).at[fields.read].set(0)
    request = request.at[fields.emit_position].set(0).at[fields.emit_slot].set(0)
    return state._replace(requests=state.requests.at[row].set(request))


def _forget_plan(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """Take back what the step in flight had planned for a row: its pending keys and its tokens.

    The slots of its emissions stay its own until it is released.
    """
    fields = layout(config)
    state = withdraw_units(config, state, row)
    state = withdraw_states(config, state, state.requests[row, fields.emit_slot])
    columns = jnp.array([fields.SCHEDULED, fields.VERIFYING, fields.EMIT_TURN])
    return state._replace(requests=state.requests.at[row, columns].set(0))


def _drop(config: CacheConfig, state: CacheState, parts: list[tuple[int, jax.Array]]) -> CacheState:
    """Drop one reference of all given blocks, (group, i32[n] ids), each pool at once and in this order."""
    for number in range(len(config.pool_blocks)):
        ids = [ids for group, ids in parts if config.group_pool[group] == number]
        state = pool.release(config, state, number, jnp.concatenate(ids))
    return state


def _append(config: CacheConfig, state: CacheState, outcome: Outcome) -> CacheState:
    """Lengthen the known tokens and store the keys of the units they complete."""
    fields = layout(config)
    before = state.requests[:, fields.KNOWN]
    after = before + outcome.produced
    rows = jnp.arange(config.max_requests)
    keys = state.keys
    for nth in range(keys_per_append(config)):
        unit = named_units(config, before) + nth
        at = jnp.where(unit < named_units(config, after), unit, config.units)
        keys = keys.at[rows, at].set(outcome.unit_keys[:, nth], mode="drop")
    return state._replace(requests=state.requests.at[:, fields.KNOWN].set(after), keys=keys)
