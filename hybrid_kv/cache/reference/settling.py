"""What a step has done, once the device says so: tokens taken, content filed, blocks given back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybrid_kv.cache.reference import publishing, states, windows
from hybrid_kv.cache.reference.core import Core
from hybrid_kv.cache.reference.plan import Row, Step
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.cache.reference.turns import Ring
from hybrid_kv.errors import UserError


class Settling(Core):
    """The half of the scheduler that looks back."""

    def _check_failed(self, step: Step, failed: Sequence[str]) -> None:
        loading = {load.request.name for load in step.loads if not load.asynchronous}
        for name in failed:
            if name not in loading:
                raise UserError("failed", name, "name requests that this step loads something for")

    def _check_answers(self, step: Step, answers: Mapping[str, Sequence[int]], failed: Sequence[str]) -> None:
        for row in step.rows:
            name = row.request.name
            if self.requests.get(name) is row.request and not row.void and name not in failed:
                given, least = len(answers.get(name, ())), int(row.samples)
                if not least <= given <= row.promised:
                    raise UserError(f"answers[{name}]", given, f"this row gives {least} to {row.promised} tokens")

    def _take_answer(self, row: Row, sampled: Sequence[int]) -> None:
        request = row.request
        request.tokens += sampled
        if row.stale:
            self.hash(request)
            row.drop_emissions()
            return
        start = request.computed
        request.computed += row.stands(len(sampled))
        request.planned -= row.length - (request.computed - start)
        request.promised -= row.promised
        self.hash(request)
        if request.unproven:
            self._prove(request)
        self._unpin(request)
        states.file(self, row, start)
        publishing.publish(self, request)
        windows.leave(self, request)

    def _prove(self, request: Request) -> None:
        """The step has run on what it loaded: its states may be found, like its rows."""
        for group in self.rules.geometry.recurrent:
            if (state := request.state_read[group]) is not None:
                publishing.file_state(self, request, group, request.hit, state)
        request.unproven = None

    def _fail(self, request: Request) -> None:
        """Nothing that was computed on a failed load counts: the request waits again, and the store is not asked."""
        for row in request.rows:
            row.void = True
        self._release(request)
        self._clear(request)
        request.epoch += 1
        request.refused = True
        if request.running:
            request.running = False
            self.running.remove(request.name)
            self.waiting.append(request.name)

    def _leave(self, name: str) -> None:
        request = self.requests.pop(name)
        self._release(request)
        (self.running if request.running else self.waiting).remove(name)

    def _release(self, request: Request) -> None:
        """Give everything back: the turn's end is filed, tails of tables are dropped before heads."""
        states.refresh(self, request)
        self._unpin(request)
        self._unpin_load(request)
        states.end_turn(self, request)
        states.leave_prefill(self, request)
        for group, geometry in enumerate(self.rules.geometry.groups):
            table = request.tables[group]
            if geometry.kind.windowed:
                windows.part(self, request, group, sorted(table))
            for column in sorted(table, reverse=True):
                table[column].pool.drop(table[column])
        self.forget_unheld()

    def _unpin(self, request: Request) -> None:
        """Let go of what the first row of an admission read."""
        for group in range(len(self.rules.geometry.groups)):
            if (read := request.state_read[group]) is not None:
                read.pool.drop(read)
                request.state_read[group] = None
            if (pair := request.copy[group]) is not None:
                pair[0].pool.drop(pair[0])
                request.copy[group] = None

    def _unpin_load(self, request: Request) -> None:
        if request.pins:
            request.pins.drop()
            request.pins = None

    def _clear(self, request: Request) -> None:
        count = len(self.rules.geometry.groups)
        request.tables = [{} for _ in range(count)]
        request.state_read, request.copy = [None] * count, [None] * count
        request.published = [0] * count
        request.turns = Ring(self.rules.turn_slots)
        request.computed = request.planned = request.promised = request.drafts = 0
        request.unproven, request.asked = None, False
