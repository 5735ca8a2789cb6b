"""Counters since the model was made. Queries and hits are counted once an admission, however often it was tried."""

from __future__ import annotations

import collections
import dataclasses

from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference.lookup import Hit


@dataclasses.dataclass
class Statistics:
    """queries, hits: prompt tokens at first admissions, and those served from the cache; resume_queries, resume_hits:
    known tokens and served ones at admissions after a preemption. external: of the hits, tokens an external store
    brought. states: states saved under a name; skipped_states: wanted ones that no block was spent on. reasons: of all
    admissions."""

    admissions: int = 0
    queries: int = 0
    hits: int = 0
    resumes: int = 0
    resume_queries: int = 0
    resume_hits: int = 0
    external: int = 0
    preemptions: int = 0
    states: int = 0
    skipped_states: int = 0
    reasons: collections.Counter[Reason] = dataclasses.field(default_factory=collections.Counter)

    def admitted(self, known: int, hit: Hit, resumed: bool) -> None:
        """An admission of `known` tokens."""
        self.reasons[hit.reason] += 1
        if resumed:
            self.resumes += 1
            self.resume_queries += known
            self.resume_hits += hit.tokens
        else:
            self.admissions += 1
            self.queries += known
            self.hits += hit.tokens
