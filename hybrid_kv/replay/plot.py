"""The picture of a replay: hits against the ceilings, and how full the pools were."""

from pathlib import Path

from hybrid_kv.errors import UserError
from hybrid_kv.replay.report import Summary
from hybrid_kv.replay.run import ReplayRun


def write_png(path: Path, run: ReplayRun, summary: Summary) -> None:
    """Raises UserError if matplotlib (the `plot` extra) is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plot", str(path), "install the plot extra: pip install 'hybrid-kv[plot]'") from None
    figure = Figure(figsize=(9, 8), layout="constrained")
    _draw_hits(figure.add_subplot(2, 1, 1), run, summary)
    _draw_pools(figure.add_subplot(2, 1, 2), run)
    figure.savefig(path, dpi=110)


def _draw_hits(axes, run: ReplayRun, summary: Summary) -> None:
    order = range(1, len(run.served) + 1)
    axes.bar(
        order,
        [100 * one.hit / len(one.prompt) for one in run.served],
        color="#a9c4e4",
        label="hit of this request",
    )
    cumulative, hits, tokens = [], 0, 0
    for one in run.served:
        hits, tokens = hits + one.hit, tokens + len(one.prompt)
        cumulative.append(100 * hits / tokens)
    axes.plot(order, cumulative, color="#1f4e8c", marker=".", label="all requests so far")
    bound = summary.ceilings
    for name, value, colour, dashes in (
        ("attention only", bound.attention, "#222222", "--"),
        ("prompt + turn end + branches", bound.end_turn_branch, "#b5442e", "-."),
        ("prompt end", bound.end, "#c9973b", ":"),
    ):
        axes.axhline(100 * value, color=colour, linestyle=dashes, linewidth=1.2, label=f"ceiling, {name}: {value:.1%}")
    axes.set(
        title=f"Prompt tokens taken from the cache: {summary.hit_rate:.2%}",
        xlabel="request, in the order sent",
        ylabel="% of prompt tokens",
        ylim=(0, 105),
    )
    axes.legend(loc="lower right", fontsize="small")


def _draw_pools(axes, run: ReplayRun) -> None:
    steps = [sample.step for sample in run.samples]
    for number, name in enumerate(run.samples[-1].pools):
        shares = [sample.pools[name] for sample in run.samples]
        used = [100 * used / max(total, 1) for used, _, _, total in shares]
        held = [100 * (used + cached) / max(total, 1) for used, cached, _, total in shares]
        axes.plot(steps, held, color=f"C{number}", label=f"{name}: used + cached")
        axes.plot(steps, used, color=f"C{number}", linestyle=":", label=f"{name}: used by live requests")
    axes.set(title="Pool occupancy", xlabel="engine step", ylabel="% of the pool", ylim=(0, 105))
    axes.legend(loc="upper left", fontsize="small")
