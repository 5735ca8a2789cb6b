"""Pallas TPU kernels without a TPU: interpreted with checks, or compiled ahead of time for named chips."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from hybrid_kv.chipless import compile
from hybrid_kv.chipless.compile import Compilation
from hybrid_kv.chipless.targets import CHIPS, compiler_installed


def across_chips(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each case with a chip before it, the chips in turn: every case is compiled, and for every chip several."""
    return [(chip, *case) for chip, case in zip(itertools.cycle(CHIPS), cases)]


# Scratch memory starts as NaN and copies happen as late as allowed, so an early read shows.
CHECKED = pltpu.InterpretParams(detect_races=True)
PLAIN = pltpu.InterpretParams()


def compile_for(chip: str, fn: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()) -> Compilation:
    """Compiles `fn` for one device of a chip; arguments are (shape, dtype), or pytrees of shapes with a dtype."""
    if not compiler_installed():
        pytest.skip("libtpu is not installed (extra aot)")
    given = [jax.ShapeDtypeStruct(*each) if type(each) is tuple else each for each in arguments]
    return compile.compile_for(chip, fn, *given, donate=donate)
