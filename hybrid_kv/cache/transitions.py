"""Pure transitions of the cache state: arrive, commit, propose, withdraw, abort, preempt_running, reset.

Each takes (config, state, ...) and returns a new state; a transition that cannot be made returns
the state it was given and says so. `hybrid_kv.schedule` adds the one that plans a step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import earnings, flights, index, log, pool
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.lookup import named_units
from hybrid_kv.cache.loops import for_rows
from hybrid_kv.cache.publish import (
    confirm_states,
    leave_prefill,
    publish_turn_end,
    publish_units,
    withdraw_states,
    withdraw_units,
)
from hybrid_kv.cache.ranks import merged, sorted_few
from hybrid_kv.cache.state import (
    ABANDONED,
    BITS,
    BROUGHT,
    COVERAGE,
    DONE,
    FREE,
    KIND_SHIFT,
    LOADING,
    NEXT_SEQ,
    NOTHING,
    PLANNED,
    PREEMPTED,
    TIED,
    UNDECIDED,
    WAITING,
    CacheState,
    forget_all,
    layout,
    read_first,
    zero_after,
)
from hybrid_kv.cache.statistics import take_back
from hybrid_kv.cache.tracing import traced_once
from hybrid_kv.cache.windows import leave_windows, part

# On the host or on a device.
Ints = jax.Array | np.ndarray


class Outcome(NamedTuple):
    """What the device and the sampler made of the oldest step in flight, by request slot.

    produced i32[R]: tokens appended; a row that verified drafts keeps one less of them. finished bool[R]: the request
    ends with these tokens. unit_keys u32[R, A, 4]: keys of the hash units that the appended tokens complete, in order.
    What is said of a slot whose request has no row in that step counts for nothing.
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
    limit: jax.Array | int = 1 << 30,
) -> tuple[CacheState, jax.Array]:
    """Queue a request: (state, slot), slot -1 and the same state if all slots are taken.

    prompt: tokens. flags: `lookup.SKIP_READ`, `lookup.SALTED`. keys: uint32[U, 4] of its whole units. priority: see
    `CacheConfig.priority`. limit: tokens it may have in the end; no row is planned for one that steps in flight are
    sure to bring there.
    """
    fields = layout(config)
    status = state.requests[fields.STATUS]
    free = (status == FREE).any()
    slot = jnp.argmax(status == FREE).astype(jnp.int32)
    row = jnp.zeros((fields.size,), jnp.int32)
    names = (fields.STATUS, fields.SEQ, fields.PROMPT, fields.KNOWN, fields.LIMIT, fields.FLAGS, fields.PRIORITY)
    values = (WAITING, state.counters[NEXT_SEQ], prompt, prompt, limit, flags, priority)
    row = row.at[jnp.array(names)].set(jnp.stack([jnp.asarray(value, jnp.int32) for value in values]))
    at = jnp.where(free, slot, config.max_requests)
    state = state._replace(
        requests=state.requests.at[:, at].set(row, mode="drop"),
        keys=state.keys.at[at].set(keys, mode="drop"),
        counters=state.counters.at[NEXT_SEQ].add(free.astype(jnp.int32)),
    )
    return state, jnp.where(free, slot, -1)


def commit(config: CacheConfig, state: CacheState, outcome: Outcome) -> CacheState:
    """Make the step in flight visible: lengths, keys, emitted states; end finished requests.

    Call it once the step has been handed to the device and cannot be dropped any more.
    """
    return end_rows(config, *commit_rows(config, state, outcome))


def commit_rows(config: CacheConfig, state: CacheState, outcome: Outcome) -> tuple[CacheState, jax.Array]:
    """`commit`, but for the end of requests: (state, those that end with this step, bool[R])."""
    place = flights.oldest(config, state)
    state, rows = move_on(config, pool.compact(config, state), outcome)
    state = for_rows(config, rows.pinned, lambda config, state, row: _settle(config, state, row, place), state)
    return leave_windows(config, state, rows.ran), rows.ended


def end_rows(config: CacheConfig, state: CacheState, ended: jax.Array) -> CacheState:
    """End requests (bool[R]) of the step that `commit_rows` has made visible."""
    return for_rows(config, ended, release, pool.compact(config, state))


