"""What a step does, all of it named: rows, the states they save, and what came of each admission."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from hybrid_kv.cache.reference.lookup import Hit
from hybrid_kv.cache.reference.pool import Block, Name

if TYPE_CHECKING:
    from hybrid_kv.cache.reference.external import Load
    from hybrid_kv.cache.reference.request import Request


class Emission(NamedTuple):
    """A state to save if the row gets as far as `boundary` with tokens that stand; a block a recurrent group."""

    boundary: int
    blocks: list[Block]


@dataclasses.dataclass(eq=False)
class Row:
    """Tokens of one request in one step.

    start, length: in tokens, drafts included; the start takes every draft in flight for accepted, so the true one may
    be up to `slack` tokens earlier. drafts: of those. samples: whether the row reaches the last token there will be, so
    that it gives one, and one for every accepted draft. epoch: see `Request`. void: a load it was to read has failed,
    so that nothing of it counts. reads: per group the state it starts from, None for the running one. copies: (source,
    target), made before anything of the step is written. emissions: states worth a name of their own. turns: states at
    boundaries of the answer, each written over the one of some boundaries ago.
    """

    request: Request
    start: int
    length: int
    drafts: int
    samples: bool
    slack: int = 0
    epoch: int = 0
    void: bool = False
    reads: list[Block | None] = dataclasses.field(default_factory=list)
    copies: list[tuple[Block, Block]] = dataclasses.field(default_factory=list)
    emissions: list[Emission] = dataclasses.field(default_factory=list)
    turns: list[Emission] = dataclasses.field(default_factory=list)

    @property
    def end(self) -> int:
        """Where the row ends if every draft is accepted."""
        return self.start + self.length

    @property
    def fixed(self) -> bool:
        """Whether it is known when planned which tokens the row computes."""
        return not (self.drafts or self.slack)

    @property
    def promised(self) -> int:
        """Tokens the row gives if every draft is accepted."""
        return 1 + self.drafts if self.samples else 0

    @property
    def stale(self) -> bool:
        """Whether its request was preempted since: it gives tokens and nothing else."""
        return self.epoch != self.request.epoch

    def stands(self, sampled: int) -> int:
        """Tokens of the row that stay when it gave `sampled` ones: all but the refused drafts."""
        return self.length - self.drafts + (sampled - 1 if self.drafts else 0)

    def drop_emissions(self) -> None:
        for emission in self.emissions:
            for block in emission.blocks:
                block.pool.drop(block)
        self.emissions = []


@dataclasses.dataclass(eq=False)
class Step:
    """rows: in scheduling order. admitted: request -> its hit. preempted: their names. loads: content to be fetched;
    one that is not asynchronous is done before the rows. pending: content that exists once the step has run."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    admitted: dict[str, Hit] = dataclasses.field(default_factory=dict)
    preempted: list[str] = dataclasses.field(default_factory=list)
    loads: list[Load] = dataclasses.field(default_factory=list)
    pending: dict[Name, Block] = dataclasses.field(default_factory=dict)

    @property
    def copies(self) -> int:
        """Blocks that are copied."""
        return sum(len(row.copies) for row in self.rows)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(row.length for row in self.rows)
