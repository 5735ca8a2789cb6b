"""Executes the scalar half of a schedule: every branch, every copy, every wait, with real scalar operands.

Loops whose trips depend on data (ragged batches, page tables, dynamic grids) are walked exactly; vector work costs
the cycles of its bundles; copies go through `copies.Copies` and waits stall on them. What the scalar core cannot
know (a value read back from a vector) is unknown: a branch on it falls through and is among the warnings, so a
result without warnings has nothing guessed.
"""

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_kv.chipless.copies import GRANULE, Copies, Traffic
from hybrid_kv.chipless.instructions import (
    Branch,
    CallOperand,
    Compute,
    Guard,
    Instruction,
    Load,
    Phi,
    Semaphore,
    StartCopy,
    Store,
    WaitCopy,
    decode,
)
from hybrid_kv.chipless.scalar import UNKNOWN_OPERATION, Address, Value, compute, load_address
from hybrid_kv.chipless.schedule import UNIT_NAMES, Schedule
from hybrid_kv.chipless.targets import Chip

# Rows of an array in scalar memory begin at multiples of this many words.
_ROW_WORDS = 128
_MOST_CYCLES = 200_000_000


@dataclass(frozen=True)
class Run:
    """What a replay came to.

    Attributes:
      cycles: with waits for copies.
      issued: bundles issued; `cycles` without the waits.
      stalled: cycles waited for copies.
      hbm_bytes, hbm_busy: bytes to and from high-bandwidth memory, and cycles they took of its pipe.
      copies: by direction.
      busy: share of all cycles by unit (`schedule.UNIT_NAMES`); empty if the table of units was not dumped.
      visits: how often each bundle issued.
      stalls: cycles waited, by bundle.
      warnings: what had to be guessed, with counts; empty for a result to rely on.
      notes: harmless on their own, such as reads of scalars that nothing depends on.
    """

    cycles: float
    issued: int
    stalled: float
    hbm_bytes: int
    hbm_busy: float
    copies: dict[str, Traffic]
    busy: dict[str, float]
    visits: tuple[int, ...]
    stalls: dict[int, float]
    warnings: dict[str, int]
    notes: dict[str, int]


def replay(
    schedule: Schedule,
    chip: Chip,
    operands: Mapping[int, Any] | None = None,
    *,
    latency: float | None = None,
    bandwidth_share: float = 1.0,
) -> Run:
    """Run a kernel from its first bundle to its last.

    Args:
      operands: scalar operands by position in the call (dynamic grid sizes, scalar prefetch, then inputs); see
        `operands.scalar_operands`.
      latency: of a copy, in cycles, instead of the chip's.
      bandwidth_share: of the chip's HBM bandwidth.
    """
    copies = Copies(chip.hbm_bytes_per_cycle * bandwidth_share, chip.dma_latency if latency is None else latency)
    flat = {i: [int(x) for x in np.ravel(v)] for i, v in (operands or {}).items()}
    return _Machine(schedule, chip, flat, copies).run()


def _dummy_allocations(schedule: Schedule) -> frozenset[str]:
    """Allocations that only appear in selects: addresses of reads whose result is thrown away."""
    everywhere: Counter[str] = Counter()
    in_selects: Counter[str] = Counter()
    for bundle in schedule.bundles:
        for operation in bundle.operations:
            found = re.findall(r"#allocation(\d+)\b", operation)
            everywhere.update(found)
            if "scalar_select" in operation:
                in_selects.update(found)
    return frozenset("a" + name for name, count in in_selects.items() if count == everywhere[name])