class _Rows(NamedTuple):
    """Requests of a committed step, bool[R]. pinned: it read, copied or saved something. ended: with these tokens."""

    ran: jax.Array
    pinned: jax.Array
    ended: jax.Array


@traced_once
def move_on(config: CacheConfig, state: CacheState, outcome: Outcome) -> tuple[CacheState, _Rows]:
    """The part of `commit` that all requests of the step take at once: lengths, keys, names."""
    fields = layout(config)
    requests, place = state.requests, flights.oldest(config, state)
    flight = flights.at(config, requests, place)
    ran, gives = flight.scheduled > 0, flight.promised > 0
    produced = jnp.where(gives, jnp.asarray(outcome.produced), 0)
    known, start = requests[fields.KNOWN], requests[fields.COMPUTED]
    kept = flight.scheduled - flight.verifying + jnp.where(flight.verifying > 0, jnp.maximum(produced - 1, 0), 0)
    computed = start + kept
    held = jnp.concatenate([flight.positions, requests[fields.read], requests[fields.copy_source]])
    rows = _Rows(ran, ran & (held > 0).any(0), gives & jnp.asarray(outcome.finished))
    admitted = jnp.where(ran, 0, requests[fields.ADMITTED])
    turn = _turn_ends(config, flight, start, computed, requests[fields.turn])
    done = jnp.minimum(state.counters[DONE] + 1, state.counters[PLANNED])
    keys = _append(config, state.keys, known, known + produced, outcome.unit_keys)
    state = state._replace(keys=keys, counters=state.counters.at[DONE].set(done))
    state, published = publish_units(config, state, known + produced, computed)
    # All that changes of every request in one write.
    none = jnp.zeros_like(computed)
    own = [fields.KNOWN, fields.COMPUTED, fields.ADMITTED, *_rows_of(fields.turn), *_rows_of(fields.published)]
    names = jnp.concatenate([jnp.array(own), flights.head(config, place)]) + zero_after(rows, _content(state))
    values = [jnp.stack([known + produced, computed, admitted]), turn, published, jnp.stack([none] * flights.HEAD)]
    return state._replace(requests=state.requests.at[names].set(jnp.concatenate(values))), rows


def _content(state: CacheState) -> tuple[jax.Array, ...]:
    """What a transition changes before it writes to the requests."""
    return state.blocks, state.tags, state.entries, state.ghosts, state.stack, state.ring, state.pools, state.counters


def _turn_ends(
    config: CacheConfig, flight: flights.Flight, start: jax.Array, computed: jax.Array, before: jax.Array
) -> jax.Array:
    """Lengths that the turn-end slots hold after tokens [start, computed): i32[turns, R].

    Of the boundaries that were crossed, the last one stays in each slot of the ring.
    """
    fields, step = layout(config), config.geometry.hit_unit
    top = jnp.minimum(computed, flight.emit_turn) // step
    slot = jnp.arange(fields.turns, dtype=jnp.int32)[:, None]
    boundary = (top - (top - slot) % fields.turns) * step
    crossed = (flight.emit_turn > 0) & (boundary > start)
    if not config.saves_anywhere:
        crossed &= boundary == computed
    return jnp.where(crossed, boundary, before)


def _rows_of(part: slice) -> range:
    return range(part.start, part.stop)


def propose(config: CacheConfig, state: CacheState, drafts: jax.Array) -> CacheState:
    """Say how many draft tokens (i32[R], `max_drafts` at most) every request wants verified in its next row."""
    drafts = jnp.clip(jnp.asarray(drafts, jnp.int32), 0, config.max_drafts)
    return state._replace(requests=state.requests.at[layout(config).DRAFTS].set(drafts))


