"""Watches for prefills that are cut only so that a state can be saved there: there must be none.

A chunk that ends inside its prompt is normal when the step's token budget is used up. One that ends at a saved
state although the step had budget left was ended for that state's sake.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_kv.replay.contract import ReplayEngine, StepLike


@dataclass(frozen=True)
class Split:
    """The request (its index in the trace) and the position, in tokens, where its prefill was cut."""

    index: int
    position: int


class SplitWatch:
    """Told of every request sent and asked around every step; reads the engine, changes nothing."""

    def __init__(self, engine: ReplayEngine, token_budget: int) -> None:
        self._engine, self._budget = engine, token_budget
        self._prefilling: dict[int, tuple[int, int, int]] = {}  # id -> index, prompt length, chunks seen
        self._prefilled = 0

    def sent(self, request_id: int, index: int, prompt_length: int) -> None:
        self._prefilling[request_id] = (index, prompt_length, 0)

    def before_step(self) -> None:
        if self._prefilling:
            self._prefilled = self._engine.stats().tokens_prefilled

    def after_step(self, outputs: Sequence[StepLike]) -> list[Split]:
        """The splits of the step that gave `outputs`."""
        if not self._prefilling:
            return []
        decoded = sum(len(output.tokens) for output in outputs if output.request_id not in self._prefilling)
        prefilled = self._engine.stats().tokens_prefilled - self._prefilled
        found = []
        for request_id, (index, prompt_length, seen) in list(self._prefilling.items()):
            result = self._engine.result(request_id)
            inside = [end for end in result.chunks[seen:] if end < prompt_length]
            if prefilled + decoded < self._budget:
                found += [Split(index, end) for end in inside if end in result.checkpoints]
            self._prefilling[request_id] = (index, prompt_length, len(result.chunks))
        for output in outputs:
            self._prefilling.pop(output.request_id, None)
        return found
