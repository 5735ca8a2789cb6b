"""Reading single fields of a JSON object, each with a refusal that names the field, what it holds and the fix."""

import reprlib
from collections.abc import Mapping
from typing import Any

from hybrid_kv.errors import UserError

_MAX = 3.4e38  # what fp32 holds


def refusal(name: str, value: Any, fix: str) -> UserError:
    """Lists and objects are shown shortened: a file may hold long or deep ones."""
    return UserError(name, reprlib.repr(value) if isinstance(value, list | dict) else value, fix)


def given(raw: Mapping, name: str, default: Any = None, prefix: str = "") -> Any:
    """The field, or the default where it is absent or null; a field without a default must be there."""
    value = raw.get(name)
    if value is None and default is None:
        raise UserError(prefix + name, None, "the model configuration must give this field")
    return default if value is None else value


def _is_int(value: Any, low: int) -> bool:
    """JSON true and 1.0 are not integers here; 2**31 and above would not fit the arrays."""
    return type(value) is int and low <= value < 2**31


def integer(raw: Mapping, name: str, low: int = 1, default: int | None = None, prefix: str = "") -> int:
    value = given(raw, name, default, prefix)
    if not _is_int(value, low):
        raise refusal(prefix + name, value, f"must be an integer, at least {low} and below 2**31")
    return value


def number(raw: Mapping, name: str, low: float = -_MAX, default: float | None = None, prefix: str = "") -> float:
    value = given(raw, name, default, prefix)
    # The comparison is false for NaN, and exact for integers that no float can hold.
    if type(value) not in (int, float) or not low <= value <= _MAX:
        raise refusal(prefix + name, value, "must be a finite number" + (f", at least {low}" if low > -_MAX else ""))
    return float(value)


def boolean(raw: Mapping, name: str, default: bool, prefix: str = "") -> bool:
    value = given(raw, name, default, prefix)
    if not isinstance(value, bool):
        raise refusal(prefix + name, value, "must be true or false")
    return value


def integers(raw: Mapping, name: str, low: int, prefix: str = "") -> list[int]:
    value = given(raw, name, prefix=prefix)
    if not isinstance(value, list) or not all(_is_int(entry, low) for entry in value):
        raise refusal(prefix + name, value, f"must be a list of integers, each at least {low} and below 2**31")
    return value
