"""In which order blocks that nobody holds are given up, and what may displace them, as data.

Blocks without a key always go first. What the others are worth is nothing but when they were used last, and in which
order those are released that a request has used. `LRU` is the plain order of release. `TIED` lets a prefix go from its
end, rows and states together, so that no state outlives its rows nor rows the last state behind them. `JOINT` also
learns which kinds of states are come back to, and keeps slots for those only.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Eviction:
    """Every field is data of the state, so one compiled program serves all of them.

    tied: rows and states that a request has used are released by depth, the deepest first; rows behind its last state
    go before everything else with a key; a state that a deeper one of the same request has superseded does not count
    as used again. Off: states count as used before the rows, and a state only the ladder asks for goes first.
    earned: once anything has been evicted, states are saved only of the kinds that are come back to, see
    `cache.earnings`; those of forks always are.
    guard: a state that nobody is known to share does not displace one that a hit was served from.
    """

    tied: bool = False
    earned: bool = False
    guard: bool = True


LRU = Eviction()
TIED = Eviction(tied=True, guard=False)
JOINT = Eviction(tied=True, earned=True, guard=False)
