"""Filing keys for content that a step has written, or is about to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import earnings, eviction, flights, index, log
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.filing import Items, file
from hybrid_kv.cache.lookup import named_units
from hybrid_kv.cache.pool import free_keyless
from hybrid_kv.cache.ranks import ragged, sums
from hybrid_kv.cache.state import (
    BITS,
    DONE,
    KIND_SHIFT,
    PENDING_FROM,
    PENDING_STEP,
    PLACES,
    SAVED_STATES,
    SAVING_SHIFT,
    SPARE,
    STATE,
    CacheState,
    layout,
    read_first,
)

# Units that are filed at once.
_BATCH = 64


class _Units(NamedTuple):
    """Hash units of requests in groups with a table, [n] each. row: request slot. position: of the group. unit: from
    the beginning of the request. ok: bool, not just padding."""

    row: jax.Array
    position: jax.Array
    unit: jax.Array
    ok: jax.Array


def nameable_units(config: CacheConfig, known: jax.Array, computed: jax.Array) -> jax.Array:
    """Leading units that have content and a key, by group with a table: tokens i32[...] -> i32[paged, ...]."""
    named = named_units(config, known)
    lags = [config.lag(group) for group in config.geometry.paged]
    return jnp.stack([jnp.maximum(jnp.minimum(computed // config.unit, named - lag), 0) for lag in lags])


def publish_units(
    config: CacheConfig, state: CacheState, known: jax.Array, computed: jax.Array
) -> tuple[CacheState, jax.Array]:
    """File every hash unit that requests have computed since the last commit, in all groups with tables.

    known, computed: i32[R] tokens. -> the state, and the units filed from now on, i32[paged, R]. Work grows with the
    number of new units only.
    """
    filed = state.requests[layout(config).published]
    if not (config.prefix_caching and config.geometry.paged):
        return state, filed
    done = jnp.maximum(nameable_units(config, known, computed), filed)
    if config.steps_in_flight > 1:
        state = _confirm_units(config, state, done)
    if log.is_kept(state):
        state = _in_batches(filed, done, lambda state, units: _tell_units(config, state, units), state)

    def file_units(state, units):
        return _file_units(config, state, units, done[units.position, units.row], pending=False)

    return _in_batches(filed, done, file_units, state), done


def file_again(
    config: CacheConfig, state: CacheState, row: jax.Array, position: int, column: jax.Array, ok: jax.Array
) -> CacheState:
    """File the committed units of a request's block again: a copy may have taken their names and may forget them."""
    done = state.requests[layout(config).published.start + position, row]
    per_block = config.units_per_block(config.geometry.paged[position])
    first = column * per_block
    count = jnp.where(ok, jnp.clip(done - first, 0, per_block), 0)

    def file_units(state, units):
        units = units._replace(row=row + units.row, position=position + units.position)
        return _file_units(config, state, units, jnp.full(units.row.shape, done), pending=False)

    return _in_batches(first[None, None], (first + count)[None, None], file_units, state)


