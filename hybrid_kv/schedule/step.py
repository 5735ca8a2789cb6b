"""The transition that decides one step: decodes first, then chunks of prompts."""

from __future__ import annotations

from hybrid_kv.cache import pool
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import PREEMPTED, CacheState
from hybrid_kv.schedule.decode import schedule_decodes
from hybrid_kv.schedule.prefill import schedule_prefills


def schedule(config: CacheConfig, state: CacheState) -> CacheState:
    """Decide what runs next; what was decided stands in the request rows until `commit` or `withdraw`.

    Called again without either, it adds to the step in flight whatever still fits.

    Progress: the oldest request that can run is given at least one token, because every decode costs
    one token, the budget covers all request slots, and newer requests are preempted for older ones.
    """
    state = pool.compact(config, state)
    before = state.counters[PREEMPTED]
    state = schedule_decodes(config, state)
    return schedule_prefills(config, state, before)
