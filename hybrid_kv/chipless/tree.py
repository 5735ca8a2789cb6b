"""Loops and skippable regions of a schedule, and what each of them costs.

A branch backwards closes a loop, a branch forwards skips a region. Trip counts are filled in where the exit test is
a constant; the replay knows the rest. A Pallas grid of N steps is one loop of N + 2 (two stages of the block
pipeline), its body a region that N of them enter.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hybrid_kv.chipless.schedule import Schedule

Span = tuple[int, int]  # half-open range of bundles


@dataclass
class Region:
    """A part of a kernel.

    Attributes:
      kind: "kernel", "loop" or "branch" (skipped or entered).
      span: its bundles.
      label: path such as "L1.C2", the second branch inside the first loop.
      trips: iterations of a loop, or how often a branch is entered per run of its surroundings; None if unknown.
      why: the condition as the compiler wrote it.
    """

    kind: str
    span: Span
    label: str = ""
    trips: float | None = None
    why: str = ""
    inner: list["Region"] = field(default_factory=list)

    @property
    def own(self) -> list[Span]:
        """Bundles that belong to no inner region."""
        spans, at = [], self.span[0]
        for region in self.inner:
            spans.append((at, region.span[0]))
            at = region.span[1]
        spans.append((at, self.span[1]))
        return [(low, high) for low, high in spans if high > low]

    @property
    def cycles(self) -> float:
        """Cycles with the trip counts known; unknown ones count once."""
        own = sum(high - low for low, high in self.own)
        return (own + sum(region.cycles for region in self.inner)) * (1.0 if self.trips is None else self.trips)

    def walk(self) -> Iterator["Region"]:
        yield self
        for region in self.inner:
            yield from region.walk()


_BRANCH = re.compile(r"sbr\.(?:rel|abs)\s*(?:\((!?)%(p\d+)_\w+\))?\s*target bundleno = (\d+)")
_PREDICATE = r"(?:\(!?%p\d+_\w+\),\s*)?"
_COMPARE = re.compile(r"scmp\.(\w+)\.s32\.totalorder\s+" + _PREDICATE + r"(\S+),\s*(\S+)")
_ADD = re.compile(r"sadd\.s32\s+" + _PREDICATE + r"(\d+),\s*%(s\d+)_")
_MOVE = re.compile(r"smov\.u32\s+" + _PREDICATE + r"(\S+)$")


def _definitions(schedule: Schedule) -> dict[str, str]:
    defined = {}
    for bundle in schedule.bundles:
        for operation in bundle.operations:
            if match := re.match(r"%([sp]\d+)_\w+ = (.*)", operation, re.S):
                defined[match.group(1)] = match.group(2)
    return defined


def _constant(defined: Mapping[str, str], text: str, depth: int = 8) -> int | None:
    """The literal that a chain of moves leads to."""
    text = text.strip()
    if re.fullmatch(r"-?\d+", text):
        value = int(text)
        return value - (1 << 32) if value >= 1 << 31 else value
    register = re.match(r"%(s\d+)_", text)
    if not register or depth == 0:
        return None
    move = _MOVE.match(defined.get(register.group(1), "").strip())
    return _constant(defined, move.group(1), depth - 1) if move else None


def _trip_count(defined: Mapping[str, str], predicate: str, negated: bool) -> tuple[int | None, str]:
    """Iterations of a loop that is left by a comparison of its counter with a constant, and the comparison."""
    text = defined.get(predicate, "")
    compare = _COMPARE.match(text)
    if not compare:
        return None, text[:60]
    relation, left, right = compare.groups()
    bound = _constant(defined, right)
    why = f"{relation} {right if bound is None else bound}"
    counter = re.match(r"%(s\d+)_", left)
    add = _ADD.match(defined.get(counter.group(1), "")) if counter else None
    if add is None or bound is None or not negated or relation not in ("ge", "gt"):
        return None, why
    step = int(add.group(1))
    phi = re.match(r"sphi\s+(\S+?),", defined.get(add.group(2), ""))
    first = _constant(defined, phi.group(1)) if phi else None
    if first is None:
        # The counter of an outer pipeline often starts through a spill.
        return None, f"{why} step {step} from ?"
    trips = -(-(bound + (relation == "gt") - first) // step)
    return max(trips, 1), f"{why} step {step} from {first}"


def region_tree(schedule: Schedule, branch_delay: int) -> Region:
    """The kernel as nested regions."""
    defined, end = _definitions(schedule), len(schedule.bundles)
    regions: list[Region] = []
    for bundle in schedule.bundles:
        for operation in bundle.operations:
            branch = _BRANCH.search(operation)
            if not branch:
                continue
            negated, predicate, target = branch.group(1) == "!", branch.group(2), int(branch.group(3))
            behind = bundle.index + branch_delay + 1
            if target <= bundle.index:
                trips, why = _trip_count(defined, predicate, negated) if predicate else (None, "always")
                regions.append(Region("loop", (target, min(behind, end)), trips=trips, why=why))
            elif target > behind:
                condition = re.sub(r"_p\d+|_s\d+", "", defined.get(predicate, "")) if predicate else ""
                why = ("if " if negated else "unless ") + condition[:70]
                regions.append(Region("branch", (behind, target), trips=1.0, why=why))
    regions.sort(key=lambda r: (r.span[0], -r.span[1], r.kind != "loop"))
    kernel = Region("kernel", (0, end), trips=1.0)
    path = [kernel]
    for region in regions:
        low, high = region.span
        while not (path[-1].span[0] <= low and high <= path[-1].span[1]):
            if low < path[-1].span[1] < high and len(path) > 1:
                high = path[-1].span[1]  # a branch out of its surroundings, to a shared tail
                break
            path.pop()
        if high > low:
            region.span = (low, high)
            path[-1].inner.append(region)
            path.append(region)
    _label(kernel, "")
    return kernel


def _label(region: Region, prefix: str) -> None:
    count: Counter[str] = Counter()
    for inner in region.inner:
        letter = "L" if inner.kind == "loop" else "C"
        count[letter] += 1
        inner.label = f"{prefix}{letter}{count[letter]}"
        _label(inner, inner.label + ".")


@dataclass(frozen=True)
class Contents:
    """What lies in some spans of a schedule, each bundle once.

    Attributes:
      cycles: bundles.
      empty: bundles without an instruction: latency that nothing covers.
      slots: unit slots used (`schedule.UNIT_NAMES`).
      copies: DMAs started, by direction.
      waits: waits on DMAs.
      scalar_spills: loads and stores of spilled scalars.
    """

    cycles: int
    empty: int
    slots: Counter[str]
    copies: Counter[str]
    waits: int
    scalar_spills: int


_COPY = re.compile(r"= dma\.(\w+)(?:\s|$)")


def contents(schedule: Schedule, spans: list[Span]) -> Contents:
    """Counts over these spans."""
    copies: Counter[str] = Counter()
    empty = waits = scalar_spills = 0
    for low, high in spans:
        for bundle in schedule.bundles[low:high]:
            empty += not bundle.operations
            for operation in bundle.operations:
                if copy := _COPY.search(operation):
                    if copy.group(1) != "done":
                        copies[copy.group(1)] += 1
                elif "dma.done.wait" in operation:
                    waits += 1
                if "_spill]" in operation and re.search(r"\b(sst|sld) ", operation):
                    scalar_spills += 1
    cycles = sum(high - low for low, high in spans)
    return Contents(cycles, empty, schedule.slots(spans), copies, waits, scalar_spills)
