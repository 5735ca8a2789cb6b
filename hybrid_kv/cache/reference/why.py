"""Why a lookup served no more than it did: one `Reason`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference.core import Core
from hybrid_kv.cache.reference.lookup import Hit, window_units
from hybrid_kv.cache.reference.pool import Name
from hybrid_kv.geometry import GroupKind


def reason(core: Core, chain: Sequence[int], tokens: Sequence[int], salt: Hashable, hit: Hit) -> Reason:
    """Of a lookup that may read the cache. chain: prefixes of the units of `tokens`, as far as they are known."""
    step, most = core.rules.geometry.hit_unit, core.rules.longest_hit(len(tokens))
    if hit.tokens >= most:
        return Reason.NONE if most else Reason.GRANULARITY
    boundary = min(hit.depth, most) // step * step
    if boundary > hit.tokens:
        missing = _missing_at(core, chain, boundary)
        return Reason.EVICTED if any(name in core.index.evicted for name in missing) else Reason.NO_STATE
    if any((group, prefix) in core.index.evicted for group, prefix in _behind(core, chain, hit)):
        return Reason.EVICTED
    return Reason.SALT if not hit.depth and _under_another_salt(core, tokens, salt) else Reason.COLD


def _missing_at(core: Core, chain: Sequence[int], boundary: int) -> list[Name]:
    """Names of states and windows that resuming at a boundary would need, where nothing is filed."""
    unit, names = core.rules.unit, []
    for group, geometry in enumerate(core.rules.geometry.groups):
        if geometry.kind is GroupKind.RECURRENT:
            names.append((group, chain[boundary // unit - 1]))
        elif geometry.kind.windowed:
            units = [i + core.rules.lag(group) for i in window_units(geometry, boundary, unit)]
            names += [(group, chain[i]) for i in units if i < len(chain)]
    return [name for name in names if core.index.find(name) is None]


def _behind(core: Core, chain: Sequence[int], hit: Hit) -> list[Name]:
    """What would have had to be found next: the unit behind the hit in a group that holds all, else any state or window
    behind it."""
    first, groups = hit.depth // core.rules.unit, core.rules.geometry.groups
    if core.rules.geometry.attention:
        nexts = [(group, first + core.rules.lag(group)) for group in core.rules.geometry.attention]
        return [(group, chain[i]) for group, i in nexts if i < len(chain)]
    return [(group, prefix) for group in range(len(groups)) for prefix in chain[first:]]


def _under_another_salt(core: Core, tokens: Sequence[int], salt: Hashable) -> bool:
    """Whether a request with another salt, or none, left the beginning of these tokens."""
    rules = core.rules
    head = tokens[: (1 + rules.longest_lag) * rules.unit + rules.lookahead]
    for other in core.prefixes.salts - {salt}:
        for prefix in core.prefixes.known(head, rules.unit, rules.lookahead, other):
            if any(core.index.find((group, prefix)) for group in range(len(rules.geometry.groups))):
                return True
    return False
