"""Prefixes as what they are: equal prefixes are one number, unlike ones never are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence


class Prefixes:
    """Numbers for prefixes, in a tree whose edges are hash units. 0 is the empty prefix."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._children: defaultdict[int, int] = defaultdict(int)
        self.salts: set[Hashable] = set()

    def child(self, parent: int, unit: Hashable) -> int:
        """The prefix that continues `parent` by one unit."""
        known = self._numbers.get((parent, unit))
        if known is None:
            known = self._numbers[parent, unit] = len(self._numbers) + 1
            self._children[parent] += 1
        return known

    def forks(self, prefix: int) -> bool:
        """Whether two known sequences leave this prefix in different ways."""
        return self._children[prefix] > 1

    def extend(
        self, chain: list[int], tokens: Sequence[int], unit: int, lookahead: int = 0, salt: Hashable = None
    ) -> None:
        """Append to `chain` (a prefix for every unit) the units that `tokens` complete.

        A unit's content is its tokens and the `lookahead` tokens behind it; the salt goes into the first.
        """
        self.salts.add(salt)
        for content in _units(len(chain), tokens, unit, lookahead, salt):
            chain.append(self.child(chain[-1] if chain else 0, content))

    def known(self, tokens: Sequence[int], unit: int, lookahead: int = 0, salt: Hashable = None) -> list[int]:
        """The chain of `tokens` as far as it has been seen before; adds nothing."""
        chain: list[int] = []
        for content in _units(0, tokens, unit, lookahead, salt):
            number = self._numbers.get((chain[-1] if chain else 0, content))
            if number is None:
                break
            chain.append(number)
        return chain


def _units(
    first: int, tokens: Sequence[int], unit: int, lookahead: int, salt: Hashable
) -> Iterator[tuple[Hashable, ...]]:
    """Contents of the complete units from `first` on."""
    for index in range(first, (len(tokens) - lookahead) // unit):
        content: tuple[Hashable, ...] = tuple(tokens[index * unit : (index + 1) * unit + lookahead])
        yield (*content, ("salt", type(salt), salt)) if not index and salt is not None else content
