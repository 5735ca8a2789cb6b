"""In which order blocks that nobody holds are given up, and what may displace them, as data.

Blocks without a key always go first. The others go by utility: when they were released or used last, and how much
longer they stay for what they are worth. Every field is data of the state, so one compiled program serves all policies.

`LRU` is the plain order of release. `TIED` lets a prefix go from its end, rows and states together, so that no state
outlives its rows nor rows the last state behind them. `JOINT` also learns which kinds of states are come back to, and
gives blocks to those only. `utility` adds what a block saves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# Bands of free blocks with keys, see `cache.pool`: what goes first; states that save little, more, or as much as rows
# do, which are with them; blocks that a hit was served from.
FIRST, LITTLE, MORE, MOST, REUSED = range(5)
# Tokens of compute saved by a block from which on a state belongs to the next band, and what a band stands for.
_FROM = (256, 1024)
_TOKENS = (128, 512, 1536)


@dataclasses.dataclass(frozen=True)
class Eviction:
    """tied: rows and states that a request has used are released by depth, the deepest first; rows behind its last
    state go before everything else with a key; a state that a deeper one of the same request has superseded does not
    count as used again; and a request that waits for the watermark alone keeps nobody from saving states. Off: states
    count as used before the rows, and one that only the ladder asks for goes first.
    coverage: superseded states go before everything else with a key (with `tied`); forks save states of their own.
    earned: once anything has been evicted, states are saved only of the kinds that are come back to, see
    `cache.earnings`; those of forks always are.
    guard: a state that nobody is known to share does not displace one that a hit was served from.
    alpha: by how many releases longer a block stays for each thousand tokens of compute that it saves.
    reused: by how many releases longer a block stays once a hit was served from it.
    """

    tied: bool = False
    coverage: bool = False
    earned: bool = False
    guard: bool = True
    alpha: float = 0.0
    reused: float = 0.0

    @property
    def is_banded(self) -> bool:
        """Whether anything but the order of release counts."""
        return bool(self.alpha or self.reused)

    @property
    def stays(self) -> tuple[int, ...]:
        """Releases that blocks of every band stay longer; those that go first do not ask."""
        saved = [int(min(self.alpha * tokens / 1000, 1 << 29)) for tokens in _TOKENS]
        return (0, *saved, saved[-1] + int(min(self.reused, 1 << 29)))


LRU = Eviction()
TIED = Eviction(tied=True, guard=False)
COVERAGE = Eviction(tied=True, coverage=True, guard=False)
JOINT = Eviction(tied=True, earned=True, guard=False)


def utility(alpha: float) -> Eviction:
    """Recency, and `alpha` releases for each thousand tokens of compute that a block saves."""
    return Eviction(tied=True, guard=False, alpha=alpha)


def saving(tokens: jax.Array) -> jax.Array:
    """How many bands above the lowest a state belongs that saves so many tokens a block: i32, 0 to 2."""
    return (tokens[..., None] >= jnp.array(_FROM)).sum(-1, dtype=jnp.int32)


def band(policy: jax.Array, is_state: Any, saved: Any, reused: Any) -> jax.Array:
    """Band of a block by what it is: a state and what it saves (`saving`), and whether a hit was served from it.

    policy: bool, whether anything but the order of release counts.
    """
    by_worth = jnp.where(reused, REUSED, jnp.where(is_state, LITTLE + saved, MOST))
    return jnp.where(policy, by_worth, MOST)
