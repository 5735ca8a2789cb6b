"""The next token of every decoding request, and the drafts it verifies, all requests at once."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import earnings, flights, pool
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.ranks import ranks, sums
from hybrid_kv.cache.state import (
    GUARD,
    RUNNING,
    SHORT,
    SKIPPED_STATES,
    TURN_END,
    WAITING,
    CacheState,
    layout,
    zero_after,
)
from hybrid_kv.schedule.pieces import piece, reading_piece


class Decodes(NamedTuple):
    """Decodes that a step could have, by request slot i32[R]. rows: bool. planned: tokens computed before. drafts: that
    each verifies. fresh: by group with a table, columns it lacks. fits: the free blocks suffice for all of them.
    boundary: the last one that its turn's state may be saved at (0: none). lacks_turn: bool, it has no slot for that.
    """

    rows: jax.Array
    planned: jax.Array
    drafts: jax.Array
    fresh: list[jax.Array]
    fits: jax.Array
    boundary: jax.Array
    lacks_turn: jax.Array


def decodes_fit(config: CacheConfig, state: CacheState) -> jax.Array:
    """Whether the free blocks suffice for all decodes of this step."""
    return find_decodes(config, state).fits


def schedule_decodes(config: CacheConfig, state: CacheState) -> tuple[CacheState, jax.Array]:
    """Schedule every request whose prompt is done, if blocks suffice for all of them: (state, whether they do).

    Drafts are verified as far as the budget goes, lowest slot first, and not at all in a step in which their rows would
    find no blocks; the tokens themselves always fit the budget.
    """
    decodes = find_decodes(config, state)
    rows = decodes.rows & decodes.fits
    state, boundary = _find_room(config, state, decodes, rows)
    written = _written(config, state, decodes._replace(boundary=boundary), rows)
    return _write_rows(config, state, written), decodes.fits


def decode_rows(config: CacheConfig, state: CacheState, decodes: Decodes, rows: jax.Array) -> CacheState:
    """Schedule those of the decodes in `rows` (bool[R]), which fit and have slots for their turns' ends."""
    written = _written(config, state, decodes, rows)
    state = _extend_tables(config, state, [jnp.where(rows, each, 0) for each in decodes.fresh])
    return _write_rows(config, state, written)


@piece
def _find_room(
    config: CacheConfig, state: CacheState, decodes: Decodes, rows: jax.Array
) -> tuple[CacheState, jax.Array]:
    """Take blocks for decodes, and slots for their turns' ends: (state, the boundaries that can be saved)."""
    state = _extend_tables(config, state, [jnp.where(rows, each, 0) for each in decodes.fresh])
    if not (config.prefix_caching and config.geometry.recurrent):
        return state, decodes.boundary
    lacks = decodes.lacks_turn & rows
    some = lacks.any().astype(jnp.int32)
    carry = (state, jnp.zeros_like(lacks))
    state, granted = jax.lax.fori_loop(0, some, lambda _, carry: _turn_slots(config, carry[0], lacks), carry)
    return state, jnp.where(~decodes.lacks_turn | granted, decodes.boundary, 0)


def _written_rows(config: CacheConfig) -> list[int]:
    """Rows of the requests that planning decodes changes, but for the head of their record."""
    columns = layout(config).columns
    return [layout(config).DRAFTS, *range(columns.start, columns.stop)]


@reading_piece
def _written(config: CacheConfig, state: CacheState, decodes: Decodes, rows: jax.Array) -> jax.Array:
    """What stands in those rows then, i32[n, R], the head of the record at the end."""
    fields = layout(config)
    before = flights.at(config, state.requests, flights.newest(config, state))
    held = state.requests[fields.columns]
    columns = [held[position] + jnp.where(rows, each, 0) for position, each in enumerate(decodes.fresh)]
    asked = jnp.where(rows, 0, state.requests[fields.DRAFTS])
    given = 1 + decodes.drafts
    new = [given, decodes.drafts, given, decodes.boundary]
    row = [jnp.where(rows, one, old) for one, old in zip(new, before[: flights.HEAD], strict=True)]
    return jnp.stack([asked, *columns, *row])


