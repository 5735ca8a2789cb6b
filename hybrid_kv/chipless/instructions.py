"""Decodes the scalar instructions of a bundle into objects that a replay executes.

Vector instructions are left out: to the replay they are the cycles of their bundles.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hybrid_kv.chipless.scalar import Address, Value, signed
from hybrid_kv.chipless.schedule import Bundle


@dataclass(frozen=True, slots=True)
class Constant:
    value: Value

    def get(self, registers: Mapping[str, Value]) -> Value:
        return self.value


@dataclass(frozen=True, slots=True)
class Register:
    name: str

    def get(self, registers: Mapping[str, Value]) -> Value:
        return registers.get(self.name)


@dataclass(frozen=True, slots=True)
class Indexed:
    """An object at an offset held in a register."""

    base: str
    register: str

    def get(self, registers: Mapping[str, Value]) -> Value:
        offset = registers.get(self.register)
        return Address(self.base, offset if isinstance(offset, int) else None)


Source = Constant | Register | Indexed
UNREADABLE = Constant(None)


@dataclass(frozen=True, slots=True)
class Guard:
    """The predicate under which an instruction takes effect."""

    negated: bool
    register: str

    def holds(self, registers: Mapping[str, Value]) -> bool | None:
        value = registers.get(self.register)
        return None if value is None else bool(value) != self.negated


@dataclass(frozen=True, slots=True)
class Phi:
    """Takes the value of the source written last."""

    target: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """`keep` is the register whose value stays when the guard does not hold."""

    guard: Guard | None
    target: str
    operation: str
    arguments: tuple[Source, ...]
    keep: str | None


@dataclass(frozen=True, slots=True)
class Load:
    guard: Guard | None
    target: str
    address: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Store:
    guard: Guard | None
    address: tuple[Source, ...]
    value: Source


@dataclass(frozen=True, slots=True)
class Branch:
    guard: Guard | None
    target: int


@dataclass(frozen=True, slots=True)
class StartCopy:
    """Arguments: source, size in granules, destination, semaphore."""

    guard: Guard | None
    direction: str
    arguments: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class WaitCopy:
    """Arguments: semaphore, size in granules."""

    guard: Guard | None
    arguments: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Semaphore:
    """`operation`: "vsyncadd" adds, "vsyncpa" clears, "vwait" waits for another core."""

    guard: Guard | None
    operation: str
    arguments: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class CallOperand:
    """Address of an operand of the call, or the operand itself if it is a bare scalar."""

    target: str
    index: int
    is_input: bool
    is_scalar: bool
    shape: tuple[int, ...]


Instruction = Phi | Compute | Load | Store | Branch | StartCopy | WaitCopy | Semaphore | CallOperand

_INSTRUCTION = re.compile(r"(?:%([a-z]*\d+)(?:_\w+)? = )?([a-z_]+[\w.]*)\s*(.*)$", re.S)
_GUARD = re.compile(r"(?:\[thread:\$\w+\]\s*)?\((!?)%(p\d+)_\w+(?:,\s*%([sp]\d+)_\w+)?\),?\s*(.*)$", re.S)
# Loads and stores have it behind the address.
_MEMORY_GUARD = re.compile(r"(\[smem:.*\])\s*\((!?)%(p\d+)_\w+\),?\s*(.*)$", re.S)
_NOTES = re.compile(r"^(?:\[(?:thread|resolvable):\$\w+\]\s*)+")
_PLACE = re.compile(r"\[?#allocation(\w+)(?:\s*\+\s*(\S+?))?\]?")


def _source(text: str) -> Source:
    text = text.strip()
    if match := re.fullmatch(r"%([sp]\d+)_\w+", text):
        return Register(match.group(1))
    if match := _PLACE.fullmatch(text):
        base, offset = "a" + match.group(1), match.group(2)
        if offset is None:
            return Constant(Address(base))
        if offset.startswith("%"):
            return Indexed(base, offset[1:].split("_")[0])
        return Constant(Address(base, int(offset.lstrip("$"), 0)))
    if re.fullmatch(r"-?\d+|0x[0-9a-f]+", text):
        return Constant(signed(int(text, 0)))
    if text in ("true", "false"):
        return Constant(text == "true")
    return UNREADABLE


def _sources(text: str) -> tuple[Source, ...]:
    return tuple(_source(part) for part in text.split(","))


def _address(text: str) -> tuple[Source, ...]:
    text = text.strip().removeprefix("[").rstrip("]")
    parts = [part.strip().lstrip("$") for part in text.split("+")]
    return tuple(_source(f"[{part}]" if part.startswith("#") else part) for part in parts)


def _call_operand(target: str, text: str) -> CallOperand | None:
    match = re.search(r"index: (\d+), kind: (\w+)", text)
    if not match:
        return None
    shape = re.search(r"shape: \w+\[([\d,]*)\]", text)
    sizes = tuple(int(x) for x in shape.group(1).split(",") if x) if shape else ()
    bare = "<no memory space>" in text
    return CallOperand(target, int(match.group(1)), match.group(2) == "input", bare, sizes)


def _computation(guard: Guard | None, target: str, operation: str, rest: str, keep: str | None) -> Compute:
    # "base, offset [#allocation]" adds the allocation as well.
    extra = re.match(r"(.*?)\s+\[(#allocation\w+)\]$", rest)
    if operation.startswith("scalar_lea") and extra:
        return Compute(guard, target, operation, (*_sources(extra.group(1)), _source(extra.group(2))), keep)
    return Compute(guard, target, operation, _sources(rest), keep)


def _decode(text: str) -> Instruction | None:
    match = _INSTRUCTION.match(text)
    if not match:
        return None
    target, operation, rest = match.groups()
    if target and not re.fullmatch(r"[sp]\d+", target):
        target = None  # a vector register
    guard, keep = None, None
    if found := _GUARD.match(rest):
        guard, keep, rest = Guard(found.group(1) == "!", found.group(2)), found.group(3), found.group(4)
    rest = _NOTES.sub("", rest)
    if operation in ("sld", "sst") and (found := _MEMORY_GUARD.match(rest)):
        guard, rest = Guard(found.group(2) == "!", found.group(3)), f"{found.group(1)} {found.group(4)}".strip()

    if operation == "sphi":
        sources = tuple(a + b for a, b in re.findall(r"%([sp])(\d+)_", rest))
        return Phi(target, sources) if target else None
    if operation.startswith("sbr."):
        place = re.search(r"target bundleno = (\d+)", text)
        return Branch(guard, int(place.group(1))) if place else None
    if operation.startswith("dma.done"):
        return WaitCopy(guard, _sources(rest)[:2])
    if operation.startswith("dma."):
        return StartCopy(guard, operation[4:].split(".")[0], _sources(rest))
    if operation.startswith(("vsyncadd", "vsyncpa", "vwait")):
        return Semaphore(guard, operation.split(".")[0], _sources(rest))
    if operation == "sst":
        place = re.match(r"\[smem:(.*)\]\s*(\S+)$", rest, re.S)
        return Store(guard, _address(place.group(1)), _source(place.group(2))) if place else None
    if operation == "sld" and target:
        place = re.match(r"\[smem:(.*)\]$", rest.strip(), re.S)
        return Load(guard, target, _address(place.group(1)) if place else (UNREADABLE,))
    if operation.startswith("inlined_call_operand"):
        return _call_operand(target, text) if target else None
    return _computation(guard, target, operation, rest, keep) if target else None


def decode(bundle: Bundle) -> tuple[Instruction, ...]:
    """Scalar instructions of a bundle, phis first."""
    found = [item for text in bundle.operations if (item := _decode(text)) is not None]
    return tuple(sorted(found, key=lambda item: not isinstance(item, Phi)))