def file_rows(config: CacheConfig, state: CacheState, row: jax.Array, first: jax.Array, stop: jax.Array) -> CacheState:
    """File the units of tokens [first, stop) (i32[paged]) that somebody else wrote to a request's blocks."""
    if not (config.prefix_caching and config.geometry.paged):
        return state
    known = state.requests[layout(config).KNOWN, row]
    done = jnp.minimum(nameable_units(config, known, stop.max()), stop // config.unit)
    return _file_one(config, state, row, -(-first // config.unit), done, pending=False)


def announce_units(
    config: CacheConfig, state: CacheState, row: jax.Array, start: jax.Array, end: jax.Array
) -> CacheState:
    """File the units that a planned chunk of tokens [start, end) completes as pending, where nobody has them."""
    if not (config.prefix_caching and config.geometry.paged):
        return state
    filed, done = _fresh(config, state, row, start, end)
    return _file_one(config, state, row, filed, done, pending=True)


def withdraw_units(config: CacheConfig, state: CacheState, row: jax.Array, start: jax.Array) -> CacheState:
    """Drop the pending keys of what a request's rows in flight compute from `start` on: it will not be filed."""
    if not (config.prefix_caching and config.geometry.paged):
        return state
    filed, done = _fresh(config, state, row, start, flights.planned(config, state.requests[:, row]))

    def forget_units(state, units):
        _, pool, block, unit = _where(config, state, units._replace(row=row + units.row))
        ok = units.ok & index.pending(state, block, unit)
        return free_keyless(config, index.forget(state, block, unit, ok), pool, jnp.where(ok, block, 0))

    return _in_batches(filed[:, None], done[:, None], forget_units, state)


def _fresh(
    config: CacheConfig, state: CacheState, row: jax.Array, start: jax.Array, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Units of a request that tokens [start, end) complete, by group with a table: first and stop, i32[paged]."""
    fields = layout(config)
    known = state.requests[fields.KNOWN, row]
    filed = jnp.maximum(nameable_units(config, known, start), state.requests[fields.published, row])
    return filed, jnp.maximum(nameable_units(config, known, end), filed)


def _file_one(
    config: CacheConfig, state: CacheState, row: jax.Array, first: jax.Array, stop: jax.Array, pending: bool
) -> CacheState:
    """File units [first, stop), i32[paged], of one request."""

    def file_units(state, units):
        return _file_units(config, state, units._replace(row=row + units.row), stop[units.position], pending)

    return _in_batches(first[:, None], stop[:, None], file_units, state)


def _in_batches(
    first: jax.Array, stop: jax.Array, body: Callable[[CacheState, _Units], CacheState], state: CacheState
) -> CacheState:
    """Apply `body` to the units [first, stop) of groups with a table and requests, i32[paged, R] each, in order."""
    # The units of a request lie side by side, all groups of it one after the other.
    begin, fresh = first.T.reshape(-1), jnp.maximum(stop - first, 0).T.reshape(-1)
    before = sums(fresh)
    total, groups = before[-1] + fresh[-1], first.shape[0]

    def one_batch(carry):
        base, state = carry
        item = base + jnp.arange(_BATCH, dtype=jnp.int32)
        at = ragged(before, jnp.minimum(item, total - 1))
        unit = begin[at] + item - before[at]
        return base + _BATCH, body(state, _Units(at // groups, at % groups, unit, item < total))

    return jax.lax.while_loop(lambda carry: carry[0] < total, one_batch, (jnp.int32(0), state))[1]


def _where(config: CacheConfig, state: CacheState, units: _Units) -> tuple[jax.Array, ...]:
    """Group, pool, block, and the unit's number in the block, of units."""
    group, pool, first, per_block, _ = (constant[units.position] for constant in _constants(config))
    block = state.tables[units.row, first + jnp.where(units.ok, units.unit, 0) // per_block]
    return group, pool, jnp.where(units.ok, block, 0), units.unit % per_block


def _keys(config: CacheConfig, state: CacheState, units: _Units) -> tuple[jax.Array, jax.Array]:
    """Key of every unit, and of the one before (zeros: none): u32[n, 4]."""
    lag = _constants(config)[4][units.position]
    return _with_parent(state, units.row, jnp.where(units.ok, units.unit, 0), lag)


def _with_parent(
    state: CacheState, row: jax.Array, unit: jax.Array, lag: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array]:
    parent = state.keys[row, jnp.maximum(unit + lag - 1, 0)]
    return state.keys[row, unit + lag], jnp.where((unit > 0)[..., None], parent, np.uint32(0))


def _file_units(config: CacheConfig, state: CacheState, units: _Units, done: jax.Array, pending: bool) -> CacheState:
    group, pool, block, inside = _where(config, state, units)
    per_block = _constants(config)[3][units.position]
    key, parent = _keys(config, state, units)
    covered = jnp.minimum(done - units.unit + inside, per_block)
    items = Items(group, pool, key, parent, block, inside, covered, units.ok)
    state, _ = file(config, state, items, pending)
    if not config.geometry.attention:
        return state
    follows = units.ok & (units.unit > 0) & (group == config.geometry.attention[0])
    return index.note_children(state, parent, key, follows)


def _confirm_units(config: CacheConfig, state: CacheState, done: jax.Array) -> CacheState:
    """Units before `done` (i32[paged, R]) are pending no more, also where a later step in flight names the next ones of
    their block. Steps name units in order, so that is one block of each request and group."""
    rows = jnp.arange(config.max_requests)
    for position, group in enumerate(config.geometry.paged):
        per_block = config.units_per_block(group)
        column, inside = done[position] // per_block, done[position] % per_block
        column = config.column_offset[position] + jnp.minimum(column, config.columns[position] - 1)
        block = state.tables[rows, column]

        def named_later(state, block=block):
            return state.blocks[block, PENDING_STEP] > state.counters[DONE]

        at = jnp.where((inside > 0) & (block > 0) & read_first(named_later, state), block, config.total_blocks)
        state = state._replace(blocks=state.blocks.at[at, PENDING_FROM].set(inside, mode="drop"))
    return state


def _tell_units(config: CacheConfig, state: CacheState, units: _Units) -> CacheState:
    """Tell of units that were announced, where blocks still have the keys; this commit has filed nothing else yet."""
    group, _, block, inside = _where(config, state, units)
    announced = read_first(lambda state: state.blocks[block, PLACES + inside] > 0, state) & units.ok & (block > 0)
    key, parent = _keys(config, state, units)
    return log.stored(state, group, key, parent, block, inside, announced)


def publish_states(
    config: CacheConfig,
    state: CacheState,
    row: jax.Array,
    lengths: jax.Array,
    slots: jax.Array,
    rung: jax.Array,
    pending: bool = False,
    kind: jax.Array | int = earnings.TAIL,
) -> CacheState:
    """File recurrent states of a request.

    lengths: i32[E] tokens, 0: none. slots: i32[E, recurrent]. rung: bool[E], only a ladder asks for it. Nothing happens
    where the same prefix already has a state. pending: a step in flight writes them. kind: i32[E], as in `earnings`.
    """
    geometry = config.geometry
    if not (config.prefix_caching and geometry.recurrent):
        return state
    count = len(geometry.recurrent)
    unit = jnp.repeat(jnp.maximum(lengths // config.unit - 1, 0), count)
    slot = jnp.where(lengths[:, None] > 0, slots, 0).reshape(-1)
    group = jnp.tile(jnp.array(geometry.recurrent, jnp.int32), lengths.shape[0])
    pool = jnp.array(config.group_pool, jnp.int32)[group]
    key, parent = _with_parent(state, row, unit)
    zero = jnp.zeros_like(unit)
    saved = _saving(config, state, row, lengths) << SAVING_SHIFT
    state, filed = file(config, state, Items(group, pool, key, parent, slot, zero, zero, slot > 0), pending)
    if not pending:
        state = state._replace(counters=state.counters.at[SAVED_STATES].add(filed.sum(dtype=jnp.int32)))
    kinds = jnp.broadcast_to(jnp.asarray(kind, jnp.int32), lengths.shape)
    state = earnings.note_saved(config, state, kinds, filed.reshape(-1, count)[:, 0])
    bits = STATE + SPARE * rung.astype(jnp.int32) + saved + (kinds << KIND_SHIFT)
    at = jnp.where(slot > 0, slot, config.total_blocks)
    return state._replace(blocks=state.blocks.at[at, BITS].set(jnp.repeat(bits, count), mode="drop"))


def publish_state(
    config: CacheConfig, state: CacheState, row: jax.Array, length: jax.Array, slots: jax.Array,
    kind: jax.Array | int = earnings.TAIL,
) -> CacheState:  # fmt: skip
    """File one state, of `length` tokens (0: none), in slots i32[recurrent]."""
    return publish_states(config, state, row, length[None], slots[None], jnp.zeros((1,), bool), kind=kind)


def _saving(config: CacheConfig, state: CacheState, row: jax.Array, lengths: jax.Array) -> jax.Array:
    """What states of i32[E] tokens of a request save beyond the next shorter point, see `eviction.saving`."""
    fields = layout(config)
    points = jnp.append(state.requests[fields.points, row], state.requests[fields.HIT, row])
    below = jnp.where(points < lengths[:, None], points, 0).max(1)
    return eviction.saving((lengths - below) // max(len(config.geometry.recurrent), 1))


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
    key, parent = _with_parent(state, row, units)
    for position, group in enumerate(config.geometry.recurrent):
        slot, none = slots[:, position], jnp.zeros_like(units)
        state = log.stored(state, group, key, parent, slot, none, filed[:, position])
    return state


def withdraw_states(config: CacheConfig, state: CacheState, slots: jax.Array) -> CacheState:
    """Drop the pending keys of states that will not be written: i32[n] slots, 0: none."""
    if not slots.size:
        return state

    zero = jnp.zeros_like(slots)
    return index.forget(state, slots, zero, (slots > 0) & index.pending(state, slots, zero))


def publish_turn_end(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """File the state of the last hit boundary of the generated text that can be resumed at, if the request holds one.

    Not from a slot that a row in flight may still write over.
    """
    fields, step = layout(config), config.geometry.hit_unit
    request = state.requests[:, row]
    named = (named_units(config, request[fields.KNOWN]) - config.longest_lag) * config.unit
    last = flights.every(config, request).emit_turn
    coming = turn_boundaries(config, last)
    coming = jnp.where(coming > request[fields.COMPUTED], coming, 0).reshape(-1)
    slot = jnp.arange(fields.turns, dtype=jnp.int32)
    doomed = ((coming > 0) & (coming // step % fields.turns == slot[:, None])).any(1)
    lengths = jnp.where(~doomed & (request[fields.turn] <= named), request[fields.turn], 0)
    best = jnp.argmax(lengths)
    slots = request[fields.turn_slot].reshape(fields.turns, fields.recurrent)[best]
    return publish_state(config, state, row, lengths[best], slots, kind=earnings.TURN)


def turn_boundaries(config: CacheConfig, last: jax.Array) -> jax.Array:
    """Hit boundaries up to the `last` (i32[...], 0: none) that one row may cross: i32[..., T], ascending."""
    back = jnp.arange(config.turn_candidates - 1, -1, -1, dtype=jnp.int32) * config.geometry.hit_unit
    return jnp.where(last[..., None] > 0, jnp.maximum(last[..., None] - back, 0), 0)


def leave_prefill(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """File the running state of a request that goes in the middle of its prefill, if it ends at a hit boundary and no
    row in flight takes it further."""
    fields = layout(config)
    request = state.requests[:, row]
    settled = flights.planned(config, request) == request[fields.COMPUTED]
    computed, known = request[fields.COMPUTED], request[fields.KNOWN]
    reached = settled & (computed > request[fields.HIT]) & (computed < known - 1)
    reached &= (computed % config.geometry.hit_unit == 0) & (computed <= named_units(config, known) * config.unit)
    length = jnp.where(reached, computed, 0)
    return publish_state(config, state, row, length, request[fields.running])


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