def _write_rows(config: CacheConfig, state: CacheState, written: jax.Array) -> CacheState:
    """All that changes of every request in one write."""
    head = flights.head(config, flights.newest(config, state))
    names = jnp.concatenate([jnp.array(_written_rows(config)), head]) + zero_after(state.tables, state.blocks)
    return state._replace(requests=state.requests.at[names].set(written))


@reading_piece
def find_decodes(config: CacheConfig, state: CacheState) -> Decodes:
    """The requests whose prompt is done and that may have a row in the step being planned."""
    fields, requests = layout(config), state.requests
    planned, expected = flights.planned(config, requests), flights.expected(config, requests)
    rows = (planned == expected - 1) & (planned >= requests[fields.PROMPT]) & flights.has_work(config, state)

    def fresh(drafts: jax.Array) -> list[jax.Array]:
        end, lacks = jnp.minimum(planned + 1 + drafts + config.slots_ahead, config.max_context), []
        for position, group in enumerate(config.geometry.paged):
            held = requests[fields.columns][position]
            lacks.append(jnp.where(rows, jnp.maximum(-(-end // config.group(group).block) - held, 0), 0))
        return lacks

    def fits(lacks: list[jax.Array]) -> jax.Array:
        need = [jnp.int32(0)] * len(config.pool_blocks)
        for group, each in zip(config.geometry.paged, lacks, strict=True):
            need[config.group_pool[group]] += each.sum(dtype=jnp.int32)
        return pool.fits(state, need)

    drafts = jnp.zeros(rows.shape, jnp.int32)
    lacks = fresh(drafts)
    room = fits(lacks)
    if config.max_drafts:
        wanted = _drafts(config, state, rows, expected)
        more = fresh(wanted)
        all_fit = fits(more)
        drafts = jnp.where(all_fit, wanted, 0)
        lacks = [jnp.where(all_fit, one, other) for one, other in zip(more, lacks, strict=True)]
        room |= all_fit
    boundary = _turn_boundary(config, state, rows, planned, drafts)
    lacks_turn = boundary > 0
    if config.geometry.recurrent:
        lacks_turn &= requests[fields.turn_slot.start] == 0
        worth = earnings.is_worth_saving(config, state, earnings.TURN, requests[fields.SEQ])
        boundary, lacks_turn = jnp.where(lacks_turn & ~worth, 0, boundary), lacks_turn & worth
    return Decodes(rows, planned, drafts, lacks, room, boundary, lacks_turn)


def _turn_boundary(
    config: CacheConfig, state: CacheState, rows: jax.Array, planned: jax.Array, drafts: jax.Array
) -> jax.Array:
    """The last hit boundary that a decode may complete, where the turn's end is kept: i32[R], 0: none.

    It saves the state there in the request's own slots. Boundaries overwrite the slots in turn, and one is filed when
    the request ends: only then is the last boundary known.
    """
    if not (config.prefix_caching and config.geometry.recurrent):
        return jnp.zeros_like(drafts)
    # Where the row starts if all drafts in flight are refused.
    start = planned - flights.every(config, state.requests).verifying.sum(0)
    boundary = (planned + 1 + drafts) // config.geometry.hit_unit * config.geometry.hit_unit
    return jnp.where(rows & (boundary > start) & (state.policy[TURN_END] > 0), boundary, 0)


def _drafts(config: CacheConfig, state: CacheState, rows: jax.Array, expected: jax.Array) -> jax.Array:
    """Draft tokens that every decoding request may verify within the budget: i32[R]."""
    room = config.max_context - expected
    wanted = jnp.minimum(state.requests[layout(config).DRAFTS], room)
    asked = jnp.where(rows, jnp.clip(wanted, 0, config.max_drafts), 0)
    newest = flights.at(config, state.requests, flights.newest(config, state))
    taken = newest.scheduled.sum(dtype=jnp.int32) + rows.sum(dtype=jnp.int32)
    return jnp.clip(config.token_budget - taken - sums(asked), 0, asked)


def _extend_tables(config: CacheConfig, state: CacheState, fresh: list[jax.Array]) -> CacheState:
    """Take so many blocks for every request, by group with a table, and put them behind those it has."""
    fields = layout(config)
    lane = jnp.arange(config.max_requests)
    held = state.requests[fields.columns]
    for position, group in enumerate(config.geometry.paged):
        each = -(-(config.max_append + config.slots_ahead) // config.group(group).block) + 1
        count, most = fresh[position].sum(dtype=jnp.int32), each * config.max_requests
        state, ids = pool.take(config, state, config.group_pool[group], count, most)
        before = sum((ranks(fresh[position] > nth) for nth in range(each)), jnp.int32(0))
        tables = state.tables
        for nth in range(each):
            at = config.column_offset[position] + held[position] + nth
            at = jnp.where(nth < fresh[position], at, tables.shape[1])
            tables = tables.at[lane, at].set(ids[jnp.minimum(before + nth, most - 1)], mode="drop")
        state = state._replace(tables=tables)
    return state


def _turn_slots(config: CacheConfig, state: CacheState, lacks: jax.Array) -> tuple[CacheState, jax.Array]:
    """Give turn-end slots to as many of those who lack them as may have them: (state, bool[R] who got some).

    Slots are optional: they displace no state that was reused, and are given only if a
    state stays free for each request that waits, and for one that may come; else the boundary is skipped.
    """
    fields, status = layout(config), state.requests[layout(config).STATUS]
    waiting = (status == WAITING).sum(dtype=jnp.int32)
    idle = (status != RUNNING).any().astype(jnp.int32)
    most = fields.turns * config.max_requests
    wanted = fields.turns * lacks.sum(dtype=jnp.int32)
    unreused = unreused_states(config, state, wanted, most)
    room = jnp.minimum(spare_states(config, state) - jnp.maximum(waiting, idle), unreused)
    room = jnp.where(state.counters[SHORT] > 0, 0, room)
    nth = fields.turns * ranks(lacks)
    granted = lacks & (nth + fields.turns <= room)
    count = fields.turns * granted.sum(dtype=jnp.int32)
    pools = [config.group_pool[group] for group in config.geometry.recurrent]
    state, ids = pool.take_each(config, state, pools, count, most)
    # i32[turns, recurrent, R], as they stand in a request.
    turn = jnp.minimum(nth + jnp.arange(fields.turns)[:, None], most - 1)
    slots = ids[:, turn].swapaxes(0, 1).reshape(fields.turns * fields.recurrent, -1)
    slots = jnp.where(granted, slots, state.requests[fields.turn_slot])
    skipped = (lacks & ~granted).sum(dtype=jnp.int32)
    names = np.arange(fields.turn_slot.start, fields.turn_slot.stop)
    names = names + zero_after(granted, skipped, state.tables, state.blocks)
    state = state._replace(requests=state.requests.at[names].set(slots))
    return state._replace(counters=state.counters.at[SKIPPED_STATES].add(skipped)), granted


def spare_states(config: CacheConfig, state: CacheState) -> jax.Array:
    """States, one slot in each recurrent group, that could be taken now without preempting anyone."""
    pools = [config.group_pool[group] for group in config.geometry.recurrent]
    spare = [pool.free_blocks(state, p) // pools.count(p) for p in sorted(set(pools))]
    return jnp.stack(spare).min()


def unreused_states(config: CacheConfig, state: CacheState, count: jax.Array, most: int) -> jax.Array:
    """States, `count` <= `most` at most, that could be taken without displacing one that a hit was served from, if
    those are guarded."""
    pools = [config.group_pool[group] for group in config.geometry.recurrent]
    guarded = state.policy[GUARD] > 0
    numbers = sorted(set(pools))
    each = [pools.count(number) for number in numbers]  # groups of the pool
    number_of, groups_of = jnp.array(numbers, jnp.int32), jnp.array(each, jnp.int32)
    wanted = jnp.where(guarded, count, 0)

    def one(nth, least):
        groups = groups_of[nth]
        free = pool.before_reused_state(config, state, number_of[nth], wanted * groups, most * max(each))
        return jnp.minimum(least, free // groups)

    least = jax.lax.fori_loop(0, len(numbers), one, jnp.int32(most))
    return jnp.where(guarded, jnp.minimum(least, count), count)
