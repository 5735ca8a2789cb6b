"""One chunk of one prompt: shared blocks, new blocks, and the states saved inside it.

A chunk is as long as the budget allows; none is cut for a state, since the back end emits at any boundary inside it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import earnings, flights, index, pool
from hybrid_kv.cache.checkpoints import (
    emission_candidates,
    is_first_to_go,
    is_optional,
    is_shared,
    wanted_points,
)
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.lookup import Hit, lookup, no_hit
from hybrid_kv.cache.publish import announce_units, publish_states
from hybrid_kv.cache.ranks import ranks
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.state import (
    ADAPTIVE,
    BITS,
    BROUGHT,
    CHUNK,
    FREE,
    KIND_SHIFT,
    NOTHING,
    PLANNED,
    REF,
    RESERVED,
    RUNNING,
    SHORT,
    SKIPPED_STATES,
    CacheState,
    layout,
    read_first,
)
from hybrid_kv.cache.statistics import count_admission
from hybrid_kv.cache.transitions import drop_load
from hybrid_kv.schedule.decode import spare_states, unreused_states
from hybrid_kv.schedule.pieces import piece


class Choice(NamedTuple):
    """What one request would have in this step.

    row: its slot. admit: it waits, so it was looked up. hit, points: what it was found to share, and where states are
    worth keeping. start, end, known: tokens. have: columns that need no new block, by group with a table. done: it is
    planned. waits: for content that the step in flight writes. lacks: it would not fit, even if nothing had to be left
    free.
    """

    row: jax.Array
    admit: jax.Array
    start: jax.Array
    end: jax.Array
    known: jax.Array
    hit: Hit
    points: jax.Array
    have: list[jax.Array]
    done: jax.Array
    waits: jax.Array
    lacks: jax.Array


def budget_left(config: CacheConfig, state: CacheState) -> jax.Array:
    """Tokens of this step that nobody was given yet."""
    newest = flights.at(config, state.requests, flights.newest(config, state))
    return config.token_budget - newest.scheduled.sum(dtype=jnp.int32)


def chunk_fits(config: CacheConfig, state: CacheState, row: jax.Array) -> jax.Array:
    """Whether the free blocks suffice for the next chunk of a started prefill."""
    request, no = state.requests[:, row], jnp.zeros((), bool)
    start = flights.planned(config, request)
    end = _end(config, state, row, start, flights.expected(config, request), request[layout(config).points])
    hit = no_hit(config)
    return pool.fits(state, _demand(config, state, _columns_held(config, request, hit, no), end, hit, no))


def choose_chunk(config: CacheConfig, state: CacheState, row: jax.Array, exists: jax.Array, admit: jax.Array) -> Choice:
    """The next chunk of a request, all or nothing; reads only. exists: there is one. admit: it waits."""
    fields = layout(config)
    request = state.requests[:, row]
    known = flights.expected(config, request)
    hit = _lookup_if(config, state, row, admit)
    hit = _give_up_if_alone(config, state, request, hit, admit)
    waits = exists & admit & hit.wait
    start = jnp.where(admit, hit.hit, flights.planned(config, request))
    fresh = wanted_points(config, state, request[fields.PROMPT], known, hit.hit, hit.shared)
    points = jnp.where(admit, fresh, request[fields.points])
    end = _end(config, state, row, start, known, points)
    have = _columns_held(config, request, hit, admit)
    upto = jnp.where(admit, known, end) if config.whole_prompts else end
    others = (state.requests[fields.STATUS] == RUNNING).any()
    reserved = jnp.where(admit & others, state.pools[:, RESERVED], 0)
    need = _demand(config, state, have, upto, hit, admit)
    done = exists & ~waits & (end > start) & pool.fits(state, need, reserved)
    lacks = ~waits & ((end <= start) | ~pool.fits(state, need))
    return Choice(row, admit, start, end, known, hit, points, have, done, waits, lacks)


def schedule_chunk(config: CacheConfig, state: CacheState, choice: Choice) -> CacheState:
    """Plan a chunk: what it shares, its blocks, the states that it saves, and the names of what it writes."""
    state = _place(config, state, choice)
    state = _emit(config, state, choice)
    # A row that was not planned announces nothing.
    end = jnp.where(choice.done, choice.end, 0)
    return _announce(config, state, choice.row, choice.start, end)


@piece
def _place(config: CacheConfig, state: CacheState, choice: Choice) -> CacheState:
    fields, row, done = layout(config), choice.row, choice.done
    request = read_first(lambda state: state.requests[:, row], state)
    if config.loads:
        brought = choice.admit & done & (request[fields.LOAD] == BROUGHT)
        table = jnp.where(brought, read_first(lambda state: state.tables[row], state), 0)
        states = jnp.where(brought, request[fields.read], 0)
    state, request = _adopt(config, state, row, request, choice.hit, choice.admit & done)
    state, request = _extend(config, state, request, choice)
    if config.loads:
        state = drop_load(config, state, jnp.where(brought, row, config.max_requests), table, states)
        columns = jnp.array([fields.LOAD, fields.LOADED])
        request = request.at[columns].set(jnp.where(brought, NOTHING, request[columns]))
    request = request.at[fields.points].set(jnp.where(done, choice.points, request[fields.points]))
    place = flights.newest(config, state)
    none = flights.at(config, request, place)
    samples = (choice.end == choice.known).astype(jnp.int32)
    planned = none._replace(scheduled=choice.end - choice.start, promised=samples)
    request = flights.put(config, request, place, planned).at[fields.DRAFTS].set(0)
    at = jnp.where(done, row, config.max_requests)
    return state._replace(requests=state.requests.at[:, at].set(request, mode="drop"))


_announce = piece(announce_units)


def _end(
    config: CacheConfig, state: CacheState, row: jax.Array, start: jax.Array, known: jax.Array, points: jax.Array
) -> jax.Array:
    """Where the chunk of a request that begins at `start` ends. The limit holds while several requests live."""
    live = (state.requests[layout(config).STATUS] != FREE).sum(dtype=jnp.int32)
    share = jnp.where(state.policy[ADAPTIVE] > 0, config.token_budget // jnp.maximum(live, 1), 0)
    limit = jnp.where(live > 1, jnp.maximum(state.policy[CHUNK], share), config.token_budget)
    end = start + jnp.minimum(jnp.minimum(known - start, budget_left(config, state)), limit)
    if config.saves_anywhere or not (config.geometry.recurrent and config.prefix_caching):
        return end
    return _cut(config, start, end, known, jnp.where(_filed(config, state, row, points), 0, points))


def _cut(config: CacheConfig, start: jax.Array, end: jax.Array, known: jax.Array, points: jax.Array) -> jax.Array:
    """Where a chunk that could go on to `end` has to stop for a back end that cannot save every state inside it.

    It saves the state at the end of a chunk, so the chunk ends at the first point, rungs of the ladder left out, that
    it cannot save inside. points: i32[wanted], without those that have a state (0: none).
    """
    whole = end // config.unit * config.unit  # the next chunk can save more from a start at a unit
    end = jnp.where((end < known) & (whole > start), whole, end)
    points = jnp.where(jnp.asarray(is_optional(config)[: config.wanted]), 0, points)

    def unsaved(end: jax.Array) -> jax.Array:
        stops = (points > start) & (points < end)
        rank = (stops & (points < points[:, None])).sum(1)
        able = config.can_save(start, end, points) & (rank < config.emission.max_per_chunk)
        return stops & ~able

    def stop(end: jax.Array) -> jax.Array:
        return jnp.where(unsaved(end), points, end).min()

    return jax.lax.while_loop(lambda end: unsaved(end).any(), stop, end)


def _filed(config: CacheConfig, state: CacheState, row: jax.Array, lengths: jax.Array) -> jax.Array:
    """Whether the prefixes of so many tokens have a state, or will have: bool[n]."""
    keys = state.keys[row, jnp.maximum(lengths // config.unit - 1, 0)]
    blocks = read_first(lambda state: index.find(state, keys).blocks, state)
    return (blocks[:, jnp.array(config.geometry.recurrent)] > 0).all(1)


def _give_up_if_alone(config: CacheConfig, state: CacheState, request: jax.Array, hit: Hit, admit: jax.Array) -> Hit:
    """No hit for a request that runs alone and would not fit with its hit: blocks to share and to copy come on top."""
    fields = layout(config)
    need = _demand(config, state, _columns_held(config, request, hit, admit), request[fields.KNOWN], hit, admit)
    alone = admit & ~(state.requests[fields.STATUS] == RUNNING).any()
    give_up = alone & ~pool.fits(state, need)
    reason = jnp.where(hit.hit > 0, jnp.int32(Reason.CAPPED), hit.reason)
    bare = no_hit(config)._replace(junction=hit.junction, shared=hit.shared, reason=reason)
    return jax.tree.map(lambda none, found: jnp.where(give_up, none, found), bare, hit)


def _lookup_if(config: CacheConfig, state: CacheState, row: jax.Array, admit: jax.Array) -> Hit:
    request, fields = state.requests[:, row], layout(config)
    return jax.lax.cond(
        admit,
        lambda: lookup(config, state, state.keys[row], request[fields.KNOWN], request[fields.FLAGS]),
        lambda: no_hit(config),
    )


def _columns_held(config: CacheConfig, request: jax.Array, hit: Hit, admit: jax.Array) -> list[jax.Array]:
    """Columns of every group with a table that need no new block: shared whole ones, or those in use."""
    fields = layout(config)
    return [
        jnp.where(admit, hit.hit // config.group(group).block, request[fields.columns][position])
        for position, group in enumerate(config.geometry.paged)
    ]


def _hit_blocks(config: CacheConfig, hit: Hit, position: int) -> jax.Array:
    first = config.column_offset[position]
    return hit.tables[first : first + config.columns[position]]


def _columns(config: CacheConfig, group: int, end: jax.Array) -> jax.Array:
    """Columns of a request that is computed up to `end` tokens."""
    block = config.group(group).block
    return -(-jnp.minimum(end + config.slots_ahead, config.max_context) // block)


def _demand(config: CacheConfig, state: CacheState, have: list[jax.Array], end: jax.Array, hit: Hit, admit: jax.Array):
    """Free blocks every pool must have to hold this request up to `end` tokens."""
    need = [jnp.int32(0)] * len(config.pool_blocks)
    for position, group in enumerate(config.geometry.paged):
        fresh = jnp.maximum(_columns(config, group, end) - have[position], 0)
        if config.group(group).kind.windowed:
            fresh = jnp.minimum(fresh, config.window_columns(group))
        woken = pool.unreferenced(state, _hit_blocks(config, hit, position))
        need[config.group_pool[group]] += fresh + jnp.where(admit, woken, 0)
    sleeping = (hit.states > 0) & (state.blocks[hit.states, REF] == 0)
    for position, group in enumerate(config.geometry.recurrent):
        need[config.group_pool[group]] += jnp.where(admit, 1 + sleeping[position].astype(jnp.int32), 0)
    return need


def _adopt(config: CacheConfig, state: CacheState, row: jax.Array, request: jax.Array, hit: Hit, ok: jax.Array):
    """Share the blocks of a hit with an admitted request: (state, request row).

    Everything of the hit is referenced in all groups before anything is taken for the request, so
    no allocation can evict it. A block that the hit ends in is pinned as the source of a copy.
    """
    fields, recurrent = layout(config), config.geometry.recurrent
    held, of_pool = [jnp.where(ok, hit.states, 0)], [config.group_pool[group] for group in recurrent]
    kept, own, values = [], [], []
    for position, group in enumerate(config.geometry.paged):
        blocks = jnp.where(ok, _hit_blocks(config, hit, position), 0)
        held, of_pool = [*held, blocks], [*of_pool, *[config.group_pool[group]] * blocks.shape[0]]
        shared = hit.hit // config.group(group).block
        partial = ok & (hit.hit % config.group(group).block > 0)
        source = jnp.where(partial, blocks[jnp.minimum(shared, blocks.shape[0] - 1)], 0)
        kept.append(jnp.where(jnp.arange(blocks.shape[0]) < shared, blocks, 0))
        left = jnp.where((kept[-1] > 0).any(), jnp.argmax(kept[-1] > 0), shared).astype(jnp.int32)
        left = left if config.group(group).kind.windowed else jnp.int32(0)
        own += [part.start + position for part in (fields.columns, fields.copy_source, fields.published, fields.left)]
        values += [shared, source, shared * config.units_per_block(group), left]
    state = pool.touch(config, state, np.array(of_pool, np.int32), jnp.concatenate(held))
    if kept:
        at = jnp.where(ok, row, config.max_requests)
        state = state._replace(tables=state.tables.at[at].set(jnp.concatenate(kept), mode="drop"))
    if recurrent:
        kind = state.blocks[hit.states[0], BITS] >> KIND_SHIFT
        state = earnings.note_hit(config, state, kind, (hit.hit - hit.below) // config.unit, ok & (hit.hit > 0))
        own += range(fields.read.start, fields.read.stop)
        values += [*hit.states]
    resumed = request[fields.PREEMPTIONS] > 0
    state = count_admission(state, request[fields.KNOWN], hit.hit, hit.reason, resumed, ok)
    own += [fields.STATUS, fields.COMPUTED, fields.HIT, fields.JUNCTION, fields.REASON, fields.ADMITTED]
    values += [jnp.int32(RUNNING), hit.hit, hit.hit, hit.junction, hit.reason, state.counters[PLANNED]]
    names = jnp.array(own)
    return state, request.at[names].set(jnp.where(ok, jnp.stack(values), request[names]))


def _state_pools(config: CacheConfig) -> list[int]:
    return [config.group_pool[group] for group in config.geometry.recurrent]


def _extend(config: CacheConfig, state: CacheState, request: jax.Array, choice: Choice) -> tuple[CacheState, jax.Array]:
    """Take the running states of an admitted request, and the blocks that a chunk still lacks: (state, request row)."""
    fields, geometry, ok = layout(config), config.geometry, choice.done
    starts = choice.admit & ok
    if geometry.recurrent:
        state, ids = pool.take_each(config, state, _state_pools(config), starts.astype(jnp.int32), 1)
        request = request.at[fields.running].set(jnp.where(starts, ids[:, 0], request[fields.running]))
    for position, group in enumerate(geometry.paged):
        most = (config.longest_chunk + config.slots_ahead) // config.group(group).block + 2
        most = min(most, config.columns[position])
        upto = _columns(config, group, choice.end)
        fresh = jnp.where(ok, jnp.maximum(upto - choice.have[position], 0), 0)
        state, ids = pool.take(config, state, config.group_pool[group], fresh, most)
        lane = jnp.arange(most, dtype=jnp.int32)
        column = config.column_offset[position] + choice.have[position] + lane
        column = jnp.where(lane < fresh, column, state.tables.shape[1])
        state = state._replace(tables=state.tables.at[choice.row, column].set(ids, mode="drop"))
        name = fields.columns.start + position
        request = request.at[name].set(jnp.where(fresh > 0, upto, request[name]))
    return state, request


@piece
def _emit(config: CacheConfig, state: CacheState, choice: Choice) -> CacheState:
    """Give a slot to every boundary worth it inside the chunk that has no state yet, and file it as pending.

    While requests wait for blocks only points are kept, no rungs; and a state that nobody is known to share does
    not displace one that was reused.
    """
    fields, row, start, end, ok = layout(config), choice.row, choice.start, choice.end, choice.done
    if not (config.geometry.recurrent and config.prefix_caching):
        return state
    request = read_first(lambda state: state.requests[:, row], state)
    wanted = emission_candidates(config, state, request[fields.points], start, end, request[fields.KNOWN])
    shared, optional = jnp.asarray(is_shared(config)), jnp.asarray(is_optional(config))
    inside = ok & (wanted > 0) & ~_filed(config, state, row, wanted) & ~(optional & (state.counters[SHORT] > 0))
    if not config.saves_anywhere:
        before = wanted < end
        inside &= ~before | config.can_save(start, end, wanted)
        inside &= ~before | (ranks(inside & before) < config.emission.max_per_chunk)
    inside &= earnings.is_worth_saving(config, state, earnings.kinds(config), request[fields.SEQ])
    spare = spare_states(config, state)
    unreused = unreused_states(config, state, inside.sum(dtype=jnp.int32), config.emissions)
    room = jnp.where(shared, spare, jnp.minimum(spare, unreused))
    chosen = inside & (ranks(inside) < room)
    count, nth = chosen.sum(dtype=jnp.int32), ranks(chosen)
    state, ids = pool.take_each(config, state, _state_pools(config), count, config.emissions)
    slots = jnp.where(chosen[:, None], ids[:, nth].T, 0)
    positions = jnp.where(chosen, wanted, 0)
    place = flights.newest(config, state)
    saved = flights.at(config, request, place)._replace(positions=positions, slots=slots)
    request = flights.put(config, request, place, saved)
    at = jnp.where(ok, row, config.max_requests)
    skipped = (inside & ~chosen).sum(dtype=jnp.int32)
    state = state._replace(
        requests=state.requests.at[:, at].set(request, mode="drop"),
        counters=state.counters.at[SKIPPED_STATES].add(skipped),
    )
    rung, kinds = is_first_to_go(config, state, wanted), jnp.asarray(earnings.kinds(config))
    return publish_states(config, state, row, positions, slots, rung, pending=True, kind=kinds)
