"""A stand-in engine: a toy model with a cache and faults on demand, fast and without JAX."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from hybrid_kv.replay.run import Served
from hybrid_kv.simulate.traces import TraceRequest

VOCAB, RESERVED, GRID = 97, 3, 8


@dataclass(frozen=True)
class Sampling:
    max_tokens: int


@dataclass(frozen=True)
class Step:
    request_id: int
    tokens: tuple[int, ...]
    finished: bool


@dataclass(frozen=True)
class Result:
    tokens: list[int]
    finish_reason: str
    hit: int
    miss_reason: str
    chunks: list[int]
    checkpoints: list[int]
    preemptions: int


@dataclass(frozen=True)
class Stats:
    steps: int = 0
    tokens_prefilled: int = 0
    tokens_saved: int = 0
    checkpoints: int = 0
    evictions: int = 0
    preemptions: int = 0
    compilations_after_warm_up: int = 0
    pools: dict[str, tuple[int, int, int, int]] = field(default_factory=lambda: {"attention": (0, 0, 10, 10)})


@dataclass
class Running:
    context: list[int]
    prompt_length: int
    wanted: int
    hit: int
    state: int
    computed: int
    answer: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)

    def result(self, finish_reason: str) -> Result:
        return Result(self.answer, finish_reason, self.hit, "cold", self.chunks, self.checkpoints, 0)


def toy_state(tokens: Sequence[int], state: int = 7) -> int:
    """The toy model's whole memory after these tokens: a rolling hash of all of them."""
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state


def toy_token(state: int) -> int:
    """The greedy token of a state."""
    return RESERVED + state % (VOCAB - RESERVED)


def toy_logits(tokens: Sequence[int]) -> np.ndarray:
    """Row t depends on tokens 0..t; its best logit is clear of the others by 1."""
    rows = np.zeros((len(tokens), VOCAB), np.float32)
    state = toy_state(())
    for position, token in enumerate(tokens):
        state = toy_state((token,), state)
        rows[position, toy_token(state)] = 1.0
    return rows


class ToyEngine:
    """Serves one token a step to every live request.

    wrong: (request in the order added, answer offset) whose token comes out as its successor.
    stops_early: the order number of a request that ends one token short. stalls: never has work.
    splits: prefills stop at their checkpoint, the last boundary in the prompt, whatever the budget.
    recompiles: compilations reported after warm-up. broken: what check() says.
    """

    vocab_size = VOCAB
    reserved_tokens = RESERVED

    def __init__(
        self,
        caching: bool = True,
        wrong: tuple[int, int] | None = None,
        stops_early: int | None = None,
        stalls: bool = False,
        splits: bool = False,
        token_budget: int = 1000,
        recompiles: int = 0,
        broken: tuple[str, ...] = (),
    ) -> None:
        self.caching, self.wrong, self.stops_early, self.stalls = caching, wrong, stops_early, stalls
        self.broken, self.counts = list(broken), Stats(compilations_after_warm_up=recompiles)
        self.splits, self.token_budget = splits, token_budget
        self.live: dict[int, Running] = {}
        self.results: dict[int, Result] = {}
        self.published: set[tuple[int, ...]] = set()
        self.added: list[tuple[int, ...]] = []
        self.most_live = 0

    @property
    def has_work(self) -> bool:
        return bool(self.live) and not self.stalls

    def warm_up(self) -> None:
        # Not part of a replay's counts.
        self.counts = replace(self.counts, steps=5, tokens_prefilled=1000)

    def add_request(self, prompt: list[int], sampling: Sampling) -> int:
        assert all(RESERVED <= token < VOCAB for token in prompt)
        hit = 0
        if self.caching:
            hit = max((n for n in range(0, len(prompt), GRID) if tuple(prompt[:n]) in self.published), default=0)
        self.added.append(tuple(prompt))
        request_id = 100 + len(self.added)
        self.live[request_id] = Running(list(prompt), len(prompt), sampling.max_tokens, hit, toy_state(prompt), hit)
        self.most_live = max(self.most_live, len(self.live))
        return request_id

    def step(self) -> list[Step]:
        outputs = []
        left = self.token_budget - sum(one.computed == one.prompt_length for one in self.live.values())
        for request_id, one in list(self.live.items()):
            left -= self._prefill(one, left)
            if one.computed < one.prompt_length:
                continue
            token = toy_token(one.state)
            number = request_id - 101
            if self.wrong == (number, len(one.answer)):
                token = RESERVED + (token - RESERVED + 1) % (VOCAB - RESERVED)
            one.state = toy_state((token,), one.state)
            one.context.append(token)
            one.answer.append(token)
            finished = len(one.answer) == one.wanted - (self.stops_early == number)
            if finished:
                self._finish(request_id)
            outputs.append(Step(request_id, (token,), finished))
        self.counts = replace(self.counts, steps=self.counts.steps + 1)
        return outputs

    def _prefill(self, one: Running, left: int) -> int:
        """Tokens of the prompt computed in this step, `left` at most."""
        tail = one.prompt_length // GRID * GRID
        end = min(one.prompt_length, one.computed + left)
        if self.splits and one.computed < tail < end:
            end = tail
        count = end - one.computed
        if count:
            saves = one.computed < tail <= end
            one.checkpoints += [tail] * saves
            one.chunks.append(end)
            self.counts = replace(
                self.counts,
                tokens_prefilled=self.counts.tokens_prefilled + count,
                checkpoints=self.counts.checkpoints + saves,
            )
        one.computed = end
        return count

    def _finish(self, request_id: int) -> None:
        one = self.live.pop(request_id)
        self.published |= {tuple(one.context[:n]) for n in range(GRID, len(one.context), GRID)}
        self.results[request_id] = one.result("length")
        self.counts = replace(self.counts, tokens_saved=self.counts.tokens_saved + one.hit)

    def result(self, request_id: int) -> Result:
        return self.results[request_id] if request_id in self.results else self.live[request_id].result("")

    def score_with_margins(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return self.score(tokens), np.full(len(tokens), np.inf, np.float32)

    def score(self, tokens: list[int]) -> np.ndarray:
        return toy_logits(tokens)

    def stats(self) -> Stats:
        return self.counts

    def check(self) -> list[str]:
        return self.broken


@pytest.fixture
def toy_engine() -> type[ToyEngine]:
    return ToyEngine


@pytest.fixture
def sampling() -> Callable[[int], Sampling]:
    return Sampling


@pytest.fixture
def two_sessions() -> list[TraceRequest]:
    """Session a: three turns, each going on from the answer before. Session b: two, beginning like a."""
    first = tuple(range(10, 30))
    return [
        TraceRequest(0, "a", -1, 0, first, (1,) * 6),
        TraceRequest(1, "a", 0, 26, (40, 41), (1,) * 4),
        TraceRequest(2, "a", 1, 32, (50,) * 9, (1,) * 5),
        TraceRequest(3, "b", 0, 18, (60, 61), (1,) * 9),
        TraceRequest(4, "b", 3, 29, (70,), (1,) * 3),
    ]


@pytest.fixture
def served_by() -> Callable[[list[int], list[int]], Served]:
    """A served request of which only prompt and answer matter."""

    def make(prompt: list[int], answer: list[int], index: int = 0) -> Served:
        tokens = (np.asarray(prompt, np.int32), np.asarray(answer, np.int32))
        return Served(index, "s", *tokens, 0, "cold", (), (), 0, 0.0, 0.0)

    return make
