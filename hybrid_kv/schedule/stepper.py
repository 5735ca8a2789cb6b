"""Schedule and commit on the host's side: every step by the smallest program that can make it."""

from __future__ import annotations

import collections

import numpy as np

from hybrid_kv.cache import transitions
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import LAST_PREFILL, PLANNED, CacheState
from hybrid_kv.cache.transitions import Outcome
from hybrid_kv.schedule.programs import compiled
from hybrid_kv.schedule.steady import can_commit, commit_steady, schedule_steady
from hybrid_kv.schedule.step import schedule


class Stepper:
    """Compiled `schedule`, `commit` and `withdraw` of one state; each uses up the state that it is given.

    After a step without prefills the next one is first tried with `schedule.steady`.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._schedule, self._schedule_steady = compiled(schedule, config), compiled(schedule_steady, config)
        self._commit, self._commit_steady = compiled(transitions.commit, config), compiled(commit_steady, config)
        self._withdraw = compiled(transitions.withdraw, config)
        self._may_commit = can_commit(config)
        self._hopeful = False
        self._flying: collections.deque[bool] = collections.deque()  # steps in flight: whether steady

    def schedule(self, state: CacheState) -> tuple[CacheState, bool]:
        """Plan the next step: (state, whether there is one)."""
        if self._hopeful:
            state, steady = self._schedule_steady(state)
            if steady:
                self._flying.append(True)
                return state, True
        before = int(np.asarray(state.counters)[PLANNED])
        state = self._schedule(state)
        counters = np.asarray(state.counters)
        planned = bool(counters[PLANNED] > before)
        self._hopeful = planned and bool(counters[LAST_PREFILL] < counters[PLANNED])
        if planned:
            self._flying.append(False)
        return state, planned

    def commit(self, state: CacheState, outcome: Outcome) -> CacheState:
        """Commit the oldest step in flight."""
        steady = self._flying.popleft() if self._flying else False
        if steady and self._may_commit and not np.asarray(outcome.finished).any():
            return self._commit_steady(state, outcome)
        return self._commit(state, outcome)

    def warm_up(self, state: CacheState, outcome: Outcome) -> CacheState:
        """Compile every program with a state without requests, which stays so."""
        state, _ = self._schedule_steady(self._schedule(state))
        if self._may_commit:
            state = self._commit_steady(state, outcome)
        return self._withdraw(self._commit(state, outcome))

    def withdraw(self, state: CacheState) -> CacheState:
        """Forget the step planned last."""
        if self._flying:
            self._flying.pop()
        return self._withdraw(state)
