"""How much of a request's prefix every group can serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference.pool import Block, Name
from hybrid_kv.cache.reference.rules import Rules
from hybrid_kv.geometry import GroupGeometry, GroupKind

Find = Callable[[Name], Block | None]


class Hit(NamedTuple):
    """tokens: served by all groups. depth: served by the append-only groups alone, at least `tokens`. reason: why it is
    not more, where that was asked."""

    tokens: int
    depth: int
    reason: Reason = Reason.NONE


def window_units(group: GroupGeometry, boundary: int, unit: int) -> range:
    """Hash units a windowed group needs so that the token at `boundary` can be computed."""
    if group.kind is GroupKind.CHUNKED_LOCAL:
        first = boundary // group.spec.window * group.spec.window
    else:
        first = max(boundary - group.spec.window + 1, 0)
    return range(first // unit, boundary // unit)


def lookup(rules: Rules, chain: Sequence[int], known: int, find: Find) -> Hit:
    """The longest hit, tried from the longest boundary down.

    chain: prefix of every unit of the request. known: its tokens; the last is never served. find: where to
    look.
    """
    unit, groups = rules.unit, rules.geometry.groups
    most = min((known - 1) // unit, len(chain))

    def has(group: int, index: int) -> bool:
        index += rules.lag(group)
        return index < len(chain) and find((group, chain[index])) is not None

    def depth(group: int) -> int:
        units = 0
        while units < most and has(group, units):
            units += 1
        return units

    def serves(group: int, units: int) -> bool:
        geometry = groups[group]
        if geometry.kind.append_only:
            return units <= depths[group]
        if geometry.kind is GroupKind.RECURRENT:
            return has(group, units - 1)
        return all(has(group, i) for i in window_units(geometry, units * unit, unit))

    def longest(among: Sequence[int], top: int) -> int:
        step = rules.geometry.hit_unit // unit
        for units in range(top // step * step, 0, -step):
            if all(serves(group, units) for group in among):
                return units
        return 0

    depths = {g: depth(g) for g in rules.geometry.attention}
    top = min([most, *depths.values()])
    everyone = range(len(groups))
    hit = longest(everyone, top)
    # Without an append-only group the first group says how much of the prefix others have shared.
    shared = top if depths else longest([0], top)
    return Hit(hit * unit, max(shared, hit) * unit)
