"""What one replica of a model has to itself: cache state, scheduler, request slots and totals; nothing on a device."""

from __future__ import annotations

import dataclasses

import numpy as np

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.state import EVICTED, PREEMPTED, RECORDS, SKIPPED_STATES
from hybrid_kv.plan import StepPlan
from hybrid_kv.runtime.controller import Controller
from hybrid_kv.runtime.requests import Request, Scores, StepOutput


@dataclasses.dataclass(frozen=True)
class ReplicaStats:
    """Totals of one replica since the engine was made; fields as in `engine.EngineStats`."""

    tokens_prefilled: int
    tokens_saved: int
    checkpoints: int
    skipped_checkpoints: int
    evictions: int
    preemptions: int
    pools: dict[str, tuple[int, int, int, int]]


class Replica:
    """A step is `plan`, then `settle` once the devices have run it, or `withdraw` if they never will.

    flying: the plan between the two, None if there is none.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.controller = Controller(config)
        self.slots: list[Request | None] = [None] * config.max_requests
        self.flying: StepPlan | None = None
        self._prefilled = self._saved = self._checkpoints = 0
        self._counters = np.zeros(RECORDS, np.int64)

    @property
    def live(self) -> bool:
        """Whether it has a request."""
        return any(self.slots)

    @property
    def has_room(self) -> bool:
        """Whether a request slot is free."""
        return None in self.slots

    @property
    def load(self) -> int:
        """Tokens that its requests have yet to compute, at most."""
        return sum(request.tokens_left for request in self.slots if request)

    @property
    def scores(self) -> bool:
        """Whether a row of the planned step wants the logits of all its tokens."""
        plan = self.flying
        rows = [] if plan is None else [self.slots[slot] for slot in plan.slot[: int(plan.rows)]]
        return any(request is not None and request.wants_logits for request in rows)

    def arrive(self, request: Request, keys: np.ndarray) -> None:
        """Give a request the lowest free slot, as the transition does; keys: uint32[units, 4] of its prompt."""
        self.slots[self.slots.index(None)] = request
        self.controller.arrive(request.prompt_length, request.flags, keys)

    def abort(self, request: Request) -> None:
        """End a request that has a slot."""
        slot = self.slots.index(request)
        self.controller.abort(slot)
        self.slots[slot] = None

    def plan(self) -> StepPlan | None:
        """Schedule a step of the live requests; None without any.

        Raises RuntimeError if the scheduler leaves all of them waiting.
        """
        if not self.live:
            return None
        plan = self.controller.plan()
        if not plan.rows:
            raise RuntimeError("the scheduler found nothing to run although requests are live")
        self.flying = plan
        return plan

    def withdraw(self) -> None:
        """Forget the planned step, if there is one."""
        if self.flying is not None:
            self.controller.withdraw()
            self.flying = None

    def settle(self, tokens: np.ndarray, scores: Scores | None) -> list[StepOutput]:
        """Book the step that ran (tokens, ends, statistics) and commit it; returns what requests gained.

        tokens: i32[R] sampled behind every row. scores: of every packed token, where the step computed them.
        """
        plan = self.flying
        assert plan is not None
        outcome, outputs, ended = self.controller.no_outcome(), [], []
        offset = np.cumsum(plan.length) - plan.length
        for row in range(int(plan.rows)):
            slot = int(plan.slot[row])
            request = self.slots[slot]
            if request is None:  # aborted while the step was in flight
                continue
            self._record(plan, row, request, int(plan.preemptions[slot]))
            if scores is not None and request.wants_logits:
                request.scores.append(Scores(*(p[offset[row] : offset[row] + plan.length[row]] for p in scores)))
            if not plan.samples[row]:
                continue
            if request.wants_logits:  # a text is scored, not continued
                request.finish_reason = "length"
                outcome.finished[slot] = True
                ended.append(slot)
                continue
            token = int(tokens[row])
            keys = request.append(token)
            outcome.produced[slot] = 1
            outcome.unit_keys[slot, : len(keys)] = keys
            request.finish_reason = request.end_after(token)
            if request.finish_reason:
                outcome.finished[slot] = True
                ended.append(slot)
                if request.turn_end:
                    request.checkpoints.append(request.turn_end)
                    self._checkpoints += 1
            outputs.append(StepOutput(request.id, (token,), bool(request.finish_reason)))
        self.controller.commit(outcome)
        self.flying = None
        for slot in ended:
            self.slots[slot] = None
        self._counters[:] = plan.counters[:RECORDS]
        return outputs

    def _record(self, plan: StepPlan, row: int, request: Request, preemptions: int) -> None:
        start, length = int(plan.start[row]), int(plan.length[row])
        request.preemptions = preemptions
        if plan.admitted[row] and request.hit < 0:
            request.hit, request.reason = int(plan.hit[row]), Reason(int(plan.reason[row]))
            self._saved += request.hit
        if plan.admitted[row]:
            # After a preemption it is computed from its hit on once more.
            request.scores.clear()
            request.turn_end = 0
        if start < request.prompt_length or length > 1:
            request.chunks.append(start + length)
            self._prefilled += length
        *emitted, turn = (int(p) for p in plan.emit_position[row])
        saved = [position for position in emitted if position]
        request.checkpoints.extend(saved)
        self._checkpoints += len(saved)
        request.turn_end = turn or request.turn_end

    def stats(self) -> ReplicaStats:
        """Totals so far."""
        return ReplicaStats(
            tokens_prefilled=self._prefilled,
            tokens_saved=self._saved,
            checkpoints=self._checkpoints,
            skipped_checkpoints=int(self._counters[SKIPPED_STATES]),
            evictions=int(self._counters[EVICTED]),
            preemptions=int(self._counters[PREEMPTED]),
            pools=self.controller.pools(),
        )
