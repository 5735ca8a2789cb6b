"""The longest prefix that every group can serve.

Append-only groups are downward closed: if they serve n tokens they serve every shorter prefix, at
any hash unit, because rows never change and every filed unit has a key of its own. Recurrent groups
serve exactly the lengths at which a state was filed. So the longest common hit is the longest
length that all states share and that lies within what the append-only groups hold: one pass, no
fixed point, and it is maximal.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_kv.cache import index
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.state import CacheState

SKIP_READ, SALTED = 1, 2


class Hit(NamedTuple):
    """Outcome of a lookup; lengths in tokens.

    hit: tokens served, a multiple of the hash unit, at most known - 1. junction: how far the
    append-only groups reach beyond it (0: no further). reason: `Reason` of what was not served.
    tables: i32[C] blocks of the append-only groups, columns side by side (0: none beyond the hit);
    where the hit ends inside a block that column holds the block to copy from.
    states: i32[number of recurrent groups] the state at the hit (0 at hit 0).
    """

    hit: jax.Array
    junction: jax.Array
    reason: jax.Array
    tables: jax.Array
    states: jax.Array


def no_hit(config: CacheConfig) -> Hit:
    """What a lookup that finds nothing returns, without its reason."""
    none = jnp.int32(0)
    tables = jnp.zeros((max(sum(config.columns), 1),), jnp.int32)
    return Hit(none, none, none, tables, jnp.zeros((len(config.geometry.recurrent),), jnp.int32))


def lookup(config: CacheConfig, state: CacheState, keys: jax.Array, known: jax.Array, flags: jax.Array) -> Hit:
    """Look a request up; reads only.

    keys: uint32[U, 4] hash chain. known: tokens of the request. flags: SKIP_READ, SALTED.
    """
    geometry, unit = config.geometry, config.unit
    cap = jnp.maximum(known - 1, 0) // unit
    lane = jnp.arange(config.units, dtype=jnp.int32)
    within = lane < cap
    reachable, tables = cap, []
    for position, group in enumerate(geometry.attention):
        found = jnp.where(within, index.find(state.entries, index.tag(keys, group)), 0)
        depth, blocks = _append_only(found, config.units_per_block(group), config.columns[position])
        reachable = jnp.minimum(reachable, depth)
        tables.append((blocks, config.units_per_block(group)))
    serves = lane < reachable
    found_states = []
    for group in geometry.recurrent:
        found = jnp.where(within, index.find(state.entries, index.tag(keys, group)), 0)
        found_states.append(found)
        serves &= found > 0
    units = jnp.where(serves, lane + 1, 0).max(initial=0)
    reachable = reachable if geometry.attention else units
    skipped = jnp.asarray(not config.prefix_caching) | (flags & SKIP_READ > 0)
    units, reachable = jnp.where(skipped, 0, units), jnp.where(skipped, 0, reachable)
    last = jnp.maximum(units - 1, 0)
    columns = [
        jnp.where(jnp.arange(blocks.shape[0]) < -(-units // per_block), blocks, 0) for blocks, per_block in tables
    ]
    return Hit(
        hit=units * unit,
        junction=jnp.where(reachable > units, reachable * unit, 0),
        reason=_reason(config, state, keys, cap, reachable, units, flags),
        tables=jnp.concatenate(columns) if columns else jnp.zeros((1,), jnp.int32),
        states=jnp.stack([jnp.where(units > 0, f[last], 0) for f in found_states])
        if found_states
        else jnp.zeros((0,), jnp.int32),
    )


def _append_only(found: jax.Array, per_block: int, columns: int):
    """Units served by one append-only group and the block of every column: (i32, i32[C]).

    found: i32[U] block of every unit's key. Whole blocks must be there from the left without a
    hole; the first column that is not whole adds its furthest filed unit.
    """
    padded = jnp.zeros((columns * per_block,), jnp.int32)
    padded = padded.at[: found.shape[0]].set(found).reshape(columns, per_block)
    whole = padded[:, -1] > 0
    full = jnp.where(whole.all(), columns, jnp.argmin(whole)).astype(jnp.int32)
    tail = padded[jnp.minimum(full, columns - 1)]
    reach = jnp.where(tail > 0, jnp.arange(1, per_block + 1), 0).max()
    reach = jnp.where(full < columns, reach, 0).astype(jnp.int32)
    lane = jnp.arange(columns)
    tail_block = tail[jnp.maximum(reach - 1, 0)]
    blocks = jnp.where(lane < full, padded[:, -1], jnp.where((lane == full) & (reach > 0), tail_block, 0))
    return full * per_block + reach, blocks


def _reason(config, state, keys, cap, reachable, units, flags):
    """Why nothing beyond `units` was served; see `Reason`."""
    geometry = config.geometry
    ahead = jnp.zeros((), bool)
    for group in geometry.attention:
        ahead |= index.was_evicted(state, index.tag(keys[jnp.minimum(reachable, config.units - 1)], group))
    at_junction = jnp.zeros((), bool)
    for group in geometry.recurrent:
        at_junction |= index.was_evicted(state, index.tag(keys[jnp.maximum(reachable - 1, 0)], group))
    salted = (flags & SALTED > 0) & (reachable == 0)
    reason = jnp.where(ahead, Reason.EVICTED, jnp.where(salted, Reason.SALT, Reason.COLD))
    reason = jnp.where(reachable > units, jnp.where(at_junction, Reason.EVICTED, Reason.NO_STATE), reason)
    reason = jnp.where(units == cap, jnp.where(cap == 0, Reason.GRANULARITY, Reason.NONE), reason)
    reason = jnp.where(flags & SKIP_READ > 0, Reason.SKIPPED, reason)
    return (reason if config.prefix_caching else jnp.full((), int(Reason.CACHING_OFF))).astype(jnp.int32)
