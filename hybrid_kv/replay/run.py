"""The closed loop: keeps a number of requests in flight until the trace is through.

The model's own answers take the place of the recorded ones, in the lengths of the trace, so later prompts
contain what was really generated and the sharing structure stays the recorded one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_kv.errors import UserError
from hybrid_kv.replay.contract import ReplayEngine, ReplayFailure, ResultLike
from hybrid_kv.replay.order import next_request
from hybrid_kv.replay.splits import Split, SplitWatch
from hybrid_kv.simulate.traces import TraceRequest, build_prompt


@dataclass(frozen=True)
class Served:
    """One request as it was served; positions and lengths in tokens, times in seconds since the start."""

    index: int
    session: str
    prompt: np.ndarray
    answer: np.ndarray
    hit: int
    reason: str
    chunks: tuple[int, ...]
    checkpoints: tuple[int, ...]
    preemptions: int
    sent_at: float
    ended_at: float


@dataclass(frozen=True)
class PoolSample:
    """Pool name -> (used, cached, free, total) after a step."""

    step: int
    pools: Mapping[str, tuple[int, int, int, int]]


@dataclass(frozen=True)
class ReplayRun:
    """served: in the order in which the requests were sent. steps: engine steps of this run.

    splits: prefills cut for a checkpoint, see `splits.py`.
    """

    served: tuple[Served, ...]
    samples: tuple[PoolSample, ...]
    splits: tuple[Split, ...]
    steps: int
    seconds: float


@dataclass(frozen=True)
class _Live:
    index: int
    prompt: np.ndarray
    sent_at: float


def replay(
    engine: ReplayEngine,
    requests: Sequence[TraceRequest],
    sampling: Callable[[int], Any],
    token_budget: int,
    in_flight: int = 8,
    sample_every: int = 8,
    check_every_step: bool = False,
    overlap: bool = False,
    on_end: Callable[[Served], None] = lambda served: None,
) -> ReplayRun:
    """Serves all requests; `sampling(n)` gives the parameters for a greedy answer of exactly n tokens.

    requests: their tokens already are tokens of the model (`map_trace`). token_budget: of one step.
    sample_every: steps between two looks at the pools. check_every_step: stop at the first broken invariant.
    overlap: let requests of one session run side by side where their prompts allow it.
    Raises UserError for a request the engine refuses, ReplayFailure when the engine stops making progress, ends an
    answer early or breaks an invariant.
    """
    if in_flight < 1:
        raise UserError("in flight", in_flight, "must be at least 1")
    start = time.perf_counter()
    live: dict[int, _Live] = {}
    done: dict[int, Served] = {}
    known: dict[int, np.ndarray] = {}
    samples = [PoolSample(0, dict(engine.stats().pools))]
    watch = SplitWatch(engine, token_budget)
    splits: list[Split] = []
    steps = 0
    while len(done) < len(requests):
        while len(live) < in_flight:
            live_indices = {one.index for one in live.values()}
            index = next_request(requests, known.keys(), live_indices, overlap)
            if index is None:
                break
            known[index] = _prompt(requests[index], known, done)
            request_id = engine.add_request(known[index].tolist(), sampling(len(requests[index].out)))
            live[request_id] = _Live(index, known[index], time.perf_counter() - start)
            watch.sent(request_id, index, len(known[index]))
        if not engine.has_work:
            raise ReplayFailure(f"the engine has no work left with {len(live)} requests live")
        watch.before_step()
        outputs = engine.step()
        splits += watch.after_step(outputs)
        steps += 1
        broken = engine.check() if check_every_step else []
        if broken:
            raise ReplayFailure(f"broken invariant after step {steps}: {broken[0]}")
        for request_id in [output.request_id for output in outputs if output.finished]:
            one = live.pop(request_id)
            served = _served(one, requests[one.index], engine.result(request_id), time.perf_counter() - start)
            done[one.index] = served
            on_end(served)
        if steps % sample_every == 0:
            samples.append(PoolSample(steps, dict(engine.stats().pools)))
    samples.append(PoolSample(steps, dict(engine.stats().pools)))
    # `known` remembers the order of sending.
    in_order = tuple(done[index] for index in known)
    return ReplayRun(in_order, tuple(samples), tuple(splits), steps, time.perf_counter() - start)


def _prompt(request: TraceRequest, known: Mapping[int, np.ndarray], done: Mapping[int, Served]) -> np.ndarray:
    if not request.keep:
        return build_prompt(request, (), ())
    base = done.get(request.base)
    return build_prompt(request, known[request.base], base.answer if base else ())


def _served(one: _Live, request: TraceRequest, result: ResultLike, ended_at: float) -> Served:
    answer = np.asarray(result.tokens, np.int32)
    if len(answer) != len(request.out):
        raise ReplayFailure(
            f"request {request.index} ended after {len(answer)} of {len(request.out)} tokens ({result.finish_reason})"
        )
    return Served(
        index=request.index,
        session=request.session,
        prompt=one.prompt,
        answer=answer,
        hit=result.hit,
        reason=result.miss_reason,
        chunks=tuple(result.chunks),
        checkpoints=tuple(result.checkpoints),
        preemptions=result.preemptions,
        sent_at=one.sent_at,
        ended_at=ended_at,
    )
