"""Measures cases: compile, read the schedule, replay it with the case's own scalars.

The compiler reads its flags once and must not be forked, so each chip gets a worker, a fresh process that prints a
line of JSON for each case (`python -m hybrid_kv.chipless.measure KERNEL CHIP [CASE ...]`), or with `--composite` for
each of what is measured in parts.
"""

import itertools
import json
import operator
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid_kv.chipless.cases import Case, Composite, cases_of, composites_of
from hybrid_kv.chipless.compile import compile_for, refusal
from hybrid_kv.chipless.estimates import estimated_cycles
from hybrid_kv.chipless.operands import KernelCall, kernel_calls
from hybrid_kv.chipless.replay import Run, replay
from hybrid_kv.chipless.report import hottest, run_text, tree_text
from hybrid_kv.chipless.schedule import Schedule, read_dump
from hybrid_kv.chipless.targets import chip_named, prepare_environment
from hybrid_kv.errors import UserError


@dataclass(frozen=True)
class Measurement:
    """A case on a chip, summed over the kernels it calls. Cycles are the compiler's, not a chip's.

    Attributes:
      error: what the compiler refused; everything after it is then 0 or empty.
      cycles, issued, stalled: of the replay (`replay.Run`).
      bundles, spills, vmem_bytes: of the schedules; vector memory of the largest kernel.
      limit, limit_unit: fewest possible cycles and the unit that says so.
      allowed_cycles, allowed_bundles: what the test lets pass; 0 if nothing is stored.
      per: what `cycles_each` is counted for.
      busy: share of all cycles by unit, over all kernels.
      moved_to_vmem: operands whose HBM traffic is not in the kernels.
      guessed: warnings of the replay; empty for figures to rely on.
      details: loop trees and replays as text, if asked for.
    """

    kernel: str
    case: str
    chip: str
    error: str = ""
    seconds: float = 0.0
    cycles: int = 0
    issued: int = 0
    stalled: int = 0
    bundles: int = 0
    spills: int = 0
    vmem_bytes: int = 0
    hbm_bytes: int = 0
    limit: float = 0.0
    limit_unit: str = ""
    allowed_cycles: int = 0
    allowed_bundles: int = 0
    cycles_each: float = 0.0
    per: str = "call"
    busy: dict[str, float] | None = None
    moved_to_vmem: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()
    details: str = ""

    @property
    def share_of_limit(self) -> float:
        """1 for a kernel that could not be faster."""
        return self.limit / self.cycles if self.cycles else 0.0

    @property
    def too_slow(self) -> list[str]:
        """What is over its stored limit, or not to be relied on; empty if all is well."""
        found = [self.error] if self.error else []
        found += [f"guessed: {what}" for what in self.guessed]
        for name, value, allowed in (
            ("cycles", self.cycles, self.allowed_cycles),
            ("bundles", self.bundles, self.allowed_bundles),
        ):
            if allowed and value > allowed:
                found.append(f"{name}: {value:,} > {allowed:,}")
        return found


@dataclass(frozen=True)
class Sum:
    """A composite on a chip.

    Attributes:
      parts: cycles by what they are for; kernels replayed, what begins with "XLA" estimated by it.
      limit, limit_unit: of the whole.
    """

    kernel: str
    composite: str
    chip: str
    error: str = ""
    parts: dict[str, int] | None = None
    limit: float = 0.0
    limit_unit: str = ""

    @property
    def cycles(self) -> int:
        return sum((self.parts or {}).values())

    @property
    def share_of_limit(self) -> float:
        return self.limit / self.cycles if self.cycles else 0.0


def _schedules_of(calls: list[KernelCall], dumped: list[Schedule]) -> Iterator[tuple[KernelCall, Schedule]]:
    """Pairs each call with its schedule. The compiler adds a number to the name, and compiles equal calls once."""
    by_name: dict[str, list[Schedule]] = defaultdict(list)
    for schedule in dumped:
        by_name[schedule.name.split(".")[0]].append(schedule)
    for call in calls:
        found = by_name.get(call.name, [])
        if not found:
            raise UserError(
                "kernel", call.name or "(no name)", "no schedule of it was written; give pallas_call a name"
            )
        yield call, found.pop(0) if len(found) > 1 else found[0]


