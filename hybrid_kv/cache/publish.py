"""Filing keys for content that a step has written, or is about to write."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import earnings, eviction, flights, index, log
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.lookup import named_units
from hybrid_kv.cache.pool import free_keyless
from hybrid_kv.cache.state import (
    BITS,
    DONE,
    KEPT,
    KIND_SHIFT,
    OVERFLOWED,
    PENDING_FROM,
    PENDING_STEP,
    PLACES,
    PLANNED,
    SAVED_STATES,
    SAVING_SHIFT,
    SPARE,
    STATE,
    CacheState,
    layout,
    read_first,
)


def nameable_units(config: CacheConfig, requests: jax.Array, computed: jax.Array) -> jax.Array:
    """Leading units that have content and a key, by request and group with a table: i32[R, paged]."""
    named = named_units(config, requests[:, layout(config).KNOWN])
    lags = jnp.array([config.lag(group) for group in config.geometry.paged], jnp.int32)
    return jnp.maximum(jnp.minimum((computed // config.unit)[:, None], named[:, None] - lags), 0)


def publish_units(config: CacheConfig, state: CacheState) -> CacheState:
    """File every hash unit that requests have computed since the last commit, in all groups with tables.

    Equal content is filed once. A later copy takes a key over unless it holds less of the block than
    the first: the longest copy owns the keys, among equals the one used last, so evicting an old copy
    never hides a newer one. Work grows with the number of new units only.
    """
    fields, geometry = layout(config), config.geometry
    if not (config.prefix_caching and geometry.paged):
        return state
    filed = state.requests[:, fields.published]
    done = jnp.maximum(nameable_units(config, state.requests, state.requests[:, fields.COMPUTED]), filed)

    def file_unit(state, row, position, unit):
        return _file_unit(config, state, row, position, unit, done[row, position], pending=False)

    if config.steps_in_flight > 1:
        state = _confirm_units(config, state, done)
    if log.is_kept(state):
        state = _for_units(config, filed, done, functools.partial(_tell_unit, config), state)
    state = _for_units(config, filed, done, file_unit, state)
    return state._replace(requests=state.requests.at[:, fields.published].set(done))


def file_again(
    config: CacheConfig, state: CacheState, row: jax.Array, position: int, column: jax.Array, ok: jax.Array
) -> CacheState:
    """File the committed units of a request's block again: a copy may have taken their names and may forget them."""
    done = state.requests[row, layout(config).published.start + position]
    per_block = config.units_per_block(config.geometry.paged[position])
    first = column * per_block
    count = jnp.where(ok, jnp.clip(done - first, 0, per_block), 0)

    def file_unit(i, state):
        return _file_unit(config, state, row, jnp.int32(position), first + i, done, pending=False)

    return jax.lax.fori_loop(0, count, file_unit, state)


