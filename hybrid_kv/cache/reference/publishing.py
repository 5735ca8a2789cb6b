"""Names of what a row writes: announced to later rows with its step, filed when the step is committed."""

from __future__ import annotations

from hybrid_kv.cache.reference.core import Core
from hybrid_kv.cache.reference.plan import Row, Step
from hybrid_kv.cache.reference.request import Request


def announce(core: Core, step: Step, row: Row) -> None:
    """Content that exists once this step has run, for requests admitted before it is committed."""
    if not core.rules.caching:
        return
    request = row.request
    for group in core.row_groups:
        stop = core.nameable(request, group, row.end - row.drafts)
        for name, block in core.parts(request, group, row.start // core.rules.unit, stop):
            step.pending.setdefault(name, block)
    for boundary, blocks in row.emissions:
        for group, block in zip(core.rules.geometry.recurrent, blocks, strict=True):
            state = core.state_name(request, group, boundary)
            if state and not (row.drafts or row.slack):
                step.pending.setdefault(state, block)


def publish(core: Core, request: Request) -> None:
    """File the units that are computed and have a name."""
    if not core.rules.caching:
        return
    for group in core.row_groups:
        done = core.nameable(request, group, request.computed)
        for name, block in core.parts(request, group, request.published[group], done):
            core.index.add(name, block)
        request.published[group] = max(done, request.published[group])
