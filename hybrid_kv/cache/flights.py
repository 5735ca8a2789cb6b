"""What the steps in flight do with every request: a ring of records in its row, one a step.

A step is planned before the ones ahead of it are committed, so it counts on all their drafts being accepted. The record
of step n lies at n modulo the number of steps that may be in flight; one without a row is all zeros. A request that is
preempted keeps what its rows in flight promise, since they still give tokens, and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import DONE, PLANNED, RUNNING, CacheState, layout

# Fields of a record before its states.
HEAD = 4
# A place in the ring: fixed where there is only one.
Place = jax.Array | int


class Flight(NamedTuple):
    """The row of one step, of one request ([] below) or of all ([R]).

    scheduled: tokens, drafts included. verifying: of those. promised: tokens it gives if every draft is accepted (0: it
    does not reach the last token). emit_turn: last boundary it may save as a turn's end. positions i32[E, ...], slots
    i32[E, recurrent, ...]: the states it saves besides.
    """

    scheduled: jax.Array
    verifying: jax.Array
    promised: jax.Array
    emit_turn: jax.Array
    positions: jax.Array
    slots: jax.Array


def newest(config: CacheConfig, state: CacheState) -> Place:
    """Place of the step planned last."""
    return _place(config, state.counters[PLANNED])


def oldest(config: CacheConfig, state: CacheState) -> Place:
    """Place of the step to be committed next."""
    return _place(config, state.counters[DONE] + 1)


def _place(config: CacheConfig, step: jax.Array) -> Place:
    return step % config.steps_in_flight if config.steps_in_flight > 1 else 0


def _unpack(config: CacheConfig, record: jax.Array) -> Flight:
    """i32[..., record, R] -> the parts, each with all leading axes."""
    fields = layout(config)
    stop = HEAD + fields.emissions
    lead, last = record.shape[:-2], record.shape[-1:]
    return Flight(
        scheduled=record[..., 0, :],
        verifying=record[..., 1, :],
        promised=record[..., 2, :],
        emit_turn=record[..., 3, :],
        positions=record[..., HEAD:stop, :],
        slots=record[..., stop:, :].reshape((*lead, fields.emissions, fields.recurrent, *last)),
    )


def _pack(flight: Flight) -> jax.Array:
    """The parts of one record, [record, ...]."""
    head = jnp.stack(flight[:HEAD])
    emissions, recurrent = flight.slots.shape[:2]
    return jnp.concatenate([head, flight.positions, flight.slots.reshape((emissions * recurrent, *head.shape[1:]))])


def every(config: CacheConfig, requests: jax.Array) -> Flight:
    """All records of requests i32[F, ...], the ring as the first axis of every part."""
    fields = layout(config)
    lanes = requests.reshape(requests.shape[0], -1)
    ring = lanes[fields.flight].reshape(fields.flights, fields.record, -1)
    return jax.tree.map(lambda part: part.reshape(*part.shape[:-1], *requests.shape[1:]), _unpack(config, ring))


def at(config: CacheConfig, requests: jax.Array, place: Place) -> Flight:
    """The records at one place of requests i32[F, ...]."""
    fields = layout(config)
    first = fields.flight.start + place * fields.record
    lanes = requests.reshape(requests.shape[0], -1)
    record = _unpack(config, jax.lax.dynamic_slice_in_dim(lanes, first, fields.record, 0))
    return jax.tree.map(lambda part: part.reshape(*part.shape[:-1], *requests.shape[1:]), record)


def put(config: CacheConfig, requests: jax.Array, place: Place, flight: Flight) -> jax.Array:
    """Requests i32[F, ...] with the records at one place replaced."""
    first = layout(config).flight.start + place * layout(config).record
    return jax.lax.dynamic_update_slice_in_dim(requests, _pack(flight), first, 0)


def head(config: CacheConfig, place: Place) -> jax.Array:
    """Where the fields of a record from `scheduled` to `emit_turn` stand in a request: i32[4]."""
    return layout(config).flight.start + place * layout(config).record + jnp.arange(HEAD)


def cleared(config: CacheConfig, requests: jax.Array, place: Place) -> jax.Array:
    """Requests i32[F, ...] without the records at one place."""
    return put(config, requests, place, jax.tree.map(jnp.zeros_like, at(config, requests, place)))


def without_row(flight: Flight) -> Flight:
    """Records of which only the states are left."""
    none = jnp.zeros_like(flight.scheduled)
    return Flight(none, none, none, none, flight.positions, flight.slots)


def without_states(flight: Flight) -> Flight:
    """Records of rows that save no states besides those of the turn's end."""
    return flight._replace(positions=jnp.zeros_like(flight.positions), slots=jnp.zeros_like(flight.slots))


def planned(config: CacheConfig, requests: jax.Array) -> jax.Array:
    """Tokens that will be computed once all steps in flight have run, if every draft is accepted: i32[...]."""
    return requests[layout(config).COMPUTED] + every(config, requests).scheduled.sum(0)


def expected(config: CacheConfig, requests: jax.Array) -> jax.Array:
    """Tokens that will be known then: i32[...]."""
    return requests[layout(config).KNOWN] + every(config, requests).promised.sum(0)


def has_work(config: CacheConfig, state: CacheState) -> jax.Array:
    """Running requests that the newest step has no row of, and that may want one: bool[R].

    Not those that the rows in flight are sure to end.
    """
    fields, requests = layout(config), state.requests
    flights = every(config, requests)
    idle = at(config, requests, newest(config, state)).scheduled == 0
    sure = requests[fields.KNOWN] + (flights.promised > 0).sum(0, dtype=jnp.int32)
    left = planned(config, requests) < jnp.minimum(expected(config, requests), config.max_context)
    return (requests[fields.STATUS] == RUNNING) & idle & left & (sure < requests[fields.LIMIT])
