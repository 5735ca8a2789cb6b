"""Schedules and replays as text."""

from typing import Any

from hybrid_kv.chipless.replay import Run
from hybrid_kv.chipless.schedule import UNIT_NAMES, Schedule
from hybrid_kv.chipless.targets import Chip
from hybrid_kv.chipless.tree import Contents, Region, contents, region_tree

_SHOWN = {
    "MATMUL": "MXU", "MATPUSH": "PUSH", "XLU": "XLU", "VALU": "VALU", "EUP": "EUP", "VLOAD": "VLD", "VSTORE": "VST",
    "SALU": "SALU",
}  # fmt: skip


def _shares(schedule: Schedule, found: Contents) -> dict[str, float]:
    """Share of its slots that each unit uses; empty if not dumped."""
    return {
        name: found.slots[name] / (capacity * max(found.cycles, 1))
        for name, capacity in zip(UNIT_NAMES, schedule.capacity, strict=False)
        if capacity and schedule.units
    }


def tree_text(schedule: Schedule, chip: Chip, least_cycles: int = 1) -> str:
    """The loop tree of a kernel: cycles, unit shares, spills and copies of each region of at least so many bundles."""
    lines = [
        f"{schedule.name}: {len(schedule.bundles)} bundles, {schedule.code_bundles or '?'} as stored, "
        f"{schedule.spills} spills; {chip.name}: {chip.macs} bf16 MAC/cycle, {chip.hbm_bytes_per_cycle:.0f} HBM B/cycle"
    ]
    if schedule.moved_to_vmem:
        moved = " ".join(f"{o.index}:{o.shape}" for o in schedule.moved_to_vmem)
        lines.append(f"  already in vector memory, so their HBM traffic is outside this kernel: {moved}")
    heads = " ".join(f"{name:>4}" for name in _SHOWN.values())
    lines.append(
        f"  {'region':<24}{'at':>14}{'bundles':>9}{'trips':>7}{'cycles':>10} | {heads} | gaps spill fill copies"
    )

    def show(region: Region, depth: int) -> None:
        found = contents(schedule, [region.span])
        if found.cycles < least_cycles:
            return
        shares = _shares(schedule, found)
        share = " ".join(f"{shares[n]:4.0%}" if n in shares else "   -" for n in _SHOWN)
        copies = ",".join(f"{count}x{direction}" for direction, count in sorted(found.copies.items()))
        trips = "?" if region.trips is None else f"{region.trips:g}"
        place = f"{region.span[0]:x}-{region.span[1]:x}"
        name = " " * depth + (region.label or "kernel")
        why = f" [{region.why}]" if region.why else ""
        spills = f"{found.slots['VSTORE:SPILL']:>5} {found.slots['VLOAD:FILL']:>4}"
        lines.append(
            f"  {name:<24}{place:>14}{found.cycles:>9}{trips:>7}{region.cycles:>10.0f} | {share} | "
            f"{found.empty / max(found.cycles, 1):4.0%} {spills} {copies}{why}"
        )
        for inner in region.inner:
            show(inner, depth + 1)

    show(region_tree(schedule, chip.branch_delay), 0)
    return "\n".join(lines)


def hottest(schedule: Schedule, chip: Chip, run: Run, most: int = 10) -> list[dict[str, Any]]:
    """The regions in which most bundles of a replay issued, inner regions excluded."""
    rows: list[dict[str, Any]] = []
    for region in region_tree(schedule, chip.branch_delay).walk():
        spans = region.own
        issued = sum(sum(run.visits[low:high]) for low, high in spans)
        used = dict.fromkeys(UNIT_NAMES, 0)
        for low, high in spans:
            for index in range(low, high):
                for name, slots in zip(UNIT_NAMES, schedule.units[index] if schedule.units else (), strict=False):
                    used[name] += slots * run.visits[index]
        busy = {
            name: round(used[name] / (capacity * issued), 2)
            for name, capacity in zip(UNIT_NAMES, schedule.capacity, strict=False)
            if capacity and issued and used[name]
        }
        entered = run.visits[spans[0][0]] if spans else 0
        rows.append({"region": region.label or "kernel", "entered": entered, "issued": issued, "busy": busy})
    return sorted(rows, key=lambda row: -int(row["issued"]))[:most]


def run_text(run: Run) -> str:
    """A replay in a few lines."""
    units = " ".join(f"{_SHOWN[n]} {share:.0%}" for n, share in run.busy.items() if n in _SHOWN)
    copies = ", ".join(f"{t.count} {direction} ({t.bytes:,} bytes)" for direction, t in sorted(run.copies.items()))
    lines = [
        f"  {run.cycles:,.0f} cycles, {run.issued:,} issued, {run.stalled:,.0f} waiting for copies",
        f"  busy: {units}",
        f"  copies: {copies}; HBM {run.hbm_busy / max(run.cycles, 1):.0%} of the time",
    ]
    lines += [f"  GUESSED: {what} ({count}x)" for what, count in run.warnings.items()]
    return "\n".join(lines)
