"""What the kernel benchmark measures: cases with their stored limits.

Each module of `hybrid_kv.chipless.kernels` holds the cases of one kernel in a tuple `CASES`; a new module there is
found by itself.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hybrid_kv.errors import UserError

_ROOM = "hybrid_kv.chipless.kernels"


@dataclass(frozen=True)
class Problem:
    """A function to compile and the least it has to do.

    Attributes:
      function: public wrapper of the kernel; every `pallas_call` in it needs a name.
      arguments: arrays where the scalars of the kernel depend on them, else `jax.ShapeDtypeStruct`s of the real size.
      hbm_bytes: that have to be read and written.
      macs: bf16 multiply-adds that have to be done, 0 if they can be neglected.
      donate: positions of arguments updated in place.
      per: how many of what the cycles are also given for, such as (128, "row").
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    hbm_bytes: float
    macs: float = 0
    donate: tuple[int, ...] = ()
    per: tuple[int, str] = (1, "call")


@dataclass(frozen=True)
class Case:
    """One problem, measured on some chips.

    Attributes:
      name: within its kernel, such as "decode-128".
      build: makes the problem; called in the process that compiles.
      cycles: by chip, the most that a test lets pass: what was measured and 5 to 10 % of room. Change it in the
        commit that changes the kernel.
      bundles: the same for the code, which is also what bounds the time to compile.
    """

    name: str
    build: Callable[[], Problem]
    cycles: Mapping[str, int]
    bundles: Mapping[str, int]

    @property
    def chips(self) -> tuple[str, ...]:
        return tuple(self.cycles)


@dataclass(frozen=True)
class Composite:
    """A function with kernels inside of loops, measured in parts: its kernels as cases, the rest as XLA estimates it.

    Attributes:
      name: within its kernel.
      build: makes the problem; its `macs` and `hbm_bytes` are what the sum is compared with.
      chips: that it is for.
      kernels: cases of the kernel, and how often each runs.
      loops: name and trips of the loops, from the outermost; trips are for one trip of the loop around.
      moved: bytes to and from high-bandwidth memory that are in neither.
    """

    name: str
    build: Callable[[], Problem]
    chips: tuple[str, ...]
    kernels: tuple[tuple[str, float], ...]
    loops: tuple[tuple[str, int], ...]
    moved: int = 0


def limited(name: str, build: Callable[[], Problem], limits: Mapping[str, tuple[int, int]] | None = None) -> Case:
    """A case whose limits are given together: by chip, the most cycles and bundles."""
    stored = limits or {}
    return Case(
        name,
        build,
        {chip: cycles for chip, (cycles, _) in stored.items()},
        {chip: bundles for chip, (_, bundles) in stored.items()},
    )


def kernel_names() -> tuple[str, ...]:
    """Kernels that have cases."""
    room = importlib.import_module(_ROOM)
    return tuple(sorted(module.name for module in pkgutil.iter_modules(room.__path__)))


def cases_of(kernel: str) -> tuple[Case, ...]:
    """The cases of one kernel.

    Raises:
      UserError: it has none.
    """
    cases: tuple[Case, ...] = _module(kernel).CASES
    return cases


def composites_of(kernel: str) -> tuple[Composite, ...]:
    """What is measured in parts, of one kernel; most have nothing.

    Raises:
      UserError: the kernel has no cases.
    """
    composites: tuple[Composite, ...] = getattr(_module(kernel), "COMPOSITES", ())
    return composites


def _module(kernel: str) -> ModuleType:
    if kernel not in kernel_names():
        raise UserError("kernel", kernel, f"with cases are {', '.join(kernel_names())}")
    return importlib.import_module(f"{_ROOM}.{kernel}")