class _Machine:
    """Registers, scalar memory and semaphores of one core."""

    def __init__(self, schedule: Schedule, chip: Chip, operands: dict[int, list[int]], copies: Copies) -> None:
        self.schedule, self.chip, self.operands, self.copies = schedule, chip, operands, copies
        self.registers: dict[str, Value] = {}
        self.written: dict[str, int] = {}  # when each register was, in instructions
        self.ticks = 0
        self.memory: dict[tuple[Any, int], Value] = {("a0", 0): 0}  # the core's number
        self.warnings: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.time = 0.0
        self.stalls: dict[int, float] = defaultdict(float)
        self.visits = [0] * len(schedule.bundles)
        self.dummies = _dummy_allocations(schedule)
        self.code: list[list[Instruction]] = [self._without_operands(decode(b)) for b in schedule.bundles]
        self.active = [i for i, instructions in enumerate(self.code) if instructions]

    def _without_operands(self, instructions: tuple[Instruction, ...]) -> list[Instruction]:
        """Operand addresses never change: set them now."""
        rest: list[Instruction] = []
        for item in instructions:
            if isinstance(item, CallOperand):
                self._place_operand(item)
            else:
                rest.append(item)
        return rest

    def _place_operand(self, item: CallOperand) -> None:
        given = self.operands.get(item.index)
        if item.is_scalar:
            if not given:
                self.warnings[f"scalar operand {item.index} not given"] += 1
            self.registers[item.target] = given[0] if given else None
            return
        if item.is_input and given is not None and len(item.shape) > 1:
            width = item.shape[-1]
            padding = [0] * (-width % _ROW_WORDS)
            rows = (given[at : at + width] for at in range(0, len(given), width))
            self.operands[item.index] = [x for row in rows for x in row + padding]
        self.registers[item.target] = Address(("operand" if item.is_input else "out", item.index))

    # The program counter

    def run(self) -> Run:
        end, at = len(self.code), 0
        jump: tuple[int, int] | None = None  # last bundle before the jump, target
        while at < end:
            at = self._skip_idle(at, jump, end)
            self.visits[at] += 1
            target = self._issue(at)
            self.time += 1
            if target is not None:
                jump = (at + self.chip.branch_delay, target)
            elif jump is not None and at >= jump[0]:
                at, jump = jump[1], None
                continue
            at += 1
            if self.time > _MOST_CYCLES:
                self.warnings["stopped: too many cycles"] += 1
                break
        return self._summary()

    def _skip_idle(self, at: int, jump: tuple[int, int] | None, end: int) -> int:
        """Pass bundles without scalar work; returns the next that has some, or that jumps, or the last."""
        place = bisect.bisect_left(self.active, at)
        following = self.active[place] if place < len(self.active) else end
        if jump is not None:
            following = min(following, jump[0])
        following = min(following, end - 1)
        for index in range(at, following):
            self.visits[index] += 1
        self.time += following - at
        return following

    def _issue(self, at: int) -> int | None:
        """Execute one bundle; returns the target if it branches."""
        target = None
        for item in self.code[at]:
            if isinstance(item, Phi):
                self._phi(item)
                continue
            assert not isinstance(item, CallOperand), "operands are taken out when the code is read"
            holds = self._holds(item.guard)
            if isinstance(item, Branch):
                if holds is None:
                    self.warnings[f"branch on unknown at 0x{at:x}"] += 1
                elif holds:
                    target = item.target
            elif isinstance(item, Compute):
                self._compute(item, holds, at)
            elif holds is not False:
                self._effect(item, holds, at)
        return target

    def _holds(self, guard: Guard | None) -> bool | None:
        return True if guard is None else guard.holds(self.registers)

    # Instructions

    def _set(self, register: str, value: Value) -> None:
        self.ticks += 1
        self.registers[register] = value
        self.written[register] = self.ticks

    def _phi(self, item: Phi) -> None:
        latest, when = None, -1
        for source in item.sources:
            time = self.written.get(source, 0 if source in self.registers else -1)
            if time > when:
                latest, when = source, time
        self._set(item.target, self.registers.get(latest) if latest else None)

    def _compute(self, item: Compute, holds: bool | None, at: int) -> None:
        if holds is False:
            if item.keep is not None:
                self._set(item.target, self.registers.get(item.keep))
            return
        value = compute(item.operation, [source.get(self.registers) for source in item.arguments])
        if value is UNKNOWN_OPERATION:
            self.warnings[f"unknown operation {item.operation}"] += 1
            value = None
        elif value is None and item.operation == "spop":
            self.warnings[f"scalar from a vector: {item.target} at 0x{at:x}"] += 1
        if holds is None:
            before = self.registers.get(item.keep or item.target)
            value = value if value == before else None
        self._set(item.target, value)

    def _effect(self, item: Instruction, holds: bool | None, at: int) -> None:
        match item:
            case Load():
                self._set(item.target, self._load(self._address(item.address)))
            case Store():
                place = self._address(item.address)
                if isinstance(place, Address) and place.offset is not None:
                    self.memory[place.base, place.offset] = item.value.get(self.registers) if holds else None
            case StartCopy():
                if holds is None:
                    self.warnings["copy under an unknown predicate"] += 1
                self._start_copy(item, at)
            case WaitCopy():
                self._wait_copy(item, at)
            case Semaphore():
                self._semaphore(item)

    def _address(self, parts: tuple[Any, ...]) -> Value:
        return load_address([part.get(self.registers) for part in parts])

    def _load(self, place: Value) -> Value:
        if not isinstance(place, Address) or place.offset is None:
            return None
        key = (place.base, place.offset)
        if key not in self.memory and place.base not in self.dummies:
            self.notes[f"read of unset scalar memory {place.base}"] += 1
        return self.memory.get(key)

    @staticmethod
    def _key(semaphore: Value) -> tuple[Any, int] | None:
        if isinstance(semaphore, Address) and semaphore.offset is not None:
            return semaphore.base, semaphore.offset
        return None

    def _start_copy(self, item: StartCopy, at: int) -> None:
        values = [source.get(self.registers) for source in item.arguments]
        values += [None] * (4 - len(values))
        source, size, target = values[:3]
        if not isinstance(size, int):
            self.warnings[f"copy of unknown size ({item.direction}) at 0x{at:x}"] += 1
            size = 0
        if item.direction.endswith("smem") and isinstance(target, Address):
            # Addresses in high-bandwidth memory count granules, the others words.
            words = GRANULE // 4 if item.direction.startswith("hbm") else 1
            self._fill_scalar_memory(source, target, size, words)
        semaphore = self._key(values[3])
        if semaphore is None:
            self.warnings[f"copy with unknown semaphore at 0x{at:x}"] += 1
        self.copies.start(item.direction, size, semaphore, self.time)

    def _fill_scalar_memory(self, source: Value, target: Address, size: int, words: int) -> None:
        if not (isinstance(source, Address) and isinstance(source.base, tuple)):
            return
        index = source.base[1]
        data = self.operands.get(index)
        if data is None:
            self.warnings[f"operand {index} goes to scalar memory, not given ({size * GRANULE} bytes)"] += 1
        elif target.offset is not None:
            first = (source.offset or 0) * words
            for i, word in enumerate(data[first : first + size * GRANULE // 4]):
                self.memory[target.base, target.offset + i] = word

    def _wait_copy(self, item: WaitCopy, at: int) -> None:
        values = [source.get(self.registers) for source in item.arguments]
        semaphore, needed = self._key(values[0]), values[1] if len(values) > 1 else None
        if semaphore is None or not isinstance(needed, int):
            self.warnings[f"wait on unknown semaphore or amount at 0x{at:x}"] += 1
            ready = self.copies.last_arrival()
        else:
            ready, sent = self.copies.ready_at(semaphore, needed)
            if not sent:
                self.warnings[f"wait for more than was sent at 0x{at:x}"] += 1
        if ready > self.time:
            self.stalls[at] += ready - self.time
            self.time = ready

    def _semaphore(self, item: Semaphore) -> None:
        if item.operation == "vwait":
            self.warnings["semaphore wait (peer assumed ready)"] += 1
            return
        values = [source.get(self.registers) for source in item.arguments]
        semaphore = self._key(values[0])
        if semaphore is None:
            return
        if item.operation == "vsyncpa":
            self.copies.clear(semaphore)
        elif len(values) > 1 and isinstance(values[1], int):
            self.copies.add(semaphore, values[1], self.time)

    def _summary(self) -> Run:
        schedule, cycles = self.schedule, max(self.time, 1)
        slots = [0] * len(UNIT_NAMES)
        for visits, row in zip(self.visits, schedule.units, strict=False):
            for unit, used in enumerate(row if visits else ()):
                slots[unit] += visits * used
        busy = {
            name: used / (capacity * cycles)
            for name, used, capacity in zip(UNIT_NAMES, slots, schedule.capacity, strict=False)
            if capacity
        }
        return Run(
            self.time,
            sum(self.visits),
            sum(self.stalls.values()),
            self.copies.hbm_bytes,
            self.copies.busy,
            dict(self.copies.traffic),
            busy,
            tuple(self.visits),
            dict(self.stalls),
            dict(self.warnings),
            dict(self.notes),
        )
