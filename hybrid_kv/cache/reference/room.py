"""Blocks a request needs to be computed up to some token, and taking them."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_kv.cache.reference.core import Core
from hybrid_kv.cache.reference.pool import Block
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.cache.reference.rules import Rules
from hybrid_kv.geometry import GroupGeometry, GroupKind


def need(core: Core, request: Request, end: int, adopted: Sequence[dict[int, Block]] = (), hit: int = 0) -> list[int]:
    """New blocks every pool must give so that the request can be computed up to `end` tokens.

    adopted: blocks of a hit of `hit` tokens that it would begin with, per group.
    """
    count = [0] * len(core.pools)
    end = reach(core.rules, request, end)
    for group, geometry in enumerate(core.rules.geometry.groups):
        pool = core.rules.group_pool[group]
        table = adopted[group] if adopted else request.tables[group]
        if adopted:
            count[pool] += len({block for block in table.values() if not block.holders})
        if geometry.kind is GroupKind.RECURRENT:
            count[pool] += 1 if adopted or not table else 0
            continue
        start = hit if adopted else request.computed
        held = set(table)
        if adopted and hit % geometry.block:
            held.discard(hit // geometry.block)  # shared, so it is copied
        fresh = sum(column not in held for column in range(start // geometry.block, geometry.columns(end)))
        count[pool] += min(fresh, most_at_once(core.rules, geometry)) if geometry.kind.windowed else fresh
    return count


def take(core: Core, request: Request, end: int) -> None:
    """Take the blocks that rows up to `end` are written to."""
    for group, geometry in enumerate(core.rules.geometry.groups):
        pool, table = core.pool(group), request.tables[group]
        if geometry.kind is GroupKind.RECURRENT:
            if not table:
                table[0] = pool.take()
            continue
        upto = geometry.columns(reach(core.rules, request, end))
        for column in range(request.computed // geometry.block, upto):
            if column not in table:
                table[column] = pool.take()


def reach(rules: Rules, request: Request, end: int) -> int:
    """The token up to which blocks are taken. None for the last of the longest answer, which is never computed, nor
    beyond it: rows there are drafts nobody keeps."""
    longest = request.prompt + request.answer - 1
    return min(min(end, longest) + rules.slots_ahead, rules.max_context)


def most_at_once(rules: Rules, geometry: GroupGeometry) -> int:
    """Blocks a windowed group holds at most: a prompt longer than its window gives them back as it goes, once the
    steps that write and read them have been committed."""
    flying = rules.steps_in_flight * rules.token_budget
    return geometry.columns(geometry.spec.window - 1 + flying + rules.slots_ahead) + 1
