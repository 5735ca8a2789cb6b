"""What scheduling, admission and publishing all work on: rules, pools, names, and content in the making."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hybrid_kv.cache.reference.plan import Step
from hybrid_kv.cache.reference.pool import Block, Index, Name, Pool
from hybrid_kv.cache.reference.prefixes import Prefixes
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.cache.reference.rules import Rules
from hybrid_kv.cache.reference.statistics import Statistics
from hybrid_kv.geometry import GroupKind

if TYPE_CHECKING:
    from hybrid_kv.cache.reference.external import Load


class Core:
    """requests: those that live; waiting, running: their names. loads: those that run beside the steps; their blocks
    are theirs until they are through. flying: steps that were planned and not committed, oldest first; short: whether
    the last step had work that found no blocks, so that only states that a resume needs are saved."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.index = Index(rules.events)
        self.statistics = Statistics()
        self.pools = [Pool(blocks, self.index, rules.utility) for blocks in rules.pool_blocks]
        self.prefixes = Prefixes()
        self.requests: dict[str, Request] = {}
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.loads: list[Load] = []
        self.flying: deque[Step] = deque()
        self.short = False

    @property
    def evictions(self) -> int:
        """Blocks with a name that were taken for something else."""
        return sum(pool.evicted for pool in self.pools)

    def pool(self, group: int) -> Pool:
        return self.pools[self.rules.group_pool[group]]

    def fits(self, need: Sequence[int]) -> bool:
        """Whether every pool can give so many blocks."""
        return all(blocks <= pool.free for blocks, pool in zip(need, self.pools, strict=True))

    def pending(self, name: Name) -> Block | None:
        """A block that will have this content once the steps planned so far have run."""
        return next((step.pending[name] for step in self.flying if name in step.pending), None)

    def find_soon(self, name: Name) -> Block | None:
        """A block that has this content, or will have it."""
        return self.index.find(name) or self.pending(name)

    def forget_unheld(self) -> None:
        """After blocks were given back: what they were going to hold is nobody's any more."""
        for step in self.flying:
            step.pending = {name: block for name, block in step.pending.items() if block.holders}

    def hash(self, request: Request) -> None:
        rules = self.rules
        self.prefixes.extend(request.chain, request.tokens, rules.unit, rules.lookahead, request.salt)

    # Names

    def name(self, request: Request, group: int, unit: int) -> Name:
        """What a group's part of a unit goes by."""
        return group, request.chain[unit + self.rules.lag(group)]

    def state_name(self, request: Request, group: int, boundary: int) -> Name | None:
        """What the state at a boundary goes by; None while the tokens that its name covers are not known."""
        units = boundary // self.rules.unit
        return (group, request.chain[units - 1]) if 0 < units <= len(request.chain) else None

    def nameable(self, request: Request, group: int, computed: int) -> int:
        """Leading units of a group that have content and a name."""
        return min(computed // self.rules.unit, len(request.chain) - self.rules.lag(group))

    def parts(self, request: Request, group: int, first: int, stop: int) -> Iterator[tuple[Name, Block]]:
        """Name and block of a group's part of the units [first, stop), where the request still holds it."""
        per_block = self.rules.geometry.groups[group].block // self.rules.unit
        for unit in range(first, stop):
            if (block := request.tables[group].get(unit // per_block)) is not None:
                yield self.name(request, group, unit), block

    @property
    def row_groups(self) -> list[int]:
        """Groups that hold a row a token."""
        groups = self.rules.geometry.groups
        return [group for group, geometry in enumerate(groups) if geometry.kind is not GroupKind.RECURRENT]
