"""What a back end can save inside a chunk, and the rule of those that save one state there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax

Tokens = jax.Array | int
Truth = jax.Array | bool


@dataclasses.dataclass(frozen=True)
class EmissionCapability:
    """What a prefill back end can save inside one chunk; the state at its end it always can.

    max_per_chunk: states of one row and step (0: none). alignment: distance of an emission from
    its reference in tokens. anchored: the reference is absolute position 0; else the row's start.
    """

    max_per_chunk: int
    alignment: int
    anchored: bool

    def everywhere(self, longest: int) -> bool:
        """Whether a row of up to `longest` tokens can save any number of states at any boundary."""
        return self.max_per_chunk >= longest and self.alignment == 1

    def can_save(self, start: Tokens, end: Tokens, boundary: Tokens, unit: int, blocks: Iterable[int]) -> Truth:
        """Whether a state inside a chunk [start, end) can be saved. blocks: tokens that states of each group span."""
        if not self.max_per_chunk:
            return False
        if self.anchored:
            return boundary % self.alignment == 0
        able: Truth = True
        for block in blocks:
            able &= checkpoint_valid(start, end, boundary, unit, block, self.alignment)
        return able


SEVERAL = EmissionCapability(max_per_chunk=1 << 30, alignment=1, anchored=True)


def checkpoint_position(tokens: int, unit: int, drop: bool = False, lookahead: int = 0) -> int:
    """The deepest boundary of `tokens` tokens that an identical resend can use.

    Without a drop at least one token, or `lookahead` tokens that prove the key, are computed again;
    with a drop of the last matched unit one unit is left out. Source: `docs/02-cache.md`.
    """
    limit = tokens if drop else tokens - max(1, lookahead)
    return max(limit // unit * unit - (unit if drop else 0), 0)


def checkpoint_valid(
    start: Tokens, end: Tokens, position: Tokens, unit: int, block: int, alignment: int | None
) -> Truth:
    """Whether a back end with one aligned emission may save `position` in the chunk [start, end), all of any shape.

    unit: hash unit; block: tokens a state column spans; alignment: None if it cannot emit. The
    spare column must lie strictly right of the column that holds the initial state.
    """
    if alignment is None:
        return False
    spare = -(-end // block) - 2
    inside = (start + unit <= position) & (start < position) & (position < end)
    aligned = (start % unit == 0) & ((position - start) % alignment == 0)
    return inside & aligned & (spare > (start - 1) // block)
