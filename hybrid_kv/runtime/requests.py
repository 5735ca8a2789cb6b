"""What a user hands in and gets back, and what the engine remembers in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybrid_kv import hashing
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.errors import UserError

# Token ids; what a user hands in is checked by the engine, with a message that says what to change.
Prompt = Sequence[Any] | np.ndarray


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the answer is chosen and when it ends.

    max_tokens: longest answer. temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.
    seed: draws depend on it and on the position only, not on what else runs.
    stop_tokens: end the answer (the token is kept), besides the model's own unless ignore_stop.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    ignore_stop: bool = False

    def __post_init__(self) -> None:
        for field, least in (("max_tokens", 1), ("top_k", 0), ("seed", 0)):
            value = getattr(self, field)
            if not _is_integer(value) or not least <= value < 2**31:
                raise UserError(field, value, f"use a whole number in [{least}, 2**31)")
        for field in ("temperature", "top_p"):
            if not isinstance(getattr(self, field), (int, float, np.number)):
                raise UserError(field, getattr(self, field), "use a number")
        if not 0 <= self.temperature < float("inf"):
            raise UserError("temperature", self.temperature, "use 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError("top_p", self.top_p, "use a share in (0, 1]")
        if not isinstance(self.stop_tokens, Collection) or not all(map(_is_integer, self.stop_tokens)):
            raise UserError("stop_tokens", self.stop_tokens, "give token ids")


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Tokens a request gained in one step."""

    request_id: int
    tokens: tuple[int, ...]
    finished: bool


@dataclasses.dataclass(frozen=True)
class RequestResult:
    """A request as it stands; lengths and positions in tokens.

    finish_reason: "length", "stop", "aborted", or "" while it runs. hit, miss_reason: of its first
    admission ("not admitted" before). chunks: where its prefill chunks ended. checkpoints: lengths
    at which states were saved. replica: where it was computed (-1: not admitted).
    """

    request_id: int
    prompt_length: int
    tokens: list[int]
    finish_reason: str
    hit: int
    miss_reason: str
    chunks: list[int]
    checkpoints: list[int]
    preemptions: int
    replica: int = -1


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class Scores(NamedTuple):
    """Logits float32[T, vocabulary] and expert selection margins float32[T] of the tokens of a text.

    A margin is how far, in router score, a token was from choosing another expert in any layer.
    """

    logits: np.ndarray
    expert_margins: np.ndarray


class Request:
    """The engine's own record of one request: its tokens and their hash chain."""

    def __init__(
        self, request_id: int, prompt: Prompt, sampling: SamplingParams, chain: hashing.KeyChain, stops: frozenset
    ) -> None:
        self.id, self.sampling, self.chain, self.stops = request_id, sampling, chain, stops
        self.prompt_length = len(prompt)
        self.tokens = np.zeros(len(prompt) + sampling.max_tokens, np.int32)
        self.tokens[: len(prompt)] = prompt
        self.length = len(prompt)
        self.flags = 0
        self.wants_logits = False
        self.scores: list[Scores] = []
        self.hit, self.reason, self.preemptions = -1, Reason.NONE, 0
        self.chunks: list[int] = []
        self.checkpoints: list[int] = []
        self.turn_end = 0
        self.finish_reason = ""
        self.replica, self.guessed_hit = -1, 0

    @property
    def tokens_left(self) -> int:
        """Tokens yet to compute at most: of the prompt, and of the longest answer."""
        served = self.hit if self.hit >= 0 else self.guessed_hit
        done = self.chunks[-1] if self.chunks else served
        return max(self.prompt_length - done, 0) + len(self.tokens) - self.length

    def prompt_keys(self, units: int) -> np.ndarray:
        """Hash chain of the prompt, padded to uint32[units, 4]; to be called once, before any `append`."""
        keys = np.zeros((units, hashing.KEY_WORDS), np.uint32)
        chain = self.chain.extend(self.tokens[: self.prompt_length])
        keys[: len(chain)] = chain
        return keys

    def append(self, token: int) -> np.ndarray:
        """Add a token; returns the keys of the units it completes, uint32[0 or 1, 4]."""
        self.tokens[self.length] = token
        self.length += 1
        return self.chain.extend(self.tokens[: self.length])

    def end_after(self, token: int) -> str:
        """The reason this token ends the answer, or an empty text."""
        if token in self.stops:
            return "stop"
        return "length" if self.length - self.prompt_length >= self.sampling.max_tokens else ""

    def result(self) -> RequestResult:
        return RequestResult(
            request_id=self.id,
            prompt_length=self.prompt_length,
            tokens=[int(t) for t in self.tokens[self.prompt_length : self.length]],
            finish_reason=self.finish_reason,
            hit=max(self.hit, 0),
            miss_reason=self.reason.text if self.hit >= 0 else "not admitted",
            chunks=list(self.chunks),
            checkpoints=list(self.checkpoints),
            preemptions=self.preemptions,
            replica=self.replica,
        )
