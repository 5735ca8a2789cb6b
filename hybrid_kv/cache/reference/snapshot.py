"""All of a model's state at one moment, to go back to when a step is withdrawn or cannot be planned.

A functional core has this for nothing: it keeps the state it was given. Here objects are changed in place, so their
fields are copied and put back; objects stay the ones they are.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hybrid_kv.cache.reference.turns import Ring

if TYPE_CHECKING:
    from hybrid_kv.cache.reference.model import Model
    from hybrid_kv.cache.reference.plan import Step

# Fields that do not belong to what a step changes.
_CONSTANT = ("rules", "prefixes", "index", "pools", "undo", "events", "statistics")


class Snapshot:
    """Two of equal states compare equal."""

    def __init__(self, model: Model) -> None:
        requests = {id(row.request): row.request for step in model.flying for row in step.rows}
        requests |= {id(request): request for request in model.requests.values()}
        objects: list[Any] = [model, model.index, model.statistics, *model.pools, *model.flying, *requests.values()]
        objects += [row for step in model.flying for row in step.rows]
        objects += [block for pool in model.pools for block in pool.blocks]
        self._fields = [(one, {name: _copied(getattr(one, name)) for name in _names(one)}) for one in objects]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self._fields == other._fields

    def restore(self) -> None:
        """Put every field back."""
        for one, fields in self._fields:
            for name, value in fields.items():
                setattr(one, name, _copied(value))


def _names(one: Any) -> list[str]:
    names = one.__slots__ if hasattr(type(one), "__slots__") and not hasattr(one, "__dict__") else vars(one)
    return [name for name in names if name not in _CONSTANT]


def _copied(value: Any) -> Any:
    """Containers copied all the way down, what they contain left as it is."""
    if isinstance(value, Ring):
        return Ring(value.slots, _copied(value.blocks), _copied(value.saved))
    if isinstance(value, collections.Counter | set):
        return copy.copy(value)
    if isinstance(value, dict):
        return type(value)((key, _copied(one)) for key, one in value.items())
    if isinstance(value, list | collections.deque):
        return type(value)(_copied(one) for one in value)
    return value


class Undo:
    """What to go back to if a step is withdrawn, and what has been asked for since it was planned."""

    def __init__(self, model: Model) -> None:
        self.before = Snapshot(model)
        self.events = len(model.index.events or ())
        self.index = model.index
        self.step: Step | None = None
        self.since: list[Callable[[], Any]] = []

    def go_back(self) -> None:
        self.before.restore()
        if self.index.events is not None:
            del self.index.events[self.events :]


def noted(transition: Callable[..., Any]) -> Callable[..., Any]:
    """A transition that is done again if the step before it is withdrawn."""

    @functools.wraps(transition)
    def and_noted(self: Model, *arguments: Any, **named: Any) -> Any:
        result = transition(self, *arguments, **named)
        if self.undo is not None:
            self.undo.since.append(lambda: transition(self, *arguments, **named))
        return result

    return and_noted
