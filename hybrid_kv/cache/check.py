"""Every invariant of the cache state that can be read off the state itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import flights
from hybrid_kv.cache.config import BANDS, RING_FACTOR, CacheConfig
from hybrid_kv.cache.state import (
    DONE,
    FREE,
    FREE_BLOCKS,
    HEADS,
    LOADING,
    OWNERS,
    PENDING_STEP,
    PLACES,
    REF,
    RUNNING,
    STACK_TOP,
    STAMP,
    TAILS,
    WAITING,
    CacheState,
    layout,
)
from hybrid_kv.hashing import KEY_WORDS


def check(config: CacheConfig, state: CacheState) -> list[str]:
    """Broken invariants in words; empty if all hold. Runs on the host."""
    host = jax.device_get(state)
    return [*_references(config, host), *_free_lists(config, host), *_index(config, host), *_requests(config, host)]


def _references(config: CacheConfig, state: CacheState) -> list[str]:
    fields, requests = layout(config), state.requests
    held = [state.tables.ravel()]
    held += [requests[part].ravel() for part in (fields.copy_source, fields.running, fields.read, fields.turn_slot)]
    saved = _flights(config, state).slots.ravel()
    held.append(saved)
    ids = np.concatenate(held)
    counted = np.bincount(ids[ids > 0], minlength=config.total_blocks)[: config.total_blocks]
    wrong = np.flatnonzero(counted != state.blocks[:, REF])
    nulls = np.array(config.pool_offset)
    problems = [f"block {b}: {state.blocks[b, REF]} references, {counted[b]} holders" for b in wrong]
    keyed = (state.blocks[:, PLACES:] > 0).any(1)
    problems += [f"null block {b} is referenced or keyed" for b in nulls if counted[b] or keyed[b]]
    written = np.concatenate([saved, requests[fields.running].ravel(), requests[fields.turn_slot].ravel()])
    states, writers = np.unique(written[written > 0], return_counts=True)
    problems += [f"state {b} has two writers" for b in states[writers > 1]]
    problems += [f"state {b} is written while it has a key" for b in states[keyed[states] & _settled(state, states)]]
    return problems


def _flights(config: CacheConfig, state: CacheState) -> flights.Flight:
    """Records of all requests and steps in flight, on the host."""
    return jax.device_get(flights.every(config, jnp.asarray(state.requests)))


def _settled(state: CacheState, blocks: np.ndarray) -> np.ndarray:
    """Blocks whose keys are not those of a step in flight."""
    return np.asarray(state.blocks)[blocks, PENDING_STEP] <= np.asarray(state.counters)[DONE]


def _free_lists(config: CacheConfig, state: CacheState) -> list[str]:
    problems = []
    for pool, (first, count) in enumerate(zip(config.pool_offset, config.pool_blocks, strict=True)):
        top, free = (int(state.pools[pool, i]) for i in (STACK_TOP, FREE_BLOCKS))
        heads, tails = state.pools[pool, HEADS], state.pools[pool, TAILS]
        capacity = RING_FACTOR * config.capacity[pool]
        stack = state.stack[first : first + top]
        at = [
            BANDS * RING_FACTOR * first + band * capacity + np.arange(head, tail) % capacity
            for band, (head, tail) in enumerate(zip(heads, tails, strict=True))
        ]
        entries = state.ring[np.concatenate(at)]
        rows = state.blocks[entries[:, 0]]
        ring = entries[(rows[:, REF] == 0) & (rows[:, STAMP] == entries[:, 1]) & (entries[:, 0] > 0), 0]
        listed = np.sort(np.concatenate([stack, ring]))
        unused = first + 1 + np.flatnonzero(state.blocks[first + 1 : first + count, REF] == 0)
        if not np.array_equal(listed, unused):
            problems.append(f"pool {pool}: free lists hold {len(listed)} blocks, {len(unused)} are unreferenced")
        if free != len(unused):
            problems.append(f"pool {pool}: counts {free} free blocks, {len(unused)} are")
        if state.blocks[stack, PLACES:].any():
            problems.append(f"pool {pool}: a block with a key lies among the keyless")
        if (tails - heads > capacity).any():
            problems.append(f"pool {pool}: the ring overran")
    return problems


def _index(config: CacheConfig, state: CacheState) -> list[str]:
    groups = len(config.geometry.groups)
    owners = np.asarray(state.entries)[:, OWNERS:].astype(np.int64)
    filed = np.flatnonzero(owners)
    used = np.flatnonzero(owners.any(1))
    block, unit = np.nonzero(state.blocks[:, PLACES:])
    cells = state.blocks[block, PLACES + unit] - 1
    problems = []
    if not np.array_equal(np.sort(cells), filed):
        problems.append(f"index: {len(filed)} keys are filed, blocks remember {len(cells)}")
    elif not np.array_equal(owners.ravel()[cells], block):
        problems.append("index: a key points to a block that does not remember it")
    pools = np.searchsorted(np.array(config.pool_offset), owners.ravel()[filed], "right") - 1
    if (pools != np.array(config.group_pool)[filed % groups]).any() or (owners >= config.total_blocks).any():
        problems.append("index: a key points outside the pool of its group")
    if not np.array_equal(np.flatnonzero(state.tags), used):
        problems.append("index: a place is marked as empty and is not, or the reverse")
    elif (np.maximum(state.entries[used, 2], 1) != state.tags[used]).any():
        problems.append("index: a place is marked with another key than it holds")
    if len(np.unique(state.entries[used, :KEY_WORDS], axis=0)) != len(used):
        problems.append("index: a key is filed twice")
    return problems


def _requests(config: CacheConfig, state: CacheState) -> list[str]:
    fields, rows, problems = layout(config), _flights(config, state), []
    for slot in np.flatnonzero(state.requests[fields.STATUS] != FREE):
        row = state.requests[:, slot]
        known, computed = int(row[fields.KNOWN]), int(row[fields.COMPUTED])
        scheduled, promised = int(rows.scheduled[:, slot].sum()), int(rows.promised[:, slot].sum())
        if not (0 <= computed + scheduled <= known + promised and known <= config.max_context):
            problems.append(f"request {slot}: computed {computed} + {scheduled}, known {known} + {promised}")
        if row[fields.HIT] > max(known - 1, 0) or row[fields.HIT] % config.geometry.hit_unit:
            problems.append(
                f"request {slot}: hit {row[fields.HIT]} of {known} tokens at unit {config.geometry.hit_unit}"
            )
        loads = row[fields.LOAD] >= LOADING
        if row[fields.STATUS] == WAITING and not loads and (row[fields.running].any() or state.tables[slot].any()):
            problems.append(f"request {slot}: waits but holds blocks")
        for position, group in enumerate(config.geometry.paged):
            first, used, left = (
                config.column_offset[position],
                row[fields.columns][position],
                row[fields.left][position],
            )
            table = state.tables[slot, first : first + config.columns[position]]
            if row[fields.STATUS] == RUNNING and used < config.group(group).columns(int(computed + scheduled)):
                problems.append(f"request {slot}: {used} columns of {config.group(group).name} are too few")
            if not loads and ((table[left:used] == 0).any() or table[:left].any() or table[used:].any()):
                problems.append(f"request {slot}: table of {config.group(group).name} does not match its length")
    if (rows.scheduled.sum(1) > config.token_budget).any():
        problems.append("more tokens are scheduled than a step may have")
    return problems
