"""A listener that follows a compiled core by its events alone, and is held to what is filed and what is written."""

from __future__ import annotations

import collections

import numpy as np

from hybrid_kv.cache import events, index
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.drafts import Draft
from hybrid_kv.cache.state import DONE, OWNERS, PENDING_FROM, PENDING_STEP, PLACES, CacheState
from hybrid_kv.hashing import KEY_WORDS


class Listener:
    """known: names that were stored and not removed, with their blocks and units. rows, states: what the make-believe
    device holds, by group and block."""

    def __init__(self, config: CacheConfig, rows: list[dict], states: list[dict]) -> None:
        self.config, self.rows, self.states = config, rows, states
        self.known: collections.Counter[tuple] = collections.Counter()
        self.counts: collections.Counter[str] = collections.Counter()
        self._seen = 0
        # By key: units of its prefix, the key before, and the tags of the prefixes of its tokens.
        self._meaning: dict[bytes, tuple[int, bytes | None, list[int]]] = {}

    def learn(self, chain: np.ndarray, tags: list[int]) -> None:
        """The keys of some tokens stand for their prefixes; tags: of every length."""
        before = None
        for units, words in enumerate(chain, 1):
            key = words.astype("<u4").tobytes()
            self._meaning.setdefault(key, (units, before, tags))
            before = key

    def follow(self, state: CacheState) -> None:
        """Take what has happened; fails where it names what is not written, or leads to other names than there are."""
        told, self._seen, lost = events.drain(self.config, state, self._seen)
        assert not lost
        for event in told:
            self.counts[type(event).__name__] += 1
            if isinstance(event, events.Cleared):
                self.known.clear()
                continue
            self.known[event[:4]] += 1 if isinstance(event, events.Stored) else -1
            assert self.known[event[:4]] in (0, 1), event
            if isinstance(event, events.Stored):
                self._look_at(event)
        assert +self.known == filed(self.config, state), "events tell of other names than there are"

    def _look_at(self, event: events.Stored) -> None:
        config, geometry = self.config, self.config.group(event.group)
        units, before, tags = self._meaning[event.key]
        first = units - 1 - config.lag(event.group)
        assert event.parent == (before if first else None)
        if event.group in config.geometry.recurrent:
            state = self.states[config.geometry.recurrent.index(event.group)].get(event.block)
            assert (state, event.unit) == (tags[units * config.unit], 0), f"{event}: this state is not written"
            return
        rows, ahead = self.rows[config.geometry.paged.index(event.group)], 1
        ahead += int(geometry.spec.draft and config.draft is not Draft.NONE)
        assert event.unit == first % config.units_per_block(event.group)
        for at in range(first * config.unit, (first + 1) * config.unit):
            assert rows.get((event.block, at % geometry.block)) == tags[at + ahead], f"{event}: row {at} is not written"


def filed(config: CacheConfig, state: CacheState) -> collections.Counter[tuple]:
    """(group, key, block in its pool, unit) of everything in the index that is not of a step in flight."""
    blocks, entries = np.asarray(state.blocks), np.asarray(state.entries)
    found: collections.Counter[tuple] = collections.Counter()
    for place, group in np.argwhere(entries[:, OWNERS:]).tolist():
        block = int(entries[place, OWNERS + group])
        (unit,) = np.flatnonzero(blocks[block, PLACES:] == place * index.groups_of(state) + group + 1)
        row = blocks[block]
        if row[PENDING_STEP] > np.asarray(state.counters)[DONE] and unit >= row[PENDING_FROM]:
            continue
        key = entries[place, :KEY_WORDS].astype("<u4")
        found[group, key.tobytes(), block - config.offset(group), int(unit)] += 1
    return found
