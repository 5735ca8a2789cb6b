"""Token traces: recorded requests that share prefixes, and the prompts they stand for.

A trace is a `.jsonl` or `.jsonl.gz` file with one request a line. A prompt is stored as the difference to an
earlier request: its first `keep` tokens are those of request `base` (prompt, then answer), then comes `add`.
"""

import gzip
import json
import reprlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_kv.errors import UserError
from hybrid_kv.typing import Int32


@dataclass(frozen=True)
class TraceRequest:
    """One recorded request; all counts are tokens.

    index: its line in the trace, from 0. session: requests of one session never overlap in time.
    base: index of an earlier request, or -1; as read, the earliest that the kept tokens can be taken from, so that
    a request waits for no more than it needs. keep: tokens from the front of the base's prompt + answer.
    add: new prompt tokens. out: the recorded answer, never empty.
    """

    index: int
    session: str
    base: int
    keep: int
    add: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def prompt_length(self) -> int:
        return self.keep + len(self.add)


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace file (all of them if None), each checked.

    Raises UserError naming the file, and the line where there is one.
    """
    if limit is not None and limit < 1:
        raise UserError("requests", limit, "ask for at least one request")
    requests: list[TraceRequest] = []
    for number, line in _lines(Path(path)):
        if limit is not None and len(requests) == limit:
            break
        where = f"trace {path} line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(where, line[:40], f"every line must be a JSON object ({error})") from None
        requests.append(_checked(fields, requests, where))
    if not requests:
        raise UserError("trace", str(path), "the file holds no requests")
    return requests


def map_tokens(tokens: Sequence[int], vocab_size: int, reserved: int) -> Int32[np.ndarray, "T"]:
    """Trace tokens as a model's tokens: equal to equal, and never one of the `reserved` lowest (special) ids.

    Raises UserError if the vocabulary has no token left.
    """
    if not 0 <= reserved < vocab_size:
        raise UserError("reserved tokens", reserved, f"must be 0 or more and below the vocabulary, {vocab_size}")
    return (reserved + np.asarray(tokens, np.int64) % (vocab_size - reserved)).astype(np.int32)


def map_trace(requests: Sequence[TraceRequest], vocab_size: int, reserved: int) -> list[TraceRequest]:
    """The same requests with all tokens mapped onto a model's vocabulary by `map_tokens`."""

    def mapped(tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(map_tokens(tokens, vocab_size, reserved).tolist())

    return [TraceRequest(r.index, r.session, r.base, r.keep, mapped(r.add), mapped(r.out)) for r in requests]


def build_prompt(
    request: TraceRequest, base_prompt: Sequence[int] | np.ndarray, base_answer: Sequence[int] | np.ndarray
) -> Int32[np.ndarray, "T"]:
    """`(base_prompt + base_answer)[:keep] + add`; the base's arguments are not looked at when keep is 0."""
    head = np.asarray(base_prompt, np.int32)[: request.keep]
    rest = request.keep - len(head)
    return np.concatenate([head, np.asarray(base_answer, np.int32)[:rest], np.asarray(request.add, np.int32)])


def prompts(
    requests: Sequence[TraceRequest], answer: Callable[[int], Sequence[int]]
) -> Iterator[Int32[np.ndarray, "T"]]:
    """The prompts in trace order. `answer(index)` gives an earlier request's answer, of the recorded length;
    it is asked for no sooner than a prompt needs it."""
    built: list[np.ndarray] = []
    for request in requests:
        base_prompt: Sequence[int] | np.ndarray = ()
        base_answer: Sequence[int] = ()
        if request.keep:
            base_prompt = built[request.base]
            if needs_answer(request, requests):
                base_answer = answer(request.base)
        built.append(build_prompt(request, base_prompt, base_answer))
        yield built[-1]


def needs_answer(request: TraceRequest, requests: Sequence[TraceRequest]) -> bool:
    """Whether the prompt reaches into the base's answer, and so cannot be built before that has ended."""
    return request.keep > 0 and request.keep > requests[request.base].prompt_length


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Non-empty lines with their numbers from 1; whatever makes the file unreadable becomes a UserError."""
    fix = "give a readable .jsonl or .jsonl.gz token trace"
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError("trace", str(path), f"{fix} ({reason})") from None


def _checked(fields: Any, earlier: Sequence[TraceRequest], where: str) -> TraceRequest:
    """A request from its JSON object; raises UserError for anything a replay would stumble over later."""
    if not isinstance(fields, dict):
        raise UserError(where, _short(fields), "every line must be a JSON object")
    missing = sorted({"session", "t", "base", "keep", "add", "out"} - fields.keys())
    if missing:
        raise UserError(f"{where} fields", _short(sorted(fields)), f"add {', '.join(missing)}")
    session, base, keep = fields["session"], fields["base"], fields["keep"]
    if not isinstance(session, str):
        raise UserError(f"{where} session", _short(session), "must be a string")
    if isinstance(fields["t"], bool) or not isinstance(fields["t"], int | float):
        raise UserError(f"{where} t", _short(fields["t"]), "must be a number of seconds")
    if not _is_count(base, low=-1) or base >= len(earlier):
        raise UserError(f"{where} base", _short(base), f"must be -1 or an earlier request, at most {len(earlier) - 1}")
    limit = earlier[base].prompt_length + len(earlier[base].out) if base >= 0 else 0
    if not _is_count(keep) or keep > limit:
        raise UserError(f"{where} keep", _short(keep), f"must be 0 to {limit}, the tokens of the base request")
    for name in ("add", "out"):
        tokens = fields[name]
        if not isinstance(tokens, list) or not all(_is_count(token) for token in tokens):
            raise UserError(f"{where} {name}", _short(tokens), "must be a list of integers, 0 or more")
    if not keep and not fields["add"]:
        raise UserError(f"{where} add", [], "the prompt is empty; it needs at least one token")
    if not fields["out"]:
        raise UserError(f"{where} out", [], "the answer is empty; it needs at least one token")
    while base >= 0 and keep <= earlier[base].keep:
        base = earlier[base].base  # the base has those tokens from its own base
    return TraceRequest(len(earlier), session, base, keep, tuple(fields["add"]), tuple(fields["out"]))


def _is_count(value: Any, low: int = 0) -> bool:
    """JSON true and 1.0 are not integers here; 2**31 and above would not fit the arrays."""
    return type(value) is int and low <= value < 2**31


def _short(value: Any) -> Any:
    """Lists and objects shortened: a line may hold long or deep ones."""
    return reprlib.repr(value) if isinstance(value, list | dict) else value
