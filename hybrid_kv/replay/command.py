"""The whole `replay` command: load, warm up, replay, verify, report; each phase timed."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hybrid_kv.errors import UserError
from hybrid_kv.replay import plot, report, setting
from hybrid_kv.replay.contract import ReplayEngine
from hybrid_kv.replay.run import ReplayRun, replay
from hybrid_kv.replay.verify import Verification, verify
from hybrid_kv.simulate.traces import TraceRequest, map_trace

JSON_NAME, PNG_NAME = "report.json", "report.png"


@dataclass(frozen=True)
class ReplayOptions:
    """trace, checkpoint, mesh: as given, for the report. grid: tokens, the granularity of the ceilings.
    token_budget: tokens of one step. check_every_step: check all invariants of the cache after each step.
    overlap: let requests of one session run side by side.

    out: folder for report.json and report.png, made if absent; None writes nothing.
    configuration: the cache options, for the report.
    """

    trace: str
    checkpoint: str
    mesh: str
    grid: int
    token_budget: int
    in_flight: int
    verify: bool
    out: Path | None
    configuration: Mapping[str, Any]
    check_every_step: bool = False
    overlap: bool = False


def run_replay(
    options: ReplayOptions,
    requests: list[TraceRequest],
    make_engine: Callable[[bool], ReplayEngine],
    sampling: Callable[[int], Any],
    console: Console,
) -> int:
    """Exit code: 0, or 1 if an answer is wrong, something compiled after warm-up or an invariant broke.

    make_engine(prefix_caching) makes an engine; sampling(n) the parameters for a greedy answer of n tokens.
    Raises UserError before any work if `out` cannot be used.
    """
    _prepare(options.out)
    seconds: dict[str, float] = {}
    with _phase(seconds, "load"):
        engine = make_engine(True)
        requests = map_trace(requests, engine.vocab_size, engine.reserved_tokens)
    with _phase(seconds, "warm-up"):
        engine.warm_up()
    before = engine.stats()
    with _phase(seconds, "replay"), _progress(console, "replay", len(requests)) as advance:
        run = replay(
            engine,
            requests,
            sampling,
            options.token_budget,
            options.in_flight,
            check_every_step=options.check_every_step,
            overlap=options.overlap,
            on_end=lambda served: advance(1),
        )
    summary = report.summarise(run, before, engine.stats(), options.grid)
    broken = engine.check() + leaks(engine.stats().pools)
    del engine  # its pools are not needed beside the second engine's
    verification = _verify(options, run, make_engine, seconds, console) if options.verify else None

    failed = report.failures(summary, verification, broken)
    report.print_requests(console, run.served)
    report.print_summary(console, summary, verification, seconds)
    if options.out is not None:
        _write(options, options.out, run, summary, verification, failed, seconds, console)
    for sentence in failed:
        console.print(f"FAILED: {sentence}")
    return 1 if failed else 0


def leaks(pools: Mapping[str, tuple[int, int, int, int]]) -> list[str]:
    """Pools that still have blocks in use although nothing is live, in words."""
    return [f"pool {name}: {used} blocks in use at the end" for name, (used, *_) in pools.items() if used]


def _verify(
    options: ReplayOptions,
    run: ReplayRun,
    make_engine: Callable[[bool], ReplayEngine],
    seconds: dict[str, float],
    console: Console,
) -> Verification:
    with _phase(seconds, "verify"):
        plain = make_engine(False)
        with _progress(console, "verify", len(run.served)) as advance:
            return verify(plain.score_with_margins, run.served, on_judged=advance)


def _write(
    options: ReplayOptions,
    out: Path,
    run: ReplayRun,
    summary: report.Summary,
    verification: Verification | None,
    failed: list[str],
    seconds: Mapping[str, float],
    console: Console,
) -> None:
    conditions = {
        "versions": setting.versions(),
        "machine": setting.machine(),
        "commit": setting.commit(),
        "checkpoint": Path(options.checkpoint).name,
        "trace": Path(options.trace).name,
        "mesh": options.mesh,
        "in_flight": options.in_flight,
        "configuration": dict(options.configuration),
    }
    report.write_json(out / JSON_NAME, run, summary, verification, failed, seconds, conditions)
    written = f"wrote {out / JSON_NAME}"
    try:
        plot.write_png(out / PNG_NAME, run, summary)
        written += f" and {out / PNG_NAME}"
    except UserError as missing:
        # The picture is an extra; its absence must not cost a long run its numbers.
        written += f" (no picture: {missing})"
    console.print(written)


def _prepare(out: Path | None) -> None:
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / JSON_NAME).open("ab"):
            pass
    except OSError as error:
        raise UserError("out", str(out), f"must be a folder that can be written ({error.strerror})") from None


@contextmanager
def _phase(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, its last state only elsewhere."""
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=total)
        yield lambda count: progress.advance(task, count)
