"""States at the last boundaries of an answer, kept in a ring of slots until the turn ends.

The state at a boundary goes to slot (boundary / unit) mod slots. One slot is what a finished turn leaves. A second is
needed where a name takes tokens beyond the boundary: the newest state cannot be found yet. And one more for every
further step in flight: the request may turn out to have ended before a row that is already on its way, and that row
must not write over the state the turn leaves.
"""

from __future__ import annotations

import dataclasses

from hybrid_kv.cache.reference.pool import Block


@dataclasses.dataclass
class Ring:
    """blocks: per slot in use, a block a recurrent group. saved: per slot, the boundary whose state it holds."""

    slots: int
    blocks: dict[int, list[Block]] = dataclasses.field(default_factory=dict)
    saved: dict[int, int] = dataclasses.field(default_factory=dict)

    def slot(self, boundary: int, unit: int) -> int:
        return boundary // unit % self.slots

    def held(self) -> list[Block]:
        return [block for blocks in self.blocks.values() for block in blocks]
