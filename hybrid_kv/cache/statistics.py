"""What admissions were served, since the state was made: counted where a request is admitted, read on the host.

Token totals are two words of the counters, so that a long run does not overflow them. What a step has counted when it
was planned is taken back when it is withdrawn.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import flights
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.state import (
    ADMISSIONS,
    BY_PLAN,
    DONE,
    EVICTED,
    OVERFLOWED,
    PLANNED,
    PREEMPTED,
    REASONS,
    RECORDS,
    RESUMES,
    SAVED_STATES,
    SKIPPED_STATES,
    TOKENS,
    CacheState,
)

# Bits of the lower word of a token total.
_LOW = 30
_TOTALS = 4


@dataclasses.dataclass(frozen=True)
class Statistics:
    """admissions: of new requests; resumes: after a preemption. queries, hits: prompt tokens at admissions, and those
    served from the cache; resume_queries, resume_hits: known tokens and served ones at resumes. states: saved under a
    key; skipped_states: wanted, but no block was free for them. evictions: blocks with a key that were taken for
    something else. unfiled: keys that found no place in the index. reasons: of all admissions and resumes.

    Queries and hits are counted once an admission, however often it was tried. Counts but those of tokens go to 2**31.
    """

    admissions: int
    queries: int
    hits: int
    resumes: int
    resume_queries: int
    resume_hits: int
    preemptions: int
    states: int
    skipped_states: int
    evictions: int
    unfiled: int
    reasons: dict[Reason, int]


def statistics(config: CacheConfig, state: CacheState) -> Statistics:
    """The totals of a state. Runs on the host."""
    counters = np.asarray(state.counters).astype(np.int64)
    low, high = counters[TOKENS : TOKENS + 2 * _TOTALS].reshape(2, _TOTALS)
    queries, hits, resume_queries, resume_hits = ((high << _LOW) + low).tolist()
    reasons = {reason: int(counters[REASONS + reason]) for reason in Reason}
    return Statistics(
        admissions=int(counters[ADMISSIONS]),
        queries=queries,
        hits=hits,
        resumes=int(counters[RESUMES]),
        resume_queries=resume_queries,
        resume_hits=resume_hits,
        preemptions=int(counters[PREEMPTED]),
        states=int(counters[SAVED_STATES]),
        skipped_states=int(counters[SKIPPED_STATES]),
        evictions=int(counters[EVICTED]),
        unfiled=int(counters[OVERFLOWED]),
        reasons={reason: count for reason, count in reasons.items() if count},
    )


def count_admission(
    state: CacheState, known: jax.Array, hit: jax.Array, reason: jax.Array, resumed: jax.Array, ok: jax.Array
) -> CacheState:
    """Count the admission of a request of `known` tokens, `hit` of them served, if `ok`."""
    first, again = ok & ~resumed, ok & resumed
    pair = jnp.stack([known, hit])
    low = state.counters[TOKENS : TOKENS + _TOTALS]
    low += jnp.concatenate([jnp.where(first, pair, 0), jnp.where(again, pair, 0)])
    high = state.counters[TOKENS + _TOTALS : TOKENS + 2 * _TOTALS] + (low >> _LOW)
    totals = jnp.concatenate([low & ((1 << _LOW) - 1), high])
    counters = state.counters.at[TOKENS : TOKENS + 2 * _TOTALS].set(totals)
    which = jnp.stack([jnp.int32(ADMISSIONS), jnp.int32(RESUMES), REASONS + reason])
    return state._replace(counters=counters.at[which].add(jnp.stack([first, again, ok]).astype(jnp.int32)))


def note_step(config: CacheConfig, state: CacheState, before: jax.Array, planned: jax.Array) -> CacheState:
    """Remember what planning a step has changed, if one was planned. before: the counters until then."""
    first = RECORDS + flights.newest(config, state) * len(BY_PLAN)
    names = np.array(BY_PLAN)
    kept = jax.lax.dynamic_slice_in_dim(state.counters, first, len(BY_PLAN))
    record = jnp.where(planned, state.counters[names] - before[names], kept)
    return state._replace(counters=jax.lax.dynamic_update_slice_in_dim(state.counters, record, first, 0))


def take_back(config: CacheConfig, state: CacheState) -> CacheState:
    """Undo what planning the last step has changed, if it is in flight; then it is planned no more."""
    first = RECORDS + flights.newest(config, state) * len(BY_PLAN)
    record = jax.lax.dynamic_slice_in_dim(state.counters, first, len(BY_PLAN))
    changed = jnp.where(state.counters[PLANNED] > state.counters[DONE], record, 0)
    return state._replace(counters=state.counters.at[np.array(BY_PLAN)].add(-changed))
