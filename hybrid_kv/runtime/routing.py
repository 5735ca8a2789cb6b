"""Which replica gets a request: the one that would be done with it first, counted in tokens to compute.

To ask the caches themselves would take a program and a wait for each replica and request, and what is still being
computed would not show. So the host remembers the keys of the prompts that it sent each way lately. A wrong guess
costs time only: what is served from a cache is the decision of that cache.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from hybrid_kv.cache.config import CacheConfig


class Router:
    """Remembers prompts by replica, as many hash units of each as its pools hold; the oldest are forgotten first."""

    def __init__(self, config: CacheConfig, replicas: int) -> None:
        geometry = config.geometry
        groups = geometry.attention or geometry.recurrent
        self._unit = config.unit
        self._capacity = min(config.pool_blocks[config.group_pool[g]] * config.units_per_block(g) for g in groups)
        self._known: list[collections.OrderedDict[bytes, None]] = [collections.OrderedDict() for _ in range(replicas)]

    def route(self, keys: np.ndarray, length: int, loads: Mapping[int, int], reads: bool = True) -> tuple[int, int]:
        """Choose a replica for a prompt of `length` tokens, and remember its keys as sent there: (replica, tokens of
        the prompt that it is likely to hold).

        keys: uint32[units, 4], of which the whole units of the prompt count. loads: tokens left to compute, by
        each replica that may be chosen. reads: whether the request may use cached prefixes. The first of equals.
        """
        names = [row.tobytes() for row in keys[: length // self._unit]]
        held = {index: self._held(index, names) * self._unit if reads else 0 for index in loads}
        chosen = min(loads, key=lambda index: (loads[index] - held[index], index))
        self._remember(chosen, names)
        return chosen, held[chosen]

    def forget(self) -> None:
        """Forget all prompts, as when the caches are emptied."""
        for known in self._known:
            known.clear()

    def _held(self, index: int, names: Sequence[bytes]) -> int:
        """Leading units that were sent to a replica."""
        known = self._known[index]
        return next((unit for unit, name in enumerate(names) if name not in known), len(names))

    def _remember(self, index: int, names: Sequence[bytes]) -> None:
        known = self._known[index]
        for name in reversed(names):  # a prefix is forgotten from its end
            known[name] = None
            known.move_to_end(name)
        while len(known) > self._capacity:
            known.popitem(last=False)
