"""The longest prefix that every group can serve.

Append-only groups are downward closed: if they serve n tokens they serve every shorter prefix, at any hash unit,
because rows never change and every filed unit has a key of its own. Windowed groups serve a length if the units that
its next token reads are filed, recurrent groups exactly the lengths at which a state was filed. So the longest
common hit is the longest length that all of the latter share within what the append-only groups hold: one pass, no
fixed point, and it is maximal.

Content that a step in flight writes can be shared, but not copied from, and its states cannot be read: a request whose
hit would need that waits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import index
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.ranks import ranks
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.state import JUNCTIONS, CacheState
from hybrid_kv.cache.tracing import traced_once
from hybrid_kv.geometry import GroupGeometry, GroupKind

# Units that are searched for at once.
_SEARCHED = 1024
# Flags of a request: it does not read the cache; its keys are salted; a load for it has failed.
SKIP_READ, SALTED, LOADS_FAILED = 1, 2, 4


class Hit(NamedTuple):
    """Outcome of a lookup; lengths in tokens.

    hit: tokens served, a multiple of the hit unit, at most known - 1. junction: how far the append-only groups
    reach beyond it (0: no further). shared: i32[J] boundaries beyond the hit where others have parted, the
    deepest first (0: none). reason: `Reason` of what was not served. wait: a longer hit exists once the step in
    flight is done. tables: i32[C] blocks of the groups with tables, columns side by side (0: none); where the hit
    ends inside a block that column holds the block to copy from. states: i32[number of recurrent groups] the state
    at the hit (0 at hit 0). below: the longest shorter prefix that has a state too.
    """

    hit: jax.Array
    junction: jax.Array
    shared: jax.Array
    reason: jax.Array
    wait: jax.Array
    tables: jax.Array
    states: jax.Array
    below: jax.Array


def no_hit(config: CacheConfig) -> Hit:
    """What a lookup that finds nothing returns, without its reason."""
    none = jnp.int32(0)
    return Hit(
        none,
        none,
        jnp.zeros((config.placement.junctions,), jnp.int32),
        none,
        jnp.zeros((), bool),
        jnp.zeros((max(sum(config.columns), 1),), jnp.int32),
        jnp.zeros((len(config.geometry.recurrent),), jnp.int32),
        none,
    )


def window_start(group: GroupGeometry, length: jax.Array) -> jax.Array:
    """First position of a windowed group that the token at `length` reads."""
    window = group.spec.window
    if group.kind is GroupKind.CHUNKED_LOCAL:
        return length // window * window
    return jnp.maximum(length - window + 1, 0)


def named_units(config: CacheConfig, known: jax.Array) -> jax.Array:
    """Leading units of `known` tokens that have a key."""
    return jnp.maximum(known - config.lookahead, 0) // config.unit


@traced_once
def lookup(config: CacheConfig, state: CacheState, keys: jax.Array, known: jax.Array, flags: jax.Array) -> Hit:
    """Look a request up; reads only.

    keys: uint32[U, 4] hash chain. known: tokens of the request. flags: SKIP_READ and others.
    """
    geometry, unit, cap = config.geometry, config.unit, _most_units(config, known)
    blocks, pending, forked = _found(config, state, keys, cap)
    both = jnp.stack([jnp.where(pending, 0, blocks), blocks])
    (now, soon), (reach_now, reach_soon) = jax.vmap(lambda found: _longest(config, found, cap))(both)
    better = soon > now
    last = jnp.maximum(soon - 1, 0)
    wait = jnp.zeros((), bool)
    for group in range(len(geometry.groups)):
        if group in geometry.recurrent:
            wait |= better & pending[group, last]
        else:
            within = soon % config.units_per_block(group)
            wait |= better & (_tail(config, group, both[0, group], soon)[0] < within)
    use = better & ~wait
    units = jnp.where(use, soon, now)
    reach = jnp.maximum(reach_now, reach_soon)
    skipped = jnp.asarray(not config.prefix_caching) | (flags & SKIP_READ > 0)
    units, reach, wait = jnp.where(skipped, 0, units), jnp.where(skipped, 0, reach), wait & ~skipped
    chosen = jnp.where(use, both[1], both[0])
    tables = [_table(config, group, chosen[group], both[0, group], units) for group in geometry.paged]
    states = [jnp.where(units > 0, chosen[group, jnp.maximum(units - 1, 0)], 0) for group in geometry.recurrent]
    return Hit(
        hit=units * unit,
        junction=jnp.where(reach > units, reach * unit, 0),
        shared=_shared(config, state, forked, units, reach),
        reason=_reason(config, state, keys, cap, reach, units, flags),
        wait=wait,
        tables=jnp.concatenate(tables) if tables else jnp.zeros((1,), jnp.int32),
        states=jnp.stack(states) if states else jnp.zeros((0,), jnp.int32),
        below=_below(config, chosen, units) * unit,
    )


def _below(config: CacheConfig, blocks: jax.Array, units: jax.Array) -> jax.Array:
    """The longest prefix of less than `units` units with a state in every recurrent group: blocks i32[groups, U]."""
    end = jnp.arange(1, config.units + 1, dtype=jnp.int32)
    served = (blocks[np.array(config.geometry.recurrent, np.int32)] > 0).all(0) & (end < units)
    return jnp.where(served, end, 0).max(initial=0)


class Here(NamedTuple):
    """What is finished of a prefix. hit: tokens that would be served. reach: how far the append-only groups hold it.
    tables: by append-only group, i32[columns] the blocks that do."""

    hit: jax.Array
    reach: jax.Array
    tables: dict[int, jax.Array]


def here(config: CacheConfig, state: CacheState, keys: jax.Array, known: jax.Array) -> Here:
    """What the cache holds of the first tokens of a request; reads only. keys: uint32[U, 4]. known: its tokens."""
    geometry, cap = config.geometry, _most_units(config, known)
    blocks, pending, _ = _found(config, state, keys, cap)
    blocks = jnp.where(pending, 0, blocks)
    units, reach = _longest(config, blocks, cap)
    tables = {group: _table(config, group, blocks[group], blocks[group], reach) for group in geometry.attention}
    return Here(units * config.unit, reach * config.unit if geometry.attention else jnp.int32(0), tables)


def longest_hit(config: CacheConfig, known: jax.Array) -> jax.Array:
    """The most tokens that may be served of so many known ones: not the last, nor what a name has to prove."""
    return _most_units(config, known) * config.unit // config.geometry.hit_unit * config.geometry.hit_unit


def _most_units(config: CacheConfig, known: jax.Array) -> jax.Array:
    proven = named_units(config, known) - config.longest_lag
    return jnp.maximum(jnp.minimum(jnp.maximum(known - 1, 0) // config.unit, proven), 0)


def _found(
    config: CacheConfig, state: CacheState, keys: jax.Array, cap: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Block of every unit before `cap` by group (0: none), whether a step in flight writes it, and where requests part
    behind it: i32[groups, U], bool[groups, U], bool[U]."""
    geometry, lane = config.geometry, jnp.arange(config.units, dtype=jnp.int32)
    found = _find_all(config, state, keys, jnp.minimum(cap + config.longest_lag, config.units))
    blocks = [jnp.roll(found.blocks[:, group], -config.lag(group)) for group in range(len(geometry.groups))]
    blocks = [jnp.where(lane < cap, each, 0) for each in blocks]
    per_block = [config.units_per_block(group) for group in range(len(geometry.groups))]
    pending = [index.pending(state, each, lane % units) for each, units in zip(blocks, per_block, strict=True)]
    forked = (
        jnp.roll(found.forked, -config.lag(geometry.attention[0])) if geometry.attention else jnp.zeros_like(lane > 0)
    )
    return jnp.stack(blocks), jnp.stack(pending), forked


