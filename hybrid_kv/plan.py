"""StepPlan: the only thing that passes from the scheduler to the device.

Fixed shapes, no optional arrays, block ids local to each pool with 0 as the null target. The device
and the metadata builder take it literally and decide nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_kv.cache import flights
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.publish import turn_boundaries
from hybrid_kv.cache.state import FREE_BLOCKS, PLANNED, CacheState, layout
from hybrid_kv.schedule.step import schedule


class StepPlan(NamedTuple):
    """One step. R rows in decode-first order; the rows behind `rows` are null rows of length 0.

    rows, decodes, tokens i32   rows in use, how many of them have one token, tokens in all
    slot       i32[R]           request slot of a row
    start, length i32[R]        first absolute position and tokens of a row, drafts included
    slack      i32[R]           drafts of the steps in flight before it: so much earlier the row may have to start
    drafts     i32[R]           draft tokens to verify at the end of the row
    samples    bool[R]          the row reaches the request's last known token
    tables     tuple i32[R, C]  per group with a table: block ids (0 where a window has left)
    copies     tuple i32[R, 2]  per group with a table: (source, target) block copied before the step
    read, write tuple i32[R]    per recurrent group: state read (0: zeros) and state written
    emit_position i32[R, E]     lengths after which the state is saved, in this order (0: none), those that rejected
                                drafts do not reach left out; where drafts are verified and the back end cannot
                                save anywhere, the one where the tokens that stand end
    emit_slot  tuple i32[R, E]  per recurrent group: where
    admitted   bool[R]          first step of the request since it was (re)admitted
    hit, junction, reason i32[R]  outcome of the lookup at admission, `Reason`
    counters   i32[N]           totals of the state, see `cache.state`
    free       i32[P]           free blocks of every pool
    preemptions i32[slots]      preemptions of every request slot so far
    """

    rows: jax.Array
    decodes: jax.Array
    tokens: jax.Array
    slot: jax.Array
    start: jax.Array
    length: jax.Array
    slack: jax.Array
    drafts: jax.Array
    samples: jax.Array
    tables: tuple[jax.Array, ...]
    copies: tuple[jax.Array, ...]
    read: tuple[jax.Array, ...]
    write: tuple[jax.Array, ...]
    emit_position: jax.Array
    emit_slot: tuple[jax.Array, ...]
    admitted: jax.Array
    hit: jax.Array
    junction: jax.Array
    reason: jax.Array
    counters: jax.Array
    free: jax.Array
    preemptions: jax.Array


def plan_step(config: CacheConfig, state: CacheState) -> tuple[CacheState, StepPlan]:
    """Schedule the next step and spell it out. Without rows, nothing was planned and there is nothing to commit."""
    before = state.counters[PLANNED]
    state = schedule(config, state)
    return state, spell_out(config, state, state.counters[PLANNED] > before)


def spell_out(config: CacheConfig, state: CacheState, fresh: jax.Array) -> StepPlan:
    """The plan of the step planned last, read off the state; one without rows unless `fresh`."""
    fields, geometry = layout(config), config.geometry
    place = flights.newest(config, state)
    scheduled = jnp.where(fresh, flights.at(config, state.requests, place).scheduled, 0)
    group = jnp.where(scheduled == 0, 2, (scheduled > 1).astype(jnp.int32))
    slot = jnp.lexsort((state.requests[fields.SEQ], group)).astype(jnp.int32)
    requests = state.requests[:, slot]
    flight, length = flights.at(config, requests, place), scheduled[slot]
    live = length > 0
    start = flights.planned(config, requests) - flight.scheduled
    slack = flights.every(config, requests).verifying.sum(0) - flight.verifying
    admitted = live & (requests[fields.ADMITTED] == state.counters[PLANNED])

    def local(ids: jax.Array, group: int) -> jax.Array:
        return jnp.where((ids > 0) & live.reshape((-1,) + (1,) * (ids.ndim - 1)), ids - config.offset(group), 0)

    tables, copies = [], []
    for position, index in enumerate(geometry.paged):
        first = config.column_offset[position]
        table = local(state.tables[slot, first : first + config.columns[position]], index)
        source = local(jnp.where(admitted, requests[fields.copy_source][position], 0), index)
        column = requests[fields.HIT] // config.group(index).block
        target = jnp.take_along_axis(table, jnp.minimum(column, table.shape[1] - 1)[:, None], 1)[:, 0]
        tables.append(table)
        copies.append(jnp.stack([source, jnp.where(source > 0, target, 0)], -1))
    read, write, emit_slots = [], [], []
    # Every boundary that the row may reach goes to the turn-end slot whose turn it is; the last one stays there.
    turn = turn_boundaries(config, flight.emit_turn)
    turn = jnp.where(turn > (start - slack)[:, None], turn, 0)
    which = turn // geometry.hit_unit % fields.turns
    turn_slots = requests[fields.turn_slot].reshape(fields.turns, fields.recurrent, config.max_requests)
    for position, index in enumerate(geometry.recurrent):
        running = requests[fields.running][position]
        hit_state = jnp.where(admitted, requests[fields.read][position], 0)
        own = jnp.where(start > 0, running, 0)
        read.append(local(jnp.where(hit_state > 0, hit_state, own), index))
        write.append(local(running, index))
        turn_slot = jnp.where(turn > 0, jnp.take_along_axis(turn_slots[:, position].T, which, 1), 0)
        emit_slots.append(local(jnp.concatenate([flight.slots[:, position].T, turn_slot], 1), index))
    positions = jnp.concatenate([flight.positions.T, turn], 1)
    return StepPlan(
        rows=live.sum(dtype=jnp.int32),
        decodes=(length == 1).sum(dtype=jnp.int32),
        tokens=length.sum(dtype=jnp.int32),
        slot=slot,
        start=start,
        length=length,
        slack=jnp.where(live, slack, 0),
        drafts=jnp.where(live, flight.verifying, 0),
        samples=live & (flight.promised > 0),
        tables=tuple(tables),
        copies=tuple(copies),
        read=tuple(read),
        write=tuple(write),
        emit_position=jnp.where(live[:, None], positions, 0),
        emit_slot=tuple(emit_slots),
        admitted=admitted,
        hit=requests[fields.HIT],
        junction=requests[fields.JUNCTION],
        reason=requests[fields.REASON],
        counters=state.counters,
        free=state.pools[:, FREE_BLOCKS],
        preemptions=state.requests[fields.PREEMPTIONS],
    )
