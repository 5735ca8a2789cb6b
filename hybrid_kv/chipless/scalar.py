"""The scalar core's arithmetic: 32-bit integers, predicates and symbolic addresses.

A value is an int, a bool (predicate), an `Address`, or None when it cannot be known: read back from a vector, say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Value = Any  # int | bool | Address | None; spelled loosely because every operation tells them apart

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Address:
    """A place in an object (allocation or operand): its name and an offset, None if unknown."""

    base: Any
    offset: int | None = 0

    def plus(self, count: int | None) -> "Address":
        return Address(self.base, None if count is None or self.offset is None else self.offset + count)


def signed(value: int) -> int:
    """The low 32 bits as a two's-complement number."""
    value &= _WORD
    return value - (1 << 32) if value & 0x80000000 else value


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def _shift_left(x: int, y: int) -> int:
    return signed((x & _WORD) << y) if y < 32 else 0


def _shift_left_ones(x: int, y: int) -> int:
    return signed(((x & _WORD) << y) | ((1 << y) - 1)) if y < 32 else -1


_INTEGER: dict[str, Callable[[int, int], int]] = {
    "sadd": lambda x, y: signed(x + y),
    "ssub": lambda x, y: signed(x - y),
    "smulhi": lambda x, y: signed(((x & _WORD) * (y & _WORD)) >> 32),
    "sand": lambda x, y: signed(x & y),
    "sor": lambda x, y: signed(x | y),
    "sxor": lambda x, y: signed(x ^ y),
    "sshll": _shift_left,
    "sshllo": _shift_left_ones,
    "sshrl": lambda x, y: signed((x & _WORD) >> y) if y < 32 else 0,
    "sshra": lambda x, y: signed(x >> min(y, 31)),
}

UNKNOWN_OPERATION = object()


def load_address(parts: list[Value]) -> Value:
    """Sum of offsets and at most one object; a second mention of the same object only notes where it came from."""
    total: Value = None
    for part in parts:
        if part is None:
            return None
        if total is None:
            total = part
        elif isinstance(part, Address) and isinstance(total, Address):
            if part.base != total.base:
                return None
        elif isinstance(part, Address):
            total = part.plus(total)
        elif isinstance(total, Address):
            total = total.plus(part)
        else:
            total += part
    return total


def _predicate(name: str, x: Value, y: Value) -> Value:
    if name == "pneg":
        return None if x is None else not x
    if name == "por":
        if x is True or y is True:
            return True
        return None if x is None or y is None else bool(x or y)
    if name in ("pand", "pnand"):
        if x is False or y is False:
            both: bool | None = False
        elif x is None or y is None:
            return None
        else:
            both = bool(x and y)
        return both if name == "pand" else not both
    if x is None or y is None:
        return None
    return bool(x) != bool(y) if name == "pxor" else not (x or y)


def _on_addresses(operation: str, x: Value, y: Value) -> Value:
    name = operation.split(".")[0]
    if name == "sshll":  # a change of units
        return x
    if isinstance(x, Address) and isinstance(y, int) and name in ("sadd", "ssub"):
        return x.plus(y if name == "sadd" else -y)
    if isinstance(y, Address) and isinstance(x, int) and name == "sadd":
        return y.plus(x)
    if name != "scmp" or not (isinstance(x, Address) and isinstance(y, Address)) or x.base != y.base:
        return None
    return None if None in (x.offset, y.offset) else _COMPARE[operation.split(".")[1]](x.offset, y.offset)


def compute(operation: str, arguments: list[Value]) -> Value:
    """Result of one scalar instruction; None if it cannot be known, `UNKNOWN_OPERATION` if the name is not."""
    x = arguments[0] if arguments else None
    y = arguments[1] if len(arguments) > 1 else None
    name, *suffixes = operation.split(".")
    if name in ("smov", "pmov", "int_to_ptr", "ptr_to_int"):
        return x
    if name == "scalar_lea":
        return load_address(arguments)
    if name == "scalar_select":
        if x is None:
            return y if y == arguments[2] else None
        return y if x else arguments[2]
    if name in ("por", "pand", "pnand", "pneg", "pxor", "pnor"):
        return _predicate(name, x, y)
    if isinstance(x, Address) or isinstance(y, Address):
        return _on_addresses(operation, x, y)
    if name in ("sand", "smul") and (x == 0 or y == 0):
        return 0
    if x is None or (y is None and len(arguments) > 1):
        return None
    return _on_numbers(operation, name, suffixes, x, y)


def _on_numbers(operation: str, name: str, suffixes: list[str], x: Value, y: Value) -> Value:
    if name == "scmp":
        if suffixes[1].startswith("f"):
            return None
        if suffixes[1].startswith("u"):
            x, y = x & _WORD, y & _WORD
        return _COMPARE[suffixes[0]](x, y)
    if name in _INTEGER:
        return _INTEGER[name](x, y)
    if name == "smul":
        if len(suffixes) > 1:  # halves of a wide product
            wide = (x & _WORD) * (y & _WORD)
            return signed(wide >> 32 if operation.endswith("high") else wide)
        return signed(x * y)
    if name in ("smin", "smax"):
        choose = min if name == "smin" else max
        return signed(choose(x & _WORD, y & _WORD)) if operation.endswith("u32") else choose(x, y)
    if name == "sclz":
        return 32 - (x & _WORD).bit_length()
    if name == "spopcnt":
        return (x & _WORD).bit_count()
    # Read back from a vector, or a number on its way into one.
    return None if name in ("spop", "scvt") else UNKNOWN_OPERATION
