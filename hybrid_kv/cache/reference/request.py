"""One request as the model sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING

from hybrid_kv.cache.reference.pool import Block
from hybrid_kv.cache.reference.turns import Ring

if TYPE_CHECKING:
    from hybrid_kv.cache.reference.external import Load
    from hybrid_kv.cache.reference.plan import Row


@dataclasses.dataclass(eq=False)
class Request:
    """Fields, in tokens unless said otherwise.

    tokens: prompt and answer so far. answer: the longest it may become. chain: prefix of every complete unit. hit: of
    the last admission. computed: whose rows and states exist. planned: the same once the steps in flight have run, if
    all their drafts are accepted; promised: tokens those steps give then. rows: those in flight. epoch: counts the
    times it was preempted; a row of an earlier epoch is stale. published: per group, units that have been filed.
    tables: per group {column: block} (a recurrent group: {0: running state}). state_read: the state a recurrent
    group's next chunk starts from, pinned. copy: per group (source, column) of a copy that the next chunk begins
    with, the source pinned. turns: states at the last boundaries of the answer. points: boundaries that should keep
    what resuming there needs; rungs: those of them that only ladder and positions ask for; shared: those where another
    request is known to have left this prefix. load: content on its way from an external store. pins: the load that has
    brought what the next admission will find. unproven: a load of the step in flight that it was admitted with. asked:
    the store has nothing more for this admission; refused: a load failed, and the store is not asked again.
    """

    name: str
    tokens: list[int]
    prompt: int
    answer: int = 1
    priority: int = 0
    salt: Hashable = None
    read_cache: bool = True
    order: int = 0
    chain: list[int] = dataclasses.field(default_factory=list)
    hit: int = 0
    computed: int = 0
    planned: int = 0
    promised: int = 0
    rows: list[Row] = dataclasses.field(default_factory=list)
    epoch: int = 0
    published: list[int] = dataclasses.field(default_factory=list)
    drafts: int = 0
    running: bool = False
    tables: list[dict[int, Block]] = dataclasses.field(default_factory=list)
    state_read: list[Block | None] = dataclasses.field(default_factory=list)
    copy: list[tuple[Block, int] | None] = dataclasses.field(default_factory=list)
    turns: Ring = dataclasses.field(default_factory=lambda: Ring(1))
    points: set[int] = dataclasses.field(default_factory=set)
    rungs: set[int] = dataclasses.field(default_factory=set)
    shared: set[int] = dataclasses.field(default_factory=set)
    load: Load | None = None
    pins: Load | None = None
    unproven: Load | None = None
    asked: bool = False
    refused: bool = False

    @property
    def known(self) -> int:
        """Tokens there will be once the steps in flight have run, if all their drafts are accepted."""
        return len(self.tokens) + self.promised

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token is left to compute."""
        return self.planned < self.known - 1

    @property
    def awaits_tokens(self) -> bool:
        """Whether it was preempted and rows of it are still on their way: what to compute is known when they are in."""
        return bool(self.rows) and not self.running

    def held(self) -> list[Block]:
        """Every block this request holds, once for each time it does."""
        blocks = [block for table in self.tables for block in table.values()]
        blocks += [block for block in self.state_read if block]
        blocks += [pair[0] for pair in self.copy if pair]
        blocks += self.pins.held() if self.pins else []
        return blocks + self.turns.held()