def file_rows(config: CacheConfig, state: CacheState, row: jax.Array, first: jax.Array, stop: jax.Array) -> CacheState:
    """File the units of tokens [first, stop) (i32[paged]) that somebody else wrote to a request's blocks."""
    if not (config.prefix_caching and config.geometry.paged):
        return state
    request = state.requests[row][None]
    done = jnp.minimum(nameable_units(config, request, stop.max()[None]), stop // config.unit)

    def file_unit(state, _, position, unit):
        return _file_unit(config, state, row, position, unit, done[0, position], pending=False)

    return _for_units(config, -(-first // config.unit)[None], done, file_unit, state)


def announce_units(
    config: CacheConfig, state: CacheState, row: jax.Array, start: jax.Array, end: jax.Array
) -> CacheState:
    """File the units that a planned chunk of tokens [start, end) completes as pending, where nobody has them."""
    fields, geometry = layout(config), config.geometry
    if not (config.prefix_caching and geometry.paged):
        return state
    request = state.requests[row][None]
    filed = jnp.maximum(nameable_units(config, request, start[None]), request[:, fields.published])
    done = jnp.maximum(nameable_units(config, request, end[None]), filed)

    def file_unit(state, _, position, unit):
        return _file_unit(config, state, row, position, unit, done[0, position], pending=True)

    return _for_units(config, filed, done, file_unit, state)


def withdraw_units(config: CacheConfig, state: CacheState, row: jax.Array, start: jax.Array) -> CacheState:
    """Drop the pending keys of what a request's rows in flight compute from `start` on: it will not be filed."""
    fields, geometry = layout(config), config.geometry
    if not (config.prefix_caching and geometry.paged):
        return state
    request = state.requests[row][None]
    filed = jnp.maximum(nameable_units(config, request, start[None]), request[:, fields.published])
    done = jnp.maximum(nameable_units(config, request, flights.planned(config, request)), filed)
    constants = _constants(config)

    def forget_unit(state, _, position, unit):
        _, pool, first, per_block, _ = (constant[position] for constant in constants)
        block = state.tables[row, first + unit // per_block]
        ok = index.pending(state, block, unit % per_block)
        return free_keyless(config, index.forget(state, block, unit % per_block, ok), pool, block)

    return _for_units(config, filed, done, forget_unit, state)


def _for_units(config: CacheConfig, first: jax.Array, stop: jax.Array, body, state: CacheState) -> CacheState:
    """Apply `body(state, row, position, unit)` to the units [first, stop) of every row and group with a table."""
    fresh = jnp.maximum(stop - first, 0).reshape(-1)
    ends = jnp.cumsum(fresh)
    groups = first.shape[1]

    def one(i, state):
        at = jnp.searchsorted(ends, i, side="right").astype(jnp.int32)
        unit = first.reshape(-1)[at] + i - (ends[at] - fresh[at])
        return body(state, at // groups, at % groups, unit)

    return jax.lax.fori_loop(0, ends[-1], one, state)


def _file_unit(config: CacheConfig, state, row, position, unit, done, pending: bool) -> CacheState:
    geometry = config.geometry
    group, pool, first, per_block, lag = (constant[position] for constant in _constants(config))
    column = unit // per_block
    block = state.tables[row, first + column]
    covered = jnp.minimum(done - column * per_block, per_block)
    key = index.tag(state.keys[row, unit + lag], group)
    state, filed = _file(config, state, pool, group, key, block, unit % per_block, covered, pending)
    parent = _parent(state, row, unit, lag, group)
    if log.is_kept(state) and not pending:
        state = log.stored(state, group, key, parent, block, unit % per_block, filed)
    if geometry.attention:
        state = index.note_child(state, parent, key, (unit > 0) & (group == geometry.attention[0]))
    return state


def _confirm_units(config: CacheConfig, state: CacheState, done: jax.Array) -> CacheState:
    """Units before `done` (i32[R, paged]) are pending no more, also where a later step in flight names the next ones of
    their block. Steps name units in order, so that is one block of each request and group."""
    rows = jnp.arange(config.max_requests)
    for position, group in enumerate(config.geometry.paged):
        per_block = config.units_per_block(group)
        column, inside = done[:, position] // per_block, done[:, position] % per_block
        column = config.column_offset[position] + jnp.minimum(column, config.columns[position] - 1)
        block = state.tables[rows, column]

        def named_later(state, block=block):
            return state.blocks[block, PENDING_STEP] > state.counters[DONE]

        at = jnp.where((inside > 0) & (block > 0) & read_first(named_later, state), block, config.total_blocks)
        state = state._replace(blocks=state.blocks.at[at, PENDING_FROM].set(inside, mode="drop"))
    return state


def _tell_unit(config: CacheConfig, state: CacheState, row, position, unit) -> CacheState:
    """Tell of a unit that was announced, if its block still has the key; nothing else is filed yet by this commit."""
    group, _, first, per_block, lag = (constant[position] for constant in _constants(config))
    block = state.tables[row, first + unit // per_block]
    announced = read_first(lambda state: state.blocks[block, PLACES + unit % per_block] > 0, state)
    key = index.tag(state.keys[row, unit + lag], group)
    return log.stored(state, group, key, _parent(state, row, unit, lag, group), block, unit % per_block, announced)


def _parent(state: CacheState, row, unit: jax.Array, lag: jax.Array | int, group: jax.Array | int) -> jax.Array:
    """Tagged key of the unit before, zeros for the first: units [...] -> u32[..., 4]."""
    parent = index.tag(state.keys[row, jnp.maximum(unit + lag - 1, 0)], group)
    return jnp.where((unit > 0)[..., None], parent, np.uint32(0))


def publish_state(
    config: CacheConfig,
    state: CacheState,
    row: jax.Array,
    length: jax.Array,
    slots: jax.Array,
    rung: jax.Array,
    pending: bool = False,
    kind: jax.Array | int = earnings.TAIL,
) -> CacheState:
    """File a recurrent state of `length` tokens of a request, one slot per recurrent group.

    Nothing happens at length 0, or where the same prefix already has a state. rung: only a ladder asks for it.
    pending: a step in flight writes it. kind: see `cache.earnings`.
    """
    if not config.prefix_caching:
        return state
    unit = jnp.maximum(length // config.unit - 1, 0)
    saved = _saving(config, state, row, length)
    for position, group in enumerate(config.geometry.recurrent):
        slot = jnp.where(length > 0, slots[position], 0)
        key = index.tag(state.keys[row, unit], group)
        zero = jnp.int32(0)
        number = jnp.int32(config.group_pool[group])
        state, filed = _file(config, state, number, group, key, slot, zero, zero, pending)
        if not pending:
            state = state._replace(counters=state.counters.at[SAVED_STATES].add(filed.astype(jnp.int32)))
            if log.is_kept(state):
                state = log.stored(state, group, key, _parent(state, row, unit, 0, group), slot, zero, filed)
        if position == 0:
            state = earnings.note_saved(config, state, kind, filed)
        bits = (
            STATE
            + SPARE * rung.astype(jnp.int32)
            + (saved << SAVING_SHIFT)
            + (jnp.asarray(kind, jnp.int32) << KIND_SHIFT)
        )
        at = jnp.where(slot > 0, slot, config.total_blocks)
        state = state._replace(blocks=state.blocks.at[at, BITS].set(bits, mode="drop"))
    return state


def _saving(config: CacheConfig, state: CacheState, row: jax.Array, length: jax.Array) -> jax.Array:
    """What a state of `length` tokens of a request saves beyond its next shorter point, see `eviction.saving`."""
    fields = layout(config)
    request = state.requests[row]
    points = jnp.append(request[fields.points], request[fields.HIT])
    below = jnp.where(points < length, points, 0).max()
    return eviction.saving((length - below) // max(len(config.geometry.recurrent), 1))


def confirm_states(
    config: CacheConfig, state: CacheState, row: jax.Array, lengths: jax.Array, slots: jax.Array
) -> CacheState:
    """Count, and tell of, the states that a committed row of a request has saved, where they still have their keys.

    lengths: i32[E] tokens (0: none). slots: i32[E, recurrent].
    """
    if not slots.size:
        return state
    filed = read_first(lambda state: state.blocks[slots, PLACES] > 0, state) & (slots > 0)
    state = state._replace(counters=state.counters.at[SAVED_STATES].add(filed.sum(dtype=jnp.int32)))
    if not log.is_kept(state):
        return state
    units = jnp.maximum(lengths // config.unit - 1, 0)
    for position, group in enumerate(config.geometry.recurrent):
        key, parent = index.tag(state.keys[row, units], group), _parent(state, row, units, 0, group)
        slot, none = slots[:, position], jnp.zeros_like(units)
        state = log.stored(state, group, key, parent, slot, none, filed[:, position])
    return state


def withdraw_states(config: CacheConfig, state: CacheState, slots: jax.Array) -> CacheState:
    """Drop the pending keys of states that will not be written: i32[n] slots, 0: none."""
    if not slots.size:
        return state

    def forget(i, state):
        zero = jnp.int32(0)
        return index.forget(state, slots[i], zero, index.pending(state, slots[i], zero))

    return jax.lax.fori_loop(0, slots.shape[0], forget, state)


def publish_turn_end(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """File the state of the last hit boundary of the generated text that can be resumed at, if the request holds one.

    Not from a slot that a row in flight may still write over.
    """
    fields, step = layout(config), config.geometry.hit_unit
    request = state.requests[row]
    named = (named_units(config, request[fields.KNOWN]) - config.longest_lag) * config.unit
    last = flights.every(config, request).emit_turn
    coming = turn_boundaries(config, last)
    coming = jnp.where(coming > request[fields.COMPUTED], coming, 0).reshape(-1)
    slot = jnp.arange(fields.turns, dtype=jnp.int32)
    doomed = ((coming > 0) & (coming // step % fields.turns == slot[:, None])).any(1)
    lengths = jnp.where(~doomed & (request[fields.turn] <= named), request[fields.turn], 0)
    best = jnp.argmax(lengths)
    slots = request[fields.turn_slot].reshape(fields.turns, fields.recurrent)[best]
    return publish_state(config, state, row, lengths[best], slots, jnp.zeros((), bool), kind=earnings.TURN)


def turn_boundaries(config: CacheConfig, last: jax.Array) -> jax.Array:
    """Hit boundaries up to the `last` (i32[...], 0: none) that one row may cross: i32[..., T], ascending."""
    back = jnp.arange(config.turn_candidates - 1, -1, -1, dtype=jnp.int32) * config.geometry.hit_unit
    return jnp.where(last[..., None] > 0, jnp.maximum(last[..., None] - back, 0), 0)


def leave_prefill(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """File the running state of a request that goes in the middle of its prefill, if it ends at a hit boundary and no
    row in flight takes it further."""
    fields = layout(config)
    request = state.requests[row]
    settled = flights.planned(config, request) == request[fields.COMPUTED]
    computed, known = request[fields.COMPUTED], request[fields.KNOWN]
    reached = settled & (computed > request[fields.HIT]) & (computed < known - 1)
    reached &= (computed % config.geometry.hit_unit == 0) & (computed <= named_units(config, known) * config.unit)
    length = jnp.where(reached, computed, 0)
    return publish_state(config, state, row, length, request[fields.running], jnp.zeros((), bool))


def _constants(config: CacheConfig) -> tuple[jax.Array, ...]:
    """By group with a table: group, pool, first column, units of a block, lag."""
    groups = config.geometry.paged
    columns = (
        groups,
        [config.group_pool[group] for group in groups],
        config.column_offset,
        [config.units_per_block(group) for group in groups],
        [config.lag(group) for group in groups],
    )
    return tuple(jnp.asarray(np.array(column, np.int32)) for column in columns)


def _file(
    config: CacheConfig,
    state: CacheState,
    pool: jax.Array,
    group: jax.Array | int,
    key: jax.Array,
    block: jax.Array,
    unit: jax.Array,
    covered: jax.Array,
    pending: bool,
) -> tuple[CacheState, jax.Array]:
    """File one key as the unit-th of `block` (0: nothing) unless another block holds more units: (state, whether).

    pending: the content is not written yet; then it takes over nothing.
    """
    units = jnp.arange(1, state.blocks.shape[1] - PLACES + 1, dtype=jnp.int32)

    def read(state):
        found = index.locate(state.entries, key)
        held = jnp.where(state.blocks[found.block, PLACES:] > 0, units, 0).max()
        better = found.block == 0
        if not pending:
            better |= (found.block != block) & (covered >= held)
        # Names of several steps in flight: all are of the last of them, until a commit confirms some.
        flying = state.blocks[block, PENDING_STEP] > state.counters[DONE]
        first = jnp.where(flying, state.blocks[block, PENDING_FROM], unit)
        bits = state.blocks[block, BITS] | (state.blocks[found.block, BITS] & KEPT)
        return found, (block > 0) & (found.place >= 0) & better, first, bits

    found, ok, first, bits = read_first(read, state)
    full = (block > 0) & (found.place < 0)
    state = state._replace(counters=state.counters.at[OVERFLOWED].add(full.astype(jnp.int32)))
    state = index.put(state, key, group, found.place, block, unit, ok)
    if not pending:
        if any(group.kind.windowed for group in config.geometry.groups):
            # Content that somebody keeps stays kept.
            at = jnp.where(ok, block, config.total_blocks)
            state = state._replace(blocks=state.blocks.at[at, BITS].set(bits, mode="drop"))
        return free_keyless(config, state, pool, jnp.where(ok, found.block, 0)), ok
    at = jnp.where(ok, block, config.total_blocks)
    columns = jnp.array([PENDING_STEP, PENDING_FROM])
    values = jnp.stack([state.counters[PLANNED], first])
    return state._replace(blocks=state.blocks.at[at, columns].set(values, mode="drop")), ok