def withdraw(config: CacheConfig, state: CacheState) -> CacheState:
    """Forget the step planned last: nothing it would have written is ever published.

    Requests that ran before keep the blocks they were given; those admitted by this step wait again, since they may
    share content that it would have written. Preemptions and evictions that it made stay. A plan without rows is none:
    do not withdraw it, or the step before goes.
    """
    fields = layout(config)
    state = pool.compact(config, state)
    place, planned = flights.newest(config, state), state.counters[PLANNED]
    flight, flying = flights.at(config, state.requests, place), planned > state.counters[DONE]
    scheduled = (flight.scheduled > 0) & flying
    admitted = scheduled & (state.requests[fields.ADMITTED] == planned)
    drafts = jnp.where(scheduled, flight.verifying, state.requests[fields.DRAFTS])
    state = state._replace(requests=state.requests.at[fields.DRAFTS].set(drafts))

    def forget(config, state, row):
        start = flights.planned(config, state.requests[:, row]) - flight.scheduled[row]
        state = _forget_names(config, state, row, start)
        return _drop_saved(config, state, row, place)

    state = for_rows(config, scheduled, forget, state)
    # Also what the step promised to requests that were preempted since: those tokens will not come.
    requests = flights.cleared(config, state.requests, place)
    state = state._replace(requests=jnp.where(flying, requests, state.requests))
    return take_back(config, for_rows(config, admitted, _wait_again, state))


def abort(config: CacheConfig, state: CacheState, slot: jax.Array) -> CacheState:
    """End a request at any moment; what its committed steps published stays, the rest never was."""

    def end(config, state, row):
        return give_up(config, state, row, jnp.zeros((), bool))

    state, live = to_abort(config, state, slot)
    return for_rows(config, live, end, state)


def to_abort(config: CacheConfig, state: CacheState, slot: jax.Array) -> tuple[CacheState, jax.Array]:
    """Before an `abort`: (state, the slot if there is something to end, bool[R])."""
    fields = layout(config)
    live = jnp.arange(config.max_requests) == slot
    live &= state.requests[fields.STATUS] != FREE
    if config.loads:
        # A load writes to the blocks until it is through.
        phase = state.requests[fields.LOAD]
        loading = live & ((phase == LOADING) | (phase == ABANDONED))
        requests = state.requests.at[fields.LOAD].set(jnp.where(loading, ABANDONED, phase))
        state, live = state._replace(requests=requests), live & ~loading
    return pool.compact(config, state), live


def reset(config: CacheConfig, state: CacheState) -> tuple[CacheState, jax.Array]:
    """Forget all cached content: (state, done). Refused, state unchanged, while a request runs or a load has blocks."""
    fields = layout(config)
    idle = (state.requests[fields.STATUS] <= WAITING).all() & (state.requests[fields.LOAD] <= UNDECIDED).all()
    empty = forget_all(config, state)
    if log.is_kept(state):
        empty = log.cleared(empty)
    return jax.tree.map(lambda new, old: jnp.where(idle, new, old), empty, state), idle


def preempt_running(config: CacheConfig, state: CacheState) -> CacheState:
    """Take everything from all running requests, as before a `reset`: they wait again at their old places.

    Steps in flight still give their tokens, and nothing that they write is ever published. What was loaded for those
    who wait is held no longer. While a load is under way nothing changes, since that forbids a reset as well.
    """
    fields = layout(config)
    phase = state.requests[fields.LOAD]
    free = ~((phase == LOADING) | (phase == ABANDONED)).any()
    state = give_up_loads(config, pool.compact(config, state), free) if config.loads else pool.compact(config, state)

    def give_way(config, state, row):
        return _preempt(config, _forget_names(config, state, row, state.requests[fields.COMPUTED, row]), row)

    running = free & (state.requests[fields.STATUS] > WAITING)
    return for_rows(config, running, give_way, state)