def _find_all(config: CacheConfig, state: CacheState, keys: jax.Array, count: jax.Array) -> index.Found:
    """What is filed under the first `count` keys of u32[U, 4]; work grows with `count`."""
    most = min(_SEARCHED, config.units)
    units = -(-config.units // most) * most
    padded = jnp.pad(keys, ((0, units - config.units), (0, 0)))
    groups = len(config.geometry.groups)
    nothing = index.Found(
        jnp.full((units,), -1, jnp.int32), jnp.zeros((units, groups), jnp.int32), jnp.zeros((units,), bool)
    )

    def search(carry):
        first, found = carry
        some = index.find(state, jax.lax.dynamic_slice_in_dim(padded, first, most))
        put = jax.tree.map(lambda all, part: jax.lax.dynamic_update_slice_in_dim(all, part, first, 0), found, some)
        return first + most, put

    _, found = jax.lax.while_loop(lambda carry: carry[0] < count, search, (jnp.int32(0), nothing))
    return jax.tree.map(lambda part: part[: config.units], found)


def _longest(config: CacheConfig, blocks: jax.Array, cap: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Units that all groups serve, and how far the append-only ones alone reach.

    blocks: i32[groups, U] block of every unit (0: none). Without an append-only group the first group says how much of
    the prefix others have shared.
    """
    geometry = config.geometry
    lane = jnp.arange(config.units, dtype=jnp.int32)
    ends = (lane + 1) % (geometry.hit_unit // config.unit) == 0
    reach = cap
    for group in geometry.attention:
        reach = jnp.minimum(reach, _append_only(config, group, blocks[group]))
    serves = ends & (lane < reach)
    for group, geometry_of in enumerate(geometry.groups):
        if geometry_of.kind is GroupKind.RECURRENT:
            serves &= blocks[group] > 0
        elif geometry_of.kind.windowed:
            missing = jax.lax.cummax(jnp.where(blocks[group] > 0, -1, lane))
            serves &= missing < window_start(geometry_of, (lane + 1) * config.unit) // config.unit
        if not geometry.attention and group == 0:
            reach = jnp.where(serves, lane + 1, 0).max(initial=0)
    units = jnp.where(serves, lane + 1, 0).max(initial=0)
    return units, jnp.maximum(reach, units)


def _by_column(config: CacheConfig, group: int, blocks: jax.Array) -> jax.Array:
    """i32[U] -> i32[columns, units per block]."""
    per_block = config.units_per_block(group)
    columns = config.columns[config.geometry.paged.index(group)]
    return jnp.zeros((columns * per_block,), jnp.int32).at[: config.units].set(blocks).reshape(columns, per_block)


def _append_only(config: CacheConfig, group: int, blocks: jax.Array) -> jax.Array:
    """Units served by one append-only group. blocks: i32[U] block of every unit's key.

    Whole blocks must be there from the left without a hole; the first column that is not whole adds its furthest
    filed unit, since that block holds all before it as well.
    """
    by_column = _by_column(config, group, blocks)
    columns, per_block = by_column.shape
    whole = by_column[:, -1] > 0
    full = jnp.where(whole.all(), columns, jnp.argmin(whole)).astype(jnp.int32)
    reach, _ = _tail(config, group, blocks, full * per_block)
    return full * per_block + jnp.where(full < columns, reach, 0)


def _tail(config: CacheConfig, group: int, blocks: jax.Array, units: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Furthest filed unit, counted from 1, of the column that unit number `units` lies in, and its block."""
    by_column = _by_column(config, group, blocks)
    columns, per_block = by_column.shape
    tail = by_column[jnp.minimum(units // per_block, columns - 1)]
    reach = jnp.where(tail > 0, jnp.arange(1, per_block + 1, dtype=jnp.int32), 0).max()
    return reach, tail[jnp.maximum(reach - 1, 0)]


def _table(config: CacheConfig, group: int, blocks: jax.Array, ready: jax.Array, units: jax.Array) -> jax.Array:
    """Blocks that serve `units` units of a group with a table: i32[columns].

    ready: i32[U] those of `blocks` whose content is written; the block that the hit ends in is one of them.
    """
    geometry = config.group(group)
    by_column = _by_column(config, group, blocks)
    columns, per_block = by_column.shape
    lane = jnp.arange(columns)
    if geometry.kind.append_only:
        _, source = _tail(config, group, ready, units)
        whole = jnp.where(lane < units // per_block, by_column[:, -1], 0)
        return jnp.where((lane == units // per_block) & (units % per_block > 0), source, whole)
    last = jnp.minimum((lane + 1) * per_block, units) - 1
    first = window_start(geometry, units * config.unit) // config.unit
    found = jnp.take_along_axis(by_column, jnp.maximum(last - lane * per_block, 0)[:, None], 1)[:, 0]
    return jnp.where((last >= first) & (last >= lane * per_block), found, 0)


def _shared(config: CacheConfig, state: CacheState, forked: jax.Array, units: jax.Array, reach: jax.Array) -> jax.Array:
    """Boundaries beyond the hit that other requests share: the deepest, then the last forks before it."""
    most = config.placement.junctions
    step = config.geometry.hit_unit // config.unit
    end = jnp.arange(1, config.units + 1, dtype=jnp.int32)
    fork = forked & (end > units) & (end < reach) & (end % step == 0)
    rank = fork.sum(dtype=jnp.int32) - ranks(fork)
    points = jnp.zeros((most,), jnp.int32)
    points = points.at[jnp.where(fork, rank, most)].set(end * config.unit, mode="drop")
    points = points.at[:1].set(jnp.where(reach > units, reach // step * step * config.unit, 0))
    return jnp.where(jnp.arange(most) < state.policy[JUNCTIONS], points, 0)


def _reason(config, state, keys, cap, reachable, units, flags):
    """Why nothing beyond `units` was served; see `Reason`."""
    geometry = config.geometry
    ahead, at_junction = jnp.zeros((), bool), jnp.zeros((), bool)
    if geometry.attention:
        lags = sorted({config.lag(group) for group in geometry.attention})
        nexts = jnp.stack([jnp.minimum(reachable + lag, config.units - 1) for lag in lags])
        ahead = index.was_evicted(state, keys[nexts]).any()
    if len(geometry.attention) < len(geometry.groups):
        at_junction = index.was_evicted(state, keys[jnp.maximum(reachable - 1, 0)])
    most = cap // (geometry.hit_unit // config.unit) * (geometry.hit_unit // config.unit)
    salted = (flags & SALTED > 0) & (reachable == 0)
    reason = jnp.where(ahead, Reason.EVICTED, jnp.where(salted, Reason.SALT, Reason.COLD))
    reason = jnp.where(reachable > units, jnp.where(at_junction, Reason.EVICTED, Reason.NO_STATE), reason)
    if config.loads:
        reason = jnp.where(flags & LOADS_FAILED > 0, Reason.STORE_FAILURE, reason)
    reason = jnp.where(units == most, jnp.where(most == 0, Reason.GRANULARITY, Reason.NONE), reason)
    reason = jnp.where(flags & SKIP_READ > 0, Reason.SKIPPED, reason)
    return (reason if config.prefix_caching else jnp.full((), int(Reason.CACHING_OFF))).astype(jnp.int32)
