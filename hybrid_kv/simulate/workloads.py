"""Requests of published serving traces, with tokens: what policies are compared on.

Token traces (`simulate.traces`) hold real tokens. Block traces hold ids that name content of so many tokens: equal ids
become equal tokens; an answer is random, of the recorded length but at most `LONGEST_ANSWER`, and nobody continues it.

Mooncake's ids stand for 512 tokens, so two of its prompts part only at multiples of that: where a conversation goes on
inside a block, the trace shows another id. `continued=True` repairs the clear case: the second request ever to reach a
block, if the first one ended inside the block behind it, begins that block with the first one's tokens.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hybrid_kv.errors import UserError
from hybrid_kv.simulate.traces import prompts, read_trace

LONGEST_ANSWER = 64
_VOCABULARY = 1 << 17


class Arrival(NamedTuple):
    """One request: requests of a session never overlap. prompt, answer: i32[n] tokens."""

    session: Hashable
    prompt: np.ndarray
    answer: np.ndarray


def tokens_of_trace(path: Path, limit: int | None = None) -> Iterator[Arrival]:
    """Requests of a token trace with their recorded answers."""
    requests = read_trace(path, limit)
    built = prompts(requests, lambda index: requests[index].out)
    for request, prompt in zip(requests, built, strict=True):
        yield Arrival(request.session, prompt, np.array(request.out, np.int32))


def mooncake(path: Path, limit: int | None = None, continued: bool = False) -> Iterator[Arrival]:
    """Requests of a Mooncake trace, each a session of its own."""
    block, content = 512, _Content()
    seen: dict[int, int] = {}  # how many requests reached a block
    tails: dict[int, np.ndarray] = {}  # block -> tokens behind it of the one request that has ended there
    for number, row in enumerate(_rows(path, limit)):
        length = row["input_length"]
        ids = row["hash_ids"][: length // block]
        whole = row["hash_ids"][: -(-length // block)]
        for before, after in itertools.pairwise(ids):
            if continued and seen.get(before, 0) == 1 and before in tails:
                content.begin(after, tails[before], block)
        prompt = np.concatenate([content.of(one, block) for one in whole] or [np.zeros(0, np.int32)])[:length]
        for one in ids:
            seen[one] = seen.get(one, 0) + 1
        if ids and seen[ids[-1]] == 1 and length % block:
            tails[ids[-1]] = prompt[len(ids) * block :]
        yield Arrival(number, prompt, content.fresh(min(row["output_length"], LONGEST_ANSWER)))


def agent_sessions(
    path: Path, sessions: int, rate: float, seed: int = 0, longest_gap: float = 60.0, longest_prompt: int = 100_000
) -> Iterator[Arrival]:
    """Sampled agent sessions, begun as a Poisson process of `rate` a second, their requests in order of arrival.

    A pause of a session is `longest_gap` seconds at most, and it ends before its first prompt of more than
    `longest_prompt` tokens. Blocks of 64 tokens; what is left of a prompt is its own.
    """
    rng, block, content = random.Random(seed), 64, _Content()
    everything = list(_rows(path, None))
    rows: list[tuple[float, dict[str, Any], Hashable]] = []
    begin = 0.0
    for session in rng.sample(everything, min(sessions, len(everything))):
        begin += rng.expovariate(rate)
        before = shift = 0.0
        for at, request in _flat(session):
            if request["in"] > longest_prompt:
                break
            shift += max(at - before - longest_gap, 0.0)
            before = at
            rows.append((begin + at - shift, request, session["id"]))
    for _, request, name in sorted(rows, key=lambda row: row[0]):
        ids = [first + nth for first, count in request["runs"] for nth in range(count)]
        parts = [content.of((name, one), block) for one in ids]
        prompt = np.concatenate([*parts, content.fresh(request["in"] - block * len(ids))])
        yield Arrival(name, prompt, content.fresh(min(request["out"], LONGEST_ANSWER)))


def _flat(session: dict[str, Any]) -> list[tuple[float, dict[str, Any]]]:
    """Requests of a session and of its sub-agents with their time, in order."""
    found = []
    for row in session["requests"]:
        begin, inner = (row["t"], row["requests"]) if "requests" in row else (0, [row])
        found += [(float(begin + one["t"]), one) for one in inner]
    return sorted(found, key=lambda one: one[0])


class _Content:
    """Tokens by id, made when first asked for; and tokens nobody else has."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._blocks: dict[Hashable, np.ndarray] = {}

    def of(self, name: Hashable, length: int) -> np.ndarray:
        if name not in self._blocks:
            self._blocks[name] = self.fresh(length)
        return self._blocks[name]

    def begin(self, name: Hashable, tokens: np.ndarray, length: int) -> None:
        """The block of a name nobody has asked for begins with these tokens."""
        if name not in self._blocks:
            self._blocks[name] = np.concatenate([tokens, self.fresh(length)])[:length]

    def fresh(self, length: int) -> np.ndarray:
        return self._rng.integers(1, _VOCABULARY, length, dtype=np.int32)


def _rows(path: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rt") as file:
            for number, line in enumerate(file):
                if number == limit:
                    return
                yield json.loads(line)
    except (OSError, EOFError, ValueError) as error:
        raise UserError("trace", str(path), f"give a readable .jsonl.gz trace ({error})") from None


def reference(folder: Path, name: str) -> Sequence[Arrival]:
    """The slices that published figures are about: miniswe, magagent, synthetic, conversation, conversation+ or cc."""
    slices = {
        "miniswe": lambda: tokens_of_trace(folder / "miniswe_tokens.jsonl.gz"),
        "magagent": lambda: tokens_of_trace(folder / "magagent_tokens.jsonl.gz"),
        "synthetic": lambda: mooncake(folder / "mooncake_synthetic.jsonl.gz", 1500),
        "conversation": lambda: mooncake(folder / "mooncake_conversation.jsonl.gz", 1500),
        "conversation+": lambda: mooncake(folder / "mooncake_conversation.jsonl.gz", 1500, continued=True),
        "cc": lambda: agent_sessions(folder / "cc_agent_sessions.runs.jsonl.gz", 20, 0.05),
    }
    if name not in slices:
        raise UserError("trace", name, f"use one of {', '.join(slices)}")
    return list(slices[name]())
