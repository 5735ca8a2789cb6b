"""What a listener has to know to follow the cache from outside: what is filed, what is lost, and when all is forgotten.

A key is a prefix number. Every registration of a block under a key is one `Stored`, every loss of one is one `Removed`,
so a key is found as long as more were stored than removed.
"""

from __future__ import annotations

from typing import NamedTuple


class Stored(NamedTuple):
    """Content of tokens [first, stop) in one block of a group.

    keys: one for every hash unit, or that of a state, whose event covers the unit that it ends. parent: key of the unit
    before, None at the beginning. block: tokens of a block of this group, over all ranks.
    """

    group: int
    keys: tuple[int, ...]
    first: int
    stop: int
    parent: int | None
    block: int


class Removed(NamedTuple):
    """A block of this group is no longer found under this key."""

    group: int
    key: int


class Cleared(NamedTuple):
    """Everything was forgotten."""


Event = Stored | Removed | Cleared
