"""Measurements as text, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hybrid_kv.errors import UserError
from hybrid_kv.simulate.benchmark.measures import Line


def as_text(line: Line) -> str:
    """What, groups, measured, bar, whether it holds, and what else there is."""
    groups = f"  [{line.recurrent} recurrent]" if line.recurrent else ""
    bar = "" if line.bar is None else f"  bar {'>=' if line.at_least else '<='} {line.bar:g}"
    held = {None: "", True: "  holds", False: "  MISSED"}[line.holds]
    more = ", ".join(f"{name} {value}" for name, value in line.more.items())
    return f"{line.what}{groups}: {line.measured:.3f} {line.unit}{bar}{held}" + (f"  ({more})" if more else "")


def as_json(line: Line) -> str:
    """One object: what, recurrent, measured, unit, bar, at_least, more, holds."""
    return json.dumps({**line._asdict(), "measured": round(line.measured, 4), "holds": line.holds})


def write_png(path: Path, lines: Sequence[Line]) -> None:
    """One panel for each unit that measurements are in, bars as marks. Raises UserError if matplotlib (the `plot`
    extra) is not installed, or without a measurement."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plot", str(path), "install the plot extra: pip install 'hybrid-kv[plot]'") from None
    units = sorted({line.unit for line in lines})
    if not units:
        raise UserError("plot", str(path), "measure something to draw")
    parts = [[line for line in lines if line.unit == unit] for unit in units]
    figure = Figure(figsize=(11, 1.2 * len(units) + 0.32 * len(lines)), layout="constrained")
    panels = figure.subplots(len(units), 1, squeeze=False, height_ratios=[len(part) + 1 for part in parts])
    for axes, unit, part in zip(panels[:, 0], units, parts, strict=True):
        _draw(axes, unit, part)
    figure.savefig(path, dpi=110)


def _draw(axes, unit: str, lines: Sequence[Line]) -> None:
    colours = {0: "#7a7a7a", 1: "#a9c4e4", 3: "#1f4e8c"}
    names = [f"{line.what}, {line.recurrent} recurrent" if line.recurrent else line.what for line in lines]
    at = range(len(lines))
    axes.barh(at, [line.measured for line in lines], color=[colours.get(line.recurrent, "#5b84b8") for line in lines])
    for place, line in enumerate(lines):
        axes.annotate(f" {line.measured:.3g}", (line.measured, place), va="center", fontsize="small")
        if line.bar is not None:
            axes.plot([line.bar] * 2, [place - 0.45, place + 0.45], color="#b5442e", linewidth=2)
    axes.set_yticks(at, names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} (red: the bar)" if any(line.bar is not None for line in lines) else unit)
    axes.margins(x=0.1)