def preempt(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """Take everything from a running request while a step is planned, and put it back in the queue at its old place.

    Whatever that step had for it is planned no more. Its rows in flight still give the tokens they promise; it is
    admitted again when they have come.
    """
    return give_up(config, state, row, jnp.ones((), bool))


@traced_once
def give_up(config: CacheConfig, state: CacheState, row: jax.Array, again: jax.Array) -> CacheState:
    """Take everything from a request, and what is pending of it. again: see `preempt`; else it ends, see `abort`."""
    fields, place = layout(config), flights.newest(config, state)
    state = _forget_names(config, state, row, state.requests[fields.COMPUTED, row])
    request = read_first(lambda state: state.requests[:, row], state)
    without = flights.put(config, request, place, flights.without_row(flights.at(config, request, place)))
    request = jnp.where(again, without, request)
    state = state._replace(requests=state.requests.at[:, row].set(request))
    state = release(config, leave_prefill(config, state, row), row)
    waits = jnp.where(again, _waiting(config, request).at[fields.PREEMPTIONS].add(1), 0)
    return state._replace(
        requests=state.requests.at[:, row].set(waits),
        counters=state.counters.at[PREEMPTED].add(again.astype(jnp.int32)),
    )


def _preempt(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    fields = layout(config)
    state = _wait_again(config, leave_prefill(config, state, row), row)
    return state._replace(
        requests=state.requests.at[fields.PREEMPTIONS, row].add(1), counters=state.counters.at[PREEMPTED].add(1)
    )


def _wait_again(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    again = _waiting(config, read_first(lambda state: state.requests[:, row], state))
    state = release(config, state, row)
    return state._replace(requests=state.requests.at[:, row].set(again))


def _waiting(config: CacheConfig, request: jax.Array) -> jax.Array:
    """A request i32[F] that waits at its old place, with nothing but the tokens its rows in flight promise."""
    fields = layout(config)
    promised = flights.every(config, request).promised
    keep = [fields.SEQ, fields.PROMPT, fields.KNOWN, fields.LIMIT, fields.FLAGS, fields.PRIORITY, fields.PREEMPTIONS]
    names = jnp.array([*keep, fields.DRAFTS, fields.OVERTAKEN])
    again = jnp.zeros_like(request).at[names].set(request[names]).at[fields.STATUS].set(WAITING)
    for place in range(fields.flights):
        record = flights.at(config, again, place)
        again = flights.put(config, again, place, record._replace(promised=promised[place]))
    return again


@traced_once
def release(config: CacheConfig, state: CacheState, row: jax.Array) -> CacheState:
    """Publish a request's turn-end state and drop its references; the row is left blank.

    The device still runs its rows in flight, before anything that is planned from now on. Tables are freed from their
    end, so the tail of a prefix is reused before its head. States of the prefix count as used now, like its rows: one
    is worth nothing without the other. See `cache.eviction` for the order of both.
    """
    fields, geometry = layout(config), config.geometry
    state = publish_turn_end(config, state, row)
    for position, group in enumerate(geometry.paged):
        if geometry.groups[group].kind.windowed:
            state = part(config, state, row, position, jnp.int32(config.columns[position]))
    request, own_table = read_first(lambda state: (state.requests[:, row], state.tables[row]), state)
    flight = flights.every(config, request)
    emitted = flight.slots.reshape(fields.flights * fields.emissions, fields.recurrent)
    turns = request[fields.turn_slot].reshape(fields.turns, fields.recurrent)
    lengths, found, superseded = _own_states(config, state, row)
    held = [_Part(group, found[:, nth], lengths, drop=False) for nth, group in enumerate(geometry.recurrent)]
    for nth, group in enumerate(geometry.recurrent):
        held.append(_Part(group, superseded[nth : nth + 1], request[fields.HIT][None], drop=False, first=True))
    for position, group in enumerate(geometry.paged):
        first, columns = config.column_offset[position], config.columns[position]
        table = own_table[first : first + columns]
        depth = jnp.arange(columns, dtype=jnp.int32) * config.group(group).block
        held += [_Part(group, table[::-1], depth[::-1], in_order=True)]
        held += [_Part(group, request[fields.copy_source][position : position + 1], jnp.zeros((1,), jnp.int32))]
    for position, group in enumerate(geometry.recurrent):
        own, read = (request[part][position : position + 1] for part in (fields.running, fields.read))
        ids = jnp.concatenate([own, turns[:, position], read, emitted[:, position]])
        zero, hit = jnp.zeros((1,), jnp.int32), request[fields.HIT][None]
        held.append(_Part(group, ids, jnp.concatenate([zero, request[fields.turn], hit, flight.positions.reshape(-1)])))
    deepest = jnp.where((found > 0).all(1), lengths, 0).max(initial=0)
    state = _drop_by_depth(config, state, held, deepest)
    at = row + zero_after(_content(state))
    return state._replace(requests=state.requests.at[:, at].set(0), tables=state.tables.at[at].set(0))


class _Part(NamedTuple):
    """Blocks i32[n] of a group (0: none), the tokens before them, whether a reference is dropped or they only count as
    used, whether they go before everything else, and whether the deepest is the first of them."""

    group: int
    ids: jax.Array
    depth: jax.Array
    drop: bool = True
    first: bool = False
    in_order: bool = False


def _own_states(config: CacheConfig, state: CacheState, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """States of a request's prefix that count as used with it, ascending, and the superseded one that goes first:
    lengths i32[n], blocks i32[n, recurrent], i32[recurrent].

    Those of its points and its hit. Tied: also those at its turn's ends; and not of its hit, if it has a longer one,
    which is superseded then.
    """
    fields = layout(config)
    request, tied = state.requests[:, row], state.policy[TIED] > 0
    named = named_units(config, request[fields.KNOWN]) * config.unit
    turns = jnp.where(tied, request[fields.turn], 0)
    lengths = sorted_few(jnp.concatenate([request[fields.points], request[fields.HIT][None], turns]))
    lengths = jnp.where(lengths <= jnp.minimum(request[fields.COMPUTED], named), lengths, 0)
    lengths = jnp.where(jnp.append(True, lengths[1:] != lengths[:-1]), lengths, 0)
    if not (config.prefix_caching and config.geometry.recurrent):
        none = jnp.zeros((lengths.shape[0], len(config.geometry.recurrent)), jnp.int32)
        return lengths, none, none[0]
    keys = state.keys[row, jnp.maximum(lengths // config.unit - 1, 0)]
    blocks = read_first(lambda state: index.find(state, keys).blocks, state)
    blocks = blocks[:, np.array(config.geometry.recurrent, np.int32)]
    found = jnp.where((lengths > 0)[:, None], blocks, 0)
    longest = jnp.where((found > 0).all(1), lengths, 0).max()
    superseded = (tied & (lengths > 0) & (lengths == request[fields.HIT]) & (lengths < longest))[:, None]
    old = jnp.where(superseded, found, 0).max(0)
    fork = read_first(lambda state: state.blocks[old, BITS] >> KIND_SHIFT, state) == earnings.FORK
    covered = jnp.where((state.policy[COVERAGE] > 0) & ~fork, old, 0)
    return lengths, jnp.where(superseded, 0, found), covered


def _drop_by_depth(config: CacheConfig, state: CacheState, held: list[_Part], deepest: jax.Array) -> CacheState:
    """Drop, or count as used, what a request has held, each pool at once: in the order given, or if states and rows are
    tied the deepest first, and rows from `deepest` tokens on before everything else."""
    tied = state.policy[TIED] > 0
    # All are known before any is dropped.
    zero = zero_after([part.ids for part in held])
    held = [part._replace(ids=part.ids + zero) for part in held]
    alike: dict[tuple[int, ...], list[tuple[int, jax.Array, jax.Array, jax.Array]]] = {}
    for number in range(len(config.pool_blocks)):
        parts = [part for part in held if config.group_pool[part.group] == number]
        if not parts:
            continue
        ids, depth = (jnp.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "depth"))
        drop = jnp.concatenate([jnp.full(part.ids.shape, part.drop) for part in parts])
        rows = jnp.concatenate([jnp.full(part.ids.shape, part.group in config.geometry.paged) for part in parts])
        first = jnp.concatenate([jnp.full(part.ids.shape, part.first) for part in parts])
        first |= rows & tied & (depth >= deepest) & bool(config.geometry.recurrent)
        # A state needs no rows from its depth on.
        keys = [-2 * part.depth - (part.group in config.geometry.paged) for part in parts]
        in_order = [part.in_order for part in parts]
        given = jnp.arange(ids.shape[0], dtype=jnp.int32)

        def by_depth(keys, given=given, in_order=in_order):
            return given.at[merged(keys, in_order)].set(given)

        order = jax.lax.cond(tied, by_depth, lambda _, given=given: given, keys)
        alike.setdefault(ids.shape, []).append((number, ids[order], first[order], drop[order]))
    for pools in alike.values():
        numbers, *stacks = zip(*pools, strict=True)
        state = pool.release_each(config, state, numbers, *(jnp.stack(stack) for stack in stacks))
    return state


def _settle(config: CacheConfig, state: CacheState, row: jax.Array, place: flights.Place) -> CacheState:
    """Drop the pins of what a committed row read, copied from and saved; what it saved was filed when it was planned,
    and counts from now on."""
    fields, geometry = layout(config), config.geometry
    request = read_first(lambda state: state.requests[:, row], state)
    emitted = flights.at(config, request, place)
    state = confirm_states(config, state, row, emitted.positions, emitted.slots)
    pinned = []
    for position, group in enumerate(geometry.paged):
        pinned.append((group, request[fields.copy_source][position : position + 1]))
    for position, group in enumerate(geometry.recurrent):
        read = request[fields.read][position : position + 1]
        pinned.append((group, jnp.concatenate([read, emitted.slots[:, position]])))
    state = _drop(config, state, pinned)
    request = request.at[fields.copy_source].set(0).at[fields.read].set(0)
    request = flights.put(config, request, place, flights.without_states(emitted))
    return state._replace(requests=state.requests.at[:, row + zero_after(_content(state))].set(request))


@traced_once
def _forget_names(config: CacheConfig, state: CacheState, row: jax.Array, start: jax.Array) -> CacheState:
    """Take back the pending names of what a request's rows in flight compute from `start` on."""
    saved = flights.every(config, state.requests[:, row])
    slots = jnp.where((saved.positions > start)[..., None], saved.slots, 0)
    return withdraw_states(config, withdraw_units(config, state, row, start), slots.ravel())


def _drop_saved(config: CacheConfig, state: CacheState, row: jax.Array, place: flights.Place) -> CacheState:
    """Give back the slots that a row would have saved states in."""
    request = state.requests[:, row]
    saved = flights.at(config, request, place)
    state = _drop(config, state, [(group, saved.slots[:, i]) for i, group in enumerate(config.geometry.recurrent)])
    request = flights.put(config, request, place, flights.without_states(saved))
    return state._replace(requests=state.requests.at[:, row].set(request))


def drop_load(
    config: CacheConfig, state: CacheState, row: jax.Array, table: jax.Array, states: jax.Array
) -> CacheState:
    """Give back the blocks that a load brought for a request: i32[C] of its table, i32[recurrent]."""
    fields, geometry, held = layout(config), config.geometry, []
    for position, group in enumerate(geometry.paged):
        first = config.column_offset[position]
        held.append((group, table[first : first + config.columns[position]][::-1]))
    held += [(group, states[position : position + 1]) for position, group in enumerate(geometry.recurrent)]
    state = _drop(config, state, held)
    columns = jnp.array([fields.LOAD, fields.LOADED])
    return state._replace(requests=state.requests.at[columns, row].set(NOTHING))


def give_up_loads(config: CacheConfig, state: CacheState, ok: jax.Array) -> CacheState:
    """Hold what was brought for those who wait no longer, if `ok`; it stays to be found while it lasts."""
    brought = state.requests[layout(config).LOAD] == BROUGHT
    return for_rows(config, ok & brought, _wait_again, state)


def _drop(config: CacheConfig, state: CacheState, parts: list[tuple[int, jax.Array]]) -> CacheState:
    """Drop one reference of all given blocks, (group, i32[n] ids), each pool at once and in this order."""
    alike: dict[tuple[int, ...], list[tuple[int, jax.Array]]] = {}
    for number in range(len(config.pool_blocks)):
        ids = [ids for group, ids in parts if config.group_pool[group] == number]
        if ids:
            blocks = jnp.concatenate(ids)
            alike.setdefault(blocks.shape, []).append((number, blocks))
    for pools in alike.values():
        stack = jnp.stack([blocks for _, blocks in pools])
        no, yes = jnp.zeros(stack.shape, bool), jnp.ones(stack.shape, bool)
        state = pool.release_each(config, state, [number for number, _ in pools], stack, no, yes)
    return state


def _append(config: CacheConfig, keys: jax.Array, before: jax.Array, after: jax.Array, unit_keys: Ints) -> jax.Array:
    """The keys u32[R, U, 4] with those of the units that lengthening requests from `before` to `after` completes."""
    rows = jnp.arange(config.max_requests)
    for nth in range(keys_per_append(config)):
        unit = named_units(config, before) + nth
        at = jnp.where(unit < named_units(config, after), unit, config.units)
        keys = keys.at[rows, at].set(unit_keys[:, nth], mode="drop")
    return keys
