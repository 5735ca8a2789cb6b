"""One request as the model sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from hybrid_kv.cache.reference.pool import Block


@dataclasses.dataclass(eq=False)
class Request:
    """Fields, in tokens unless said otherwise.

    tokens: prompt and answer so far. chain: prefix of every complete unit. hit: of the last admission. computed: whose
    rows and states exist. published: per group, units that have been filed. tables: per group {column: block} (a
    recurrent group: {0: running state}). state_read: the state a recurrent group's next chunk starts from, pinned.
    copy: per group (source, column) of a copy that the next chunk begins with, the source pinned. ending: boundaries
    of the answer so far, in order, each with its state in every recurrent group: the last one that a later request can
    resume at, and those that it can once more tokens are known. points: boundaries that should keep what
    resuming there needs; rungs: those of them that only a ladder asks for; shared: those where another request is
    known to have left this prefix.
    """

    name: str
    tokens: list[int]
    prompt: int
    priority: int = 0
    salt: Hashable = None
    read_cache: bool = True
    order: int = 0
    chain: list[int] = dataclasses.field(default_factory=list)
    hit: int = 0
    computed: int = 0
    published: list[int] = dataclasses.field(default_factory=list)
    drafts: int = 0
    running: bool = False
    tables: list[dict[int, Block]] = dataclasses.field(default_factory=list)
    state_read: list[Block | None] = dataclasses.field(default_factory=list)
    copy: list[tuple[Block, int] | None] = dataclasses.field(default_factory=list)
    ending: list[tuple[int, list[Block]]] = dataclasses.field(default_factory=list)
    points: set[int] = dataclasses.field(default_factory=set)
    rungs: set[int] = dataclasses.field(default_factory=set)
    shared: set[int] = dataclasses.field(default_factory=set)
    preemptions: int = 0

    def held(self) -> list[Block]:
        """Every block this request holds, once for each time it does."""
        blocks = [block for table in self.tables for block in table.values()]
        blocks += [block for block in self.state_read if block]
        blocks += [pair[0] for pair in self.copy if pair]
        return blocks + [block for _, saved in self.ending for block in saved]
