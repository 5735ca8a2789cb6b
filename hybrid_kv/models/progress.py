"""How far a load is: a bar where somebody looks at a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# progress(done, total), both in bytes.
Report = Callable[[int, int], None]


@contextmanager
def reporting(progress: Report | None, title: str) -> Iterator[Report]:
    """The given callback; for None a bar on stderr if that is a terminal, which goes when the work is done."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _silent(done: int, total: int) -> None:
    """Nobody looks."""
