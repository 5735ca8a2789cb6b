"""Blocks, who holds them, and the order in which unheld ones are taken again."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable

from hybrid_kv.cache.reference.events import Cleared, Event, Removed

# (group, prefix): content of one hash unit, or of one state, in one group.
Name = tuple[int, int]


class Block:
    """One block. holders: table entries and pins. names: what its content may be found by. kept: some request
    decided that the content is worth finding after it has left its window. reused: a hit has been served from it.
    spare: a state nobody asked for, taken again before everything else that has a name."""

    __slots__ = ("holders", "kept", "names", "number", "pool", "reused", "spare")

    def __init__(self, pool: Pool, number: int) -> None:
        self.pool, self.number = pool, number
        self.holders = 0
        self.names: set[Name] = set()
        self.kept = self.reused = self.spare = False


class Index:
    """Blocks by name. Equal content computed twice is filed twice while both blocks are held. evicted: names that were
    lost to make room. events: what happened, None if nobody listens."""

    def __init__(self, listen: bool = False) -> None:
        self._blocks: dict[Name, dict[Block, None]] = {}
        self.evicted: set[Name] = set()
        self.events: list[Event] | None = [] if listen else None

    def find(self, name: Name) -> Block | None:
        """The block filed first."""
        return next(iter(self._blocks.get(name, ())), None)

    def others(self, name: Name, block: Block) -> list[Block]:
        """Further blocks of this name."""
        return [one for one in self.all(name) if one is not block]

    def add(self, name: Name, block: Block) -> bool:
        """File a block; whether it was not filed so before."""
        new = name not in block.names
        self._blocks.setdefault(name, {})[block] = None
        self.evicted.discard(name)
        block.names.add(name)
        return new

    def tell(self, event: Event) -> None:
        if self.events is not None:
            self.events.append(event)

    def remove(self, name: Name, block: Block) -> None:
        if name in block.names:
            self.tell(Removed(*name))
        block.names.discard(name)
        if (blocks := self._blocks.get(name)) is not None:
            blocks.pop(block, None)
            if not blocks:
                del self._blocks[name]

    def evict(self, block: Block) -> None:
        """Forget what a block holds, because something else is to take its place."""
        for name in list(block.names):
            self.remove(name, block)
            if name not in self._blocks:
                self.evicted.add(name)

    def clear(self) -> None:
        """Forget everything, evictions too."""
        for blocks in self._blocks.values():
            for block in blocks:
                block.names.clear()
        self._blocks.clear()
        self.evicted.clear()
        self.tell(Cleared())

    def all(self, name: Name) -> list[Block]:
        return list(self._blocks.get(name, ()))

    def names(self) -> Iterable[Name]:
        return self._blocks.keys()


class Pool:
    """Free blocks: nameless ones are taken first, last freed first; then named ones, oldest first, or the one of the
    least utility, the oldest of equals."""

    def __init__(self, blocks: int, index: Index, utility: Callable[[Block], float] | None = None) -> None:
        self.size = blocks
        self.index = index
        self.utility = utility
        self.blocks = [Block(self, number) for number in range(blocks, 0, -1)]
        self.nameless = list(self.blocks)
        self.named: OrderedDict[Block, None] = OrderedDict()
        self.evicted = 0

    @property
    def free(self) -> int:
        return len(self.nameless) + len(self.named)

    def take(self) -> Block:
        """A block for its first holder; whatever it held is forgotten."""
        if self.nameless:
            block = self.nameless.pop()
        else:
            block = self._order()[0]
            del self.named[block]
            self.evicted += 1
            self.index.evict(block)
        block.holders, block.kept, block.reused, block.spare = 1, False, False, False
        return block

    def hold(self, block: Block) -> None:
        """One more holder."""
        if not block.holders:
            del self.named[block]
        block.holders += 1
        block.reused, block.spare = True, False

    def next(self, count: int) -> list[Block]:
        """The blocks that `count` takes would give."""
        nameless = self.nameless[::-1][:count]
        return nameless + self._order(count - len(nameless))

    def _order(self, count: int = 1) -> list[Block]:
        """The first named blocks to be taken."""
        if self.utility is None:
            return list(itertools.islice(self.named, count))
        return sorted(self.named, key=self.utility)[:count]

    def drop(self, block: Block) -> None:
        """One holder less. A block nobody holds waits behind all that were dropped before, unless its content has no
        name, or another block holds it too."""
        block.holders -= 1
        assert block.holders >= 0, "more drops than holders"
        if block.holders:
            return
        for name in list(block.names):
            if others := self.index.others(name, block):
                for other in others:
                    other.kept |= block.kept
                self.index.remove(name, block)
        if block.names:
            self.named[block] = None
            self.named.move_to_end(block, last=not block.spare)
        else:
            self.nameless.append(block)

    def refresh(self, block: Block) -> None:
        """Count a block that nobody holds as used just now."""
        if block in self.named and not block.spare:
            self.named.move_to_end(block)

    def forget(self, block: Block) -> None:
        """Take all names from a block that somebody holds."""
        for name in list(block.names):
            self.index.remove(name, block)

    def reset(self) -> None:
        """All blocks are nameless; the index was cleared, and nothing may be held."""
        self.nameless += self.named
        self.named.clear()
