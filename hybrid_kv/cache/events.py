"""What a listener has to know to follow the cache from outside: what is filed, what is lost, and when all is forgotten.

    events, seen, lost = drain(config, state, seen)     # seen: 0 at first

Every registration of a block under a key is one `Stored`, every loss of one is one `Removed`, so a key is found as long
as more were stored than removed. No event names content that is not written: keys of a step in flight are told by its
commit. A block that takes a key over from another is told as `Removed`, then `Stored`.

A listener that was too slow has lost events; it forgets all it knows and takes `snapshot` of the same state instead.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache import index, log
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import PLACES, TOLD, CacheState
from hybrid_kv.errors import UserError
from hybrid_kv.hashing import KEY_WORDS


class Stored(NamedTuple):
    """Content of one hash unit, or the state at its end, in one block of a group.

    key: 16 bytes, as `hashing` makes them. block: id in its pool, as in `StepPlan`. unit: which key of the block it is,
    0 for a state. parent: key of the unit before, None at the beginning and where it is not known.
    """

    group: int
    key: bytes
    block: int
    unit: int
    parent: bytes | None


class Removed(NamedTuple):
    """A block of this group is no longer found under this key."""

    group: int
    key: bytes
    block: int
    unit: int


class Cleared(NamedTuple):
    """Everything was forgotten."""


Event = Stored | Removed | Cleared


class Drained(NamedTuple):
    """events: in the order they happened. seen: what to call `drain` with next time. lost: more has happened than the
    log holds, and none of it is told."""

    events: list[Event]
    seen: int
    lost: bool


def drain(config: CacheConfig, state: CacheState, seen: int) -> Drained:
    """Everything that happened since `seen`. Runs on the host and changes nothing."""
    _check(config)
    total = int(np.asarray(state.counters)[TOLD])
    fresh = (total - seen) % (1 << 32)
    if fresh > config.events:
        return Drained([], total % (1 << 32), True)
    rows = np.asarray(state.log)[(seen + np.arange(fresh)) % config.events]
    keys, parents = (rows[:, first : first + KEY_WORDS].astype("<u4") for first in (log.KEY, log.PARENT))
    known = (rows[:, log.PARENT :] > 0).sum(1).tolist()
    events = [
        _event(config, row, key.tobytes(), parent.tobytes() if some else None)
        for row, key, parent, some in zip(rows.tolist(), keys, parents, known, strict=True)
    ]
    return Drained(events, total % (1 << 32), False)


def snapshot(config: CacheConfig, state: CacheState) -> list[Stored]:
    """Everything that is filed now, in no order, but for what a step in flight has announced. Runs on the host."""
    _check(config)
    names = np.asarray(state.blocks)[:, PLACES:]
    units = jnp.arange(names.shape[1])
    pending = np.asarray(index.pending(state, jnp.arange(names.shape[0])[:, None], units))
    block, unit = np.nonzero((names > 0) & ~pending)
    places, groups = np.divmod(names[block, unit] - 1, index.groups_of(state))
    keys = np.asarray(state.entries)[places, :KEY_WORDS].astype("<u4")
    found = zip(groups.tolist(), keys, block.tolist(), unit.tolist(), strict=True)
    return [Stored(group, key.tobytes(), at - config.offset(group), nth, None) for group, key, at, nth in found]


def _check(config: CacheConfig) -> None:
    if not config.events:
        raise UserError("events", 0, "this configuration keeps no log: give it a number of entries")


def _event(config: CacheConfig, row: list[int], key: bytes, parent: bytes | None) -> Event:
    kind, group, block, unit = row[: log.KEY]
    if kind == log.CLEARED:
        return Cleared()
    block -= config.offset(group)
    return Stored(group, key, block, unit, parent) if kind == log.STORED else Removed(group, key, block, unit)