def measure(kernel: str, case: Case, chip: str, folder: Path, details: bool = False) -> Measurement:
    """Measure one case in this process, into whose `folder` the compiler writes; what is in it is removed."""
    target, problem = chip_named(chip), case.build()
    for old in folder.iterdir():
        old.unlink()
    try:
        compiled = compile_for(chip, problem.function, *problem.arguments, donate=problem.donate)
    except Exception as error:  # the compiler raises many kinds; the text says which
        return Measurement(kernel, case.name, chip, error=refusal(error))
    calls = kernel_calls(chip, problem.function, *problem.arguments)
    if not calls:
        raise UserError("case", f"{kernel} {case.name}", "it calls no Pallas kernel outside of loops")
    pairs = list(_schedules_of(calls, read_dump(folder)))
    runs = [replay(schedule, target, call.scalars) for call, schedule in pairs]
    schedules = [schedule for _, schedule in pairs]
    cycles = sum(run.cycles for run in runs)
    limit = target.limit(problem.hbm_bytes, problem.macs)
    count, per = problem.per
    text = "\n".join(_details(s, run, chip) for s, run in zip(schedules, runs, strict=True)) if details else ""
    return Measurement(
        kernel,
        case.name,
        chip,
        seconds=round(compiled.seconds, 2),
        cycles=round(cycles),
        issued=sum(run.issued for run in runs),
        stalled=round(sum(run.stalled for run in runs)),
        bundles=sum(len(schedule.bundles) for schedule in schedules),
        spills=sum(schedule.spills for schedule in schedules),
        vmem_bytes=max(schedule.vmem_bytes for schedule in schedules),
        hbm_bytes=sum(run.hbm_bytes for run in runs),
        limit=round(limit.cycles, 1),
        limit_unit=limit.unit,
        allowed_cycles=case.cycles.get(chip, 0),
        allowed_bundles=case.bundles.get(chip, 0),
        cycles_each=round(cycles / count, 2),
        per=per,
        busy={unit: round(sum(r.busy.get(unit, 0) * r.cycles for r in runs) / cycles, 3) for unit in runs[0].busy},
        moved_to_vmem=tuple(f"{s.name} {o.index}:{o.shape}" for s in schedules for o in s.moved_to_vmem),
        guessed=tuple(f"{what} ({times}x)" for run in runs for what, times in run.warnings.items()),
        details=text,
    )


def _details(schedule: Schedule, run: Run, chip: str) -> str:
    target = chip_named(chip)
    hot = [f"  {row}" for row in hottest(schedule, target, run)]
    return "\n".join([tree_text(schedule, target), run_text(run), *hot])


def add_up(
    kernel: str, composite: Composite, chip: str, folder: Path, known: dict[str, Measurement] | None = None
) -> Sum:
    """Measure a composite in this process; `folder` as for `measure`, `known` are cases measured already, added to."""
    known = {} if known is None else known
    target, problem = chip_named(chip), composite.build()
    try:
        compiled = compile_for(chip, problem.function, *problem.arguments, donate=problem.donate)
    except Exception as error:  # the compiler raises many kinds; the text says which
        return Sum(kernel, composite.name, chip, error=refusal(error))
    estimates = estimated_cycles(compiled.executable.as_text())
    names = ["outside of loops", *(f"each {name}" for name, _ in composite.loops)]
    trips = [1, *itertools.accumulate((count for _, count in composite.loops), operator.mul)]
    parts = {
        f"XLA, {name} ({count} x)": count * cycles
        for name, count, cycles in zip(names, trips, estimates, strict=True)
    }  # fmt: skip
    if composite.moved:
        parts["moved between kernels"] = round(composite.moved / target.hbm_bytes_per_cycle)
    cases = {case.name: case for case in cases_of(kernel)}
    for name, count in composite.kernels:
        if name not in known:
            known[name] = measure(kernel, cases[name], chip, folder)
        found = known[name]
        if found.error or found.guessed:
            return Sum(kernel, composite.name, chip, error=found.error or f"guessed: {found.guessed[0]}")
        parts[f"{name} ({count:g} x)"] = round(count * found.cycles)
    limit = target.limit(problem.hbm_bytes, problem.macs)
    return Sum(kernel, composite.name, chip, "", parts, round(limit.cycles, 1), limit.unit)


def measure_on(kernel: str, chip: str, names: tuple[str, ...] = (), details: bool = False) -> list[Measurement]:
    """Measure cases of a kernel on a chip in a worker process.

    Args:
      names: cases; all that have limits for the chip if empty.

    Raises:
      UserError: unknown kernel or chip.
      RuntimeError: the worker died; the message has the end of what it wrote.
    """
    chip_named(chip), cases_of(kernel)
    rows = _from_worker([kernel, chip, *names, *["--details"] * details])
    for row in rows:
        row["moved_to_vmem"], row["guessed"] = tuple(row["moved_to_vmem"]), tuple(row["guessed"])
    return [Measurement(**row) for row in rows]


def add_up_on(kernel: str, chip: str, names: tuple[str, ...] = ()) -> list[Sum]:
    """Measure composites of a kernel on a chip, all that are for it if no names are given, in a worker process.

    Raises:
      UserError, RuntimeError: as `measure_on`.
    """
    chip_named(chip), composites_of(kernel)
    return [Sum(**row) for row in _from_worker([kernel, chip, *names, "--composite"])]


def _from_worker(arguments: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "hybrid_kv.chipless.measure", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring {' on '.join(arguments[:2])} failed\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _worker(arguments: list[str]) -> None:
    options = {a for a in arguments if a.startswith("--")}
    kernel, chip, *names = (a for a in arguments if a not in options)
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        prepare_environment(folder)
        if "--composite" in options:
            known: dict[str, Measurement] = {}
            for composite in composites_of(kernel):
                if chip in composite.chips and (composite.name in names or not names):
                    print(json.dumps(asdict(add_up(kernel, composite, chip, Path(folder), known))), flush=True)
            return
        for case in cases_of(kernel):
            if case.name in names if names else chip in case.chips:
                found = measure(kernel, case, chip, Path(folder), "--details" in options)
                print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    _worker(sys.argv[1:])
