"""The numbers of a replay: one summary, one JSON object, one printed page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid_kv.replay.contract import StatsLike
from hybrid_kv.replay.run import ReplayRun, Served
from hybrid_kv.replay.verify import Mismatch, Verification
from hybrid_kv.simulate.ceilings import Ceilings, ceilings

# Lines of the printed page's lists; the JSON has all of them.
SHOWN = 8


@dataclass(frozen=True)
class Summary:
    """Shares are 0 to 1 of all prompt tokens; counts are of this replay only, warm-up left out."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    hit_rate: float
    ceilings: Ceilings
    tokens_prefilled: int
    tokens_saved: int
    checkpoints: int
    checkpoints_per_1k_prefilled: float
    evictions: int
    preemptions: int
    steps: int
    prefill_splits: int
    compilations_after_warm_up: int


def summarise(run: ReplayRun, before: StatsLike, after: StatsLike, grid: int) -> Summary:
    """before, after: the engine's counters around the run. grid: tokens, the granularity of the ceilings."""
    served = run.served
    prompt_tokens = sum(len(one.prompt) for one in served)
    prefilled = after.tokens_prefilled - before.tokens_prefilled
    checkpoints = after.checkpoints - before.checkpoints
    return Summary(
        requests=len(served),
        prompt_tokens=prompt_tokens,
        answer_tokens=sum(len(one.answer) for one in served),
        hit_rate=sum(one.hit for one in served) / prompt_tokens,
        ceilings=ceilings([(one.prompt, one.answer) for one in served], grid),
        tokens_prefilled=prefilled,
        tokens_saved=after.tokens_saved - before.tokens_saved,
        checkpoints=checkpoints,
        checkpoints_per_1k_prefilled=1000 * checkpoints / max(prefilled, 1),
        evictions=after.evictions - before.evictions,
        preemptions=after.preemptions - before.preemptions,
        steps=after.steps - before.steps,
        prefill_splits=len(run.splits),
        compilations_after_warm_up=after.compilations_after_warm_up,
    )


def failures(summary: Summary, verification: Verification | None, broken: Sequence[str]) -> list[str]:
    """What makes a replay fail (exit code 1), one sentence each; empty if it passed."""
    found = [f"broken invariant: {sentence}" for sentence in broken]
    if summary.compilations_after_warm_up:
        found.append(f"{summary.compilations_after_warm_up} compilations after warm-up; there must be none")
    if verification is not None and not verification.passed:
        after_ties = len(verification.expert_ties)
        differ = len(verification.mismatches) + after_ties
        found.append(f"{differ} tokens differ from the run without the cache, {after_ties} of them after an expert tie")
    return found


def request_rows(served: Sequence[Served]) -> list[dict[str, Any]]:
    """One JSON object a request, in the order sent. Lengths and positions in tokens, times in seconds."""
    return [
        {
            "index": one.index,
            "session": one.session,
            "prompt_tokens": len(one.prompt),
            "answer_tokens": len(one.answer),
            "answer": one.answer.tolist(),
            "hit": one.hit,
            "reason": one.reason,
            "prefill_chunks": len(one.chunks),
            "chunk_ends": list(one.chunks),
            "checkpoints": list(one.checkpoints),
            "preemptions": one.preemptions,
            "sent_at": round(one.sent_at, 3),
            "ended_at": round(one.ended_at, 3),
        }
        for one in served
    ]


def write_json(
    path: Path,
    run: ReplayRun,
    summary: Summary,
    verification: Verification | None,
    failed: Sequence[str],
    seconds: Mapping[str, float],
    setting: Mapping[str, Any],
) -> None:
    """seconds: wall time of each phase. setting: versions, machine, commit, mesh, configuration, trace."""
    report = {
        **setting,
        "passed": not failed,
        "failures": list(failed),
        "summary": asdict(summary),
        "verification": None if verification is None else asdict(verification),
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
        "requests": request_rows(run.served),
        "pools": [{"step": sample.step, **sample.pools} for sample in run.samples],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def print_requests(console: Console, served: Sequence[Served]) -> None:
    table = Table(title="requests, in the order sent (tokens)")
    for name in ("request", "session", "prompt", "answer", "hit", "hit %", "chunks", "checkpoints"):
        table.add_column(name, justify="right")
    table.add_column("reason for what was not hit")
    for one in served:
        table.add_row(
            str(one.index),
            one.session,
            f"{len(one.prompt):,}",
            str(len(one.answer)),
            f"{one.hit:,}",
            f"{100 * one.hit / len(one.prompt):.1f}",
            str(len(one.chunks)),
            str(len(one.checkpoints)),
            one.reason,
        )
    console.print(table)


def print_summary(
    console: Console, summary: Summary, verification: Verification | None, seconds: Mapping[str, float]
) -> None:
    bound = summary.ceilings
    rows = [
        ("prompt tokens, answer tokens", f"{summary.prompt_tokens:,}, {summary.answer_tokens:,}"),
        ("hit rate", f"{summary.hit_rate:.2%}"),
        (f"  ceiling, attention only, at {bound.grid} tokens", f"{bound.attention:.2%}"),
        ("  ceiling, state at prompt end", f"{bound.end:.2%}"),
        ("  ceiling, + at turn end", f"{bound.end_turn:.2%}"),
        ("  ceiling, + at branches", f"{bound.end_turn_branch:.2%}"),
        ("tokens prefilled, saved", f"{summary.tokens_prefilled:,}, {summary.tokens_saved:,}"),
        (
            "checkpoints, per 1k prefilled tokens",
            f"{summary.checkpoints}, {summary.checkpoints_per_1k_prefilled:.2f}",
        ),
        ("evictions, preemptions", f"{summary.evictions}, {summary.preemptions}"),
        ("steps", f"{summary.steps:,}"),
        ("prefills split for a checkpoint", str(summary.prefill_splits)),
        ("compilations after warm-up", str(summary.compilations_after_warm_up)),
        ("seconds", ", ".join(f"{phase} {value:.1f}" for phase, value in seconds.items())),
    ]
    table = Table(title=f"replay of {summary.requests} requests", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if verification is not None:
        print_verification(console, verification)


def print_verification(console: Console, verification: Verification) -> None:
    console.print(
        f"verify: {verification.requests} answers of {verification.tokens:,} tokens against the run without "
        f"the cache ({verification.sequences_scored} sequences, {verification.tokens_scored:,} tokens "
        f"scored): {len(verification.mismatches)} wrong, {len(verification.ties)} near ties, "
        f"{len(verification.expert_ties)} after an expert tie"
    )
    _print_list(console, "near tie", verification.ties)
    _print_list(console, "expert tie", verification.expert_ties)
    _print_list(console, "wrong", verification.mismatches)


def _print_list(console: Console, word: str, found: Sequence[Mismatch]) -> None:
    for one in found[:SHOWN]:
        console.print(
            f"  {word}: request {one.index}, answer token {one.offset}: served {one.served}, "
            f"plain run {one.plain}, {one.margin:.2e} apart (experts {one.expert_margin:.2e})"
        )
    if len(found) > SHOWN:
        console.print(f"  ... and {len(found) - SHOWN} more")
