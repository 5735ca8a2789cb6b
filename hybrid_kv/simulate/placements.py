"""Placements on traces with an unlimited cache: what each serves and how many states it writes, no core involved.

Requests are looked at one after the other, as in `ceilings`; all placements keep the tail of the prompt, the end of the
turn and the deepest junction, and differ in what they keep besides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hybrid_kv.simulate.ceilings import BlockTrie

# Positions (tokens) of a prompt of so many tokens.
Positions = Callable[[int], Iterable[int]]
# Told of every admission: its overlap with earlier requests, and what of it was served.
Watch = Callable[[int, int], None]


@dataclasses.dataclass
class Policy:
    """A placement under comparison. positions: of a prompt of so many tokens, besides the common ones. watch: told of
    every admission, in tokens. prompts, hits, states: tokens of all prompts, those served, states written."""

    name: str
    positions: Positions
    watch: Watch | None = None
    prompts: int = 0
    hits: int = 0
    states: int = 0
    at: set[int] = dataclasses.field(default_factory=set, repr=False)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.prompts

    @property
    def states_per_1k(self) -> float:
        """States written for every 1,000 tokens prefilled."""
        return 1e3 * self.states / max(self.prompts - self.hits, 1)


def ladder(*grids: int) -> Positions:
    """The last multiple of each grid strictly inside the prompt."""
    return lambda length: ((length - 1) // grid * grid for grid in grids)


def compare(served: Iterable[tuple[np.ndarray, np.ndarray]], grid: int, policies: Sequence[Policy]) -> int:
    """Serve (prompt, answer) pairs in order under every policy; returns what attention alone could have served."""
    trie, ceiling = BlockTrie(grid), 0
    for prompt, answer in served:
        length = len(prompt)
        known, path = trie.insert(np.concatenate([np.asarray(prompt, np.int64), np.asarray(answer, np.int64)]))
        top = min(known, (length - 1) // grid)
        ceiling += top * grid
        for policy in policies:
            _serve(policy, path, top, length, length + len(answer), grid)
    return ceiling


def _serve(policy: Policy, path: list[int], top: int, length: int, end: int, grid: int) -> None:
    hit = next((depth for depth in range(top, 0, -1) if path[depth - 1] in policy.at), 0)
    policy.prompts += length
    policy.hits += hit * grid
    wanted = {(length - 1) // grid, (end - 1) // grid, top}
    wanted |= {position // grid for position in policy.positions(length) if position < length}
    fresh = {path[depth - 1] for depth in wanted if depth > hit} - policy.at
    policy.states += len(fresh)
    policy.at |= fresh
    if policy.watch is not None:
        policy.watch(top * grid, hit * grid)
