"""The steps of a server in full swing, in which everybody decodes: smaller programs for what the whole ones do too.

A program costs time by its size, whatever of it is executed: XLA's CPU runtime looks at every buffer that it may need.
Admission, preemption, prefills and releases are most of `schedule` and `commit`, and most steps need none of them. So
`schedule_steady` plans a step that is nothing but decodes, or says that it is not its affair; `commit_steady` commits
one. Where they do anything, they do what the whole transitions would, bit for bit, but for
compacting the lists of free blocks, which they leave to those.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_kv.cache import pool
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import DONE, PLANNED, SHORT, CacheState
from hybrid_kv.cache.statistics import note_step
from hybrid_kv.cache.transitions import Outcome, move_on
from hybrid_kv.schedule.decode import decode_rows, find_decodes
from hybrid_kv.schedule.step import prefills


def can_commit(config: CacheConfig) -> bool:
    """Whether `commit_steady` serves a configuration: windows are left, and with them blocks, in every commit."""
    return not any(group.kind.windowed for group in config.geometry.groups)


def schedule_steady(config: CacheConfig, state: CacheState) -> tuple[CacheState, jax.Array]:
    """Plan a step if it is nothing but decodes: (state, whether it is planned), otherwise the same state.

    Not if somebody waits or prefills, lacks blocks or a slot for a turn's end, or lists are due to be compacted.
    """
    before = state.counters
    state = state._replace(counters=before.at[PLANNED].add(1))
    decodes = find_decodes(config, state)
    work, waiting = prefills(config, state)
    full = before[PLANNED] - before[DONE] >= config.steps_in_flight
    other = ((work & ~decodes.rows) | waiting | decodes.lacks_turn).any() | full | pool.is_due(config, state)
    ok = decodes.fits & decodes.rows.any() & ~other
    state = decode_rows(config, state, decodes, decodes.rows & ok)
    planned = state._replace(counters=state.counters.at[SHORT].set(0))
    planned = note_step(config, planned, before, ok)
    return state._replace(counters=jnp.where(ok, planned.counters, before)), ok


def commit_steady(config: CacheConfig, state: CacheState, outcome: Outcome) -> tuple[CacheState, jax.Array]:
    """`transitions.commit_rows` of a step that `schedule_steady` planned; see `can_commit`."""
    state, rows = move_on(config, state, outcome)
    return state, rows.ended
