"""Schedule and commit on the host's side: every step by the smallest programs that can make it."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hybrid_kv.cache import transitions
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import CacheState
from hybrid_kv.cache.transitions import Outcome
from hybrid_kv.schedule import rounds
from hybrid_kv.schedule.programs import compile_together, compiled
from hybrid_kv.schedule.steady import can_commit, commit_steady, schedule_steady

_NOBODY = np.int32(-1)


class Stepper:
    """Compiled `schedule`, `commit`, `withdraw` and `abort` of one state; each uses up the state that it is given.

    After a step without prefills the next one is first tried with `schedule.steady`. consumes: False for those who need
    the states that they give, which are copied then.
    """

    def __init__(self, config: CacheConfig, consumes: bool = True) -> None:
        self._config = config
        program = functools.partial(compiled, config=config, consumes=consumes)
        self._plan, self._clear = program(rounds.plan, kernels="pieces"), program(rounds.clear, seldom=True)
        self._schedule_steady, self._commit_steady = program(schedule_steady), program(commit_steady)
        self._commit_rows, self._end_rows = program(transitions.commit_rows), program(transitions.end_rows)
        self._give_up_loads = program(transitions.give_up_loads, seldom=True)
        self._withdraw = program(transitions.withdraw, seldom=True)
        self._may_commit = can_commit(config)
        self._blank = rounds.blank(config)
        self._hopeful = False
        self._flying: collections.deque[bool] = collections.deque()  # steps in flight: whether steady

    def schedule(self, state: CacheState) -> tuple[CacheState, bool]:
        """Plan the next step: (state, whether there is one)."""
        if self._hopeful:
            state, steady = self._schedule_steady(state)
            if np.asarray(steady):
                self._flying.append(True)
                return state, True
        return self.schedule_whole(state)

    def schedule_whole(self, state: CacheState) -> tuple[CacheState, bool]:
        """The same without trying the small program."""
        state, note = self._plan(state, self._blank)
        while (words := np.asarray(note))[rounds.CROWDED]:
            state, note = self._plan(self._clear(state, words, _NOBODY), words)
        if self._config.loads and words[rounds.IDLE]:
            state = self._give_up_loads(state, np.bool_(True))
        planned = bool(words[rounds.STEP])
        self._hopeful = planned and not words[rounds.CHUNKS]
        if planned:
            self._flying.append(False)
        return state, planned

    def commit(self, state: CacheState, outcome: Outcome) -> CacheState:
        """Commit the oldest step in flight."""
        steady = self._flying.popleft() if self._flying else False
        state, ended = (self._commit_steady if steady and self._may_commit else self._commit_rows)(state, outcome)
        # From the host like everything else that is not the state: what comes from a device is another program's.
        return self._end_rows(state, np.asarray(ended)) if np.asarray(outcome.finished).any() else state

    def calls(self, state: CacheState, outcome: Outcome) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
        """Every program with arguments, for `programs.compile_together`: one to compile while the longest is traced,
        then those that take longest first."""
        ended = np.zeros(self._config.max_requests, bool)
        steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (self._end_rows, (ended,)),
            (self._plan, (self._blank,)),
            (self._withdraw, ()),
            (self._clear, (self._blank, _NOBODY)),
            (self._commit_rows, (outcome,)),
            (self._schedule_steady, ()),
        ]
        steps += [(self._commit_steady, (outcome,))] if self._may_commit else []
        steps += [(self._give_up_loads, (np.bool_(True),))] if self._config.loads else []
        return [(program, (state, *more)) for program, more in steps]

    def warm_up(self, state: CacheState, outcome: Outcome) -> CacheState:
        """Compile every program with a state without requests, which stays so."""
        compile_together(self.calls(state, outcome))
        for program, (_, *more) in self.calls(state, outcome):
            result = program(state, *more)
            state = result if isinstance(result, CacheState) else result[0]
        return state

    def abort(self, state: CacheState, slot: int) -> CacheState:
        """End a request at any moment."""
        return self._clear(state, self._blank, np.int32(slot))

    def withdraw(self, state: CacheState) -> CacheState:
        """Forget the step planned last."""
        if self._flying:
            self._flying.pop()
        return self._withdraw(state)
