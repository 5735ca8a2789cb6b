"""What the model depends on besides its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hybrid_kv.cache.drafts import Draft
from hybrid_kv.cache.emission import SEVERAL, EmissionCapability
from hybrid_kv.cache.reference.pool import Block
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupKind, SystemGeometry


@dataclasses.dataclass(frozen=True)
class Rules:
    """pool_blocks: usable blocks of every pool; group_pool: pool of every group.

    max_requests: requests running at once. token_budget: tokens of a step. chunk_limit: tokens of one prefill chunk.
    retention: None keeps a state at every block boundary, n > 0 at every n tokens, 0 at semantic points only;
    windowed groups keep the rows that a request resuming there needs. tail, turn_end, ladder, positions: semantic
    points, see `cache.config.Placement`; junctions: most of a request, the deepest and the last forks before it.
    lookahead: tokens beyond a unit that its key covers (Draft.LOOKAHEAD).
    slots_ahead: rows taken beyond the scheduled tokens, where a drafter writes. steps_in_flight: 2 if a step is planned
    while the one before it runs.
    max_active: requests that run at once, where that is fewer than there are places for. chunk_adaptive: a chunk may be
    as long as a fair share of the step's tokens, if that is more than its limit; the limit holds only while several
    requests live. prefill_interval: steps from one with a prefill to the next, while others decode. watermark: share of
    a pool that an admission leaves free while others run. admit_whole: admit a request when all its known tokens find
    blocks, not just its first chunk. events: keep a record of what is filed and lost, see `Model.drain_events`;
    event_hits: report the blocks that a hit is served from as well. emission: states that the back end can save inside
    a chunk; the one at its end it always can. utility: what a named block that nobody holds is worth, so that the least
    of them is taken first; None: the oldest.
    """

    geometry: SystemGeometry
    pool_blocks: tuple[int, ...]
    group_pool: tuple[int, ...]
    max_requests: int = 128
    max_context: int = 1 << 20
    token_budget: int = 8192
    chunk_limit: int = 1 << 30
    caching: bool = True
    retention: int | None = 0
    tail: bool = True
    turn_end: bool = True
    junctions: int = 5
    ladder: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    draft: Draft = Draft.NONE
    lookahead: int = 0
    slots_ahead: int = 0
    priority: bool = False
    steps_in_flight: int = 1
    max_active: int | None = None
    chunk_adaptive: bool = False
    prefill_interval: int = 1
    watermark: float = 0.0
    admit_whole: bool = True
    events: bool = False
    event_hits: bool = False
    emission: EmissionCapability = SEVERAL
    utility: Callable[[Block], float] | None = None

    def __post_init__(self) -> None:
        if len(self.group_pool) != len(self.geometry.groups):
            raise UserError(
                "group_pool", self.group_pool, f"name one pool for each of {len(self.geometry.groups)} groups"
            )
        if not set(self.group_pool) <= set(range(len(self.pool_blocks))):
            raise UserError("group_pool", self.group_pool, f"use pools 0 to {len(self.pool_blocks) - 1}")
        if min(self.pool_blocks) < 1 or self.slots_ahead < 0:
            raise UserError("pool_blocks, slots_ahead", (self.pool_blocks, self.slots_ahead), "use at least 1 and 0")
        for grid in self.ladder:
            if grid < 1 or grid % self.geometry.hit_unit:
                raise UserError("ladder", grid, f"hits end at multiples of {self.geometry.hit_unit} tokens: use such")
        for position in self.positions:
            if position < 0 or position % self.geometry.hit_unit:
                fix = f"hits end at multiples of {self.geometry.hit_unit} tokens: use such, or 0 for none"
                raise UserError("positions", position, fix)
        for field in ("max_requests", "max_context", "token_budget", "chunk_limit", "steps_in_flight",
                      "prefill_interval"):  # fmt: skip
            if getattr(self, field) < 1:
                raise UserError(field, getattr(self, field), "use at least 1")
        if self.event_hits and not self.events:
            raise UserError("event_hits", True, "turn events on as well")
        if self.max_active is not None and self.max_active < 1:
            raise UserError("max_active", self.max_active, "use at least 1, or None")
        if not 0 <= self.watermark < 1:
            raise UserError("watermark", self.watermark, "use a share of the pool, from 0 to below 1")
        if self.emission.max_per_chunk < 0 or self.emission.alignment < 1:
            raise UserError("emission", self.emission, "use 0 or more states a chunk, at multiples of 1 or more tokens")
        if self.retention is not None and (self.retention < 0 or self.retention % self.geometry.hit_unit):
            raise UserError("retention", self.retention, f"use None, 0 or a multiple of {self.geometry.hit_unit}")
        if self.junctions < 0:
            raise UserError("junctions", self.junctions, "use 0 or more")
        if self.lookahead < 0 or (self.lookahead > 0) != (self.draft is Draft.LOOKAHEAD):
            raise UserError("lookahead", self.lookahead, "give at least 1 with draft=lookahead, 0 otherwise")

    @property
    def unit(self) -> int:
        """Tokens of a hash unit."""
        return self.geometry.hash_unit

    def lag(self, group: int) -> int:
        """Units that must be known beyond one before this group's part of it has a name."""
        spec = self.geometry.groups[group].spec
        return int(self.draft is Draft.DROP and spec.draft and spec.kind is not GroupKind.RECURRENT)

    @property
    def most_running(self) -> int:
        """Requests that run at once."""
        return min(self.max_requests, self.max_active or self.max_requests)

    def longest_chunk(self, living: int) -> int:
        """Tokens of one prefill chunk while so many requests live."""
        if living <= 1:
            return self.token_budget
        return max(self.chunk_limit, self.token_budget // living) if self.chunk_adaptive else self.chunk_limit

    @property
    def longest_lag(self) -> int:
        return max(self.lag(group) for group in range(len(self.geometry.groups)))

    def longest_hit(self, known: int) -> int:
        """The most tokens that may be served of so many known ones: not the last, nor what a name has to prove."""
        units = min((known - 1) // self.unit, (known - self.lookahead) // self.unit - self.longest_lag)
        return max(units * self.unit // self.geometry.hit_unit * self.geometry.hit_unit, 0)

    @property
    def turn_slots(self) -> int:
        """Slots of a ring of turn-end states, see `turns`."""
        beyond = self.longest_lag * self.unit + max(self.lookahead - 1, 0)
        return 1 + -(-beyond // self.geometry.hit_unit) + self.steps_in_flight - 1

    @property
    def saves_anywhere(self) -> bool:
        """Whether a row can save any number of states at any boundary."""
        return self.emission.everywhere(self.max_context)

    def can_save(self, start: int, end: int, boundary: int) -> bool:
        """Whether the back end can save a state inside a chunk [start, end)."""
        blocks = [self.geometry.groups[group].block for group in self.geometry.recurrent]
        return bool(self.emission.can_save(start, end, boundary, self.unit, blocks))

    def resume_points(self, prompt: int, known: int) -> set[int]:
        """Boundaries where a later request with this prompt, or with a longer one, may resume.

        The first is where the same prompt sent again ends up, with one token (or the tokens that prove a key) left
        to compute; the second where a continuation does.
        """
        step, back = self.geometry.hit_unit, self.unit * self.longest_lag
        points = set()
        for tokens in (prompt, known):
            longer = tokens - self.lookahead - back
            again = min(tokens - 1, longer)
            points |= {again // step * step, longer // step * step}
        return {point for point in points if point > 0}
