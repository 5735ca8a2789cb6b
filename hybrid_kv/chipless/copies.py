"""Copies of a kernel in time: one pipe to high-bandwidth memory, semaphores that fill as bytes arrive.

A copy takes bytes / bandwidth of the pipe and lands a latency later; copies queue behind one another. Not modelled:
strides, banks, limits of the copy engines, traffic of other cores.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

# Bytes that one unit of a copy's size stands for.
GRANULE = 32


def far(direction: str) -> bool:
    """Whether copies of a direction use high-bandwidth memory; where a descriptor does not say ("general"), they do."""
    return direction == "general" or "hbm" in direction.split("_to_")


@dataclass
class Traffic:
    """Copies of one direction."""

    count: int = 0
    bytes: int = 0


@dataclass
class _Arrival:
    time: float
    amount: int


@dataclass
class Copies:
    """State of the pipes and semaphores.

    Attributes:
      bytes_per_cycle: of the pipe to high-bandwidth memory; copies within the core take a pipe four times as wide.
      latency: cycles, a quarter of it within the core.
      traffic: by direction.
      busy: cycles in which the pipe to high-bandwidth memory moved bytes.
    """

    bytes_per_cycle: float
    latency: float
    traffic: dict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    busy: float = 0.0
    _free_at: dict[str, float] = field(default_factory=lambda: {"hbm": 0.0, "local": 0.0})
    _arrivals: dict[Hashable, list[_Arrival]] = field(default_factory=dict)

    @property
    def hbm_bytes(self) -> int:
        return sum(t.bytes for direction, t in self.traffic.items() if far(direction))

    def start(self, direction: str, size: int, semaphore: Hashable | None, now: float) -> None:
        """A copy of `size` granules issued `now`; its arrival is added to the semaphore."""
        traffic = self.traffic[direction]
        traffic.count += 1
        traffic.bytes += size * GRANULE
        remote = far(direction)
        pipe = "hbm" if remote else "local"
        duration = size * GRANULE / (self.bytes_per_cycle * (1 if remote else 4))
        begin = max(now, self._free_at[pipe])
        if remote:
            self.busy += duration
        self._free_at[pipe] = begin + duration
        if semaphore is not None:
            landed = begin + duration + self.latency / (1 if remote else 4)
            self._arrivals.setdefault(semaphore, []).append(_Arrival(landed, size))

    def ready_at(self, semaphore: Hashable, needed: int) -> tuple[float, bool]:
        """When the semaphore holds `needed` granules, and whether that many were sent at all."""
        held, time = 0, 0.0
        for arrival in self._arrivals.get(semaphore, []):
            if held >= needed:
                break
            held += arrival.amount
            time = max(time, arrival.time)
        return time, held >= needed

    def last_arrival(self) -> float:
        """When everything under way has landed."""
        return max((a.time for queue in self._arrivals.values() for a in queue), default=0.0)

    def add(self, semaphore: Hashable, amount: int, now: float) -> None:
        """Change a semaphore from the program; a negative amount takes what arrived first."""
        if amount > 0:
            self._arrivals.setdefault(semaphore, []).append(_Arrival(now, amount))
            return
        needed, queue = -amount, self._arrivals.get(semaphore, [])
        while queue and needed > 0:
            taken = min(queue[0].amount, needed)
            queue[0].amount -= taken
            needed -= taken
            if queue[0].amount == 0:
                queue.pop(0)

    def clear(self, semaphore: Hashable) -> None:
        self._arrivals[semaphore] = []
