"""Scalar operands of a kernel, from the public function that calls it.

The replay needs grid sizes and prefetched scalars as the wrapper around the kernel computes them. They are found by
tracing that wrapper and evaluating, on the CPU, only what follows from the arguments given as arrays; pools and
activations can stay `jax.ShapeDtypeStruct`s and are never allocated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

from hybrid_kv.chipless.compile import mesh_of

# Larger operands are data, not scalars.
_MOST_WORDS = 1 << 18


class _Unknown:
    """Stands for a value that depends on an argument of which only the shape is given."""


_UNKNOWN = _Unknown()


@dataclass(frozen=True)
class KernelCall:
    """One `pallas_call` met on the way.

    Attributes:
      name: of the kernel.
      scalars: integer operands that are known, by position in the compiled call.
      missing: positions of grid sizes and prefetched scalars that are not known.
    """

    name: str
    scalars: dict[int, np.ndarray]
    missing: tuple[int, ...]


def kernel_calls(chip: str, function: Callable[..., Any], *arguments: Any) -> list[KernelCall]:
    """The kernels that `function` calls on `chip`, in order, with their scalar operands.

    Args:
      arguments: arrays where scalars depend on them, `jax.ShapeDtypeStruct`s elsewhere, or pytrees of both.

    Kernels inside a `scan`, `while_loop` or `cond` are not found: wrap the body instead.
    """
    with jax.set_mesh(mesh_of(chip)):
        closed = jax.make_jaxpr(function)(*arguments)
    leaves = jax.tree.leaves(arguments)
    values = [_UNKNOWN if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf) for leaf in leaves]
    calls: list[KernelCall] = []
    _evaluate(closed.jaxpr, closed.consts, values, calls)
    return calls


def _evaluate(jaxpr: Jaxpr, constants: Any, arguments: list[Any], calls: list[KernelCall]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        outputs: list[Any] = [_UNKNOWN] * len(equation.outvars)
        inner = equation.params.get("jaxpr")
        if equation.primitive.name == "pallas_call":
            calls.append(_call(equation.params, inputs))
        elif equation.primitive.name in ("jit", "pjit", "closed_call") and inner is not None:
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs, calls)
        elif equation.primitive.name == "with_memory_space_constraint":  # has no meaning outside of a compilation
            outputs = inputs
        elif not any(value is _UNKNOWN for value in inputs):
            result = equation.primitive.bind(*inputs, **equation.params)
            outputs = list(result) if equation.primitive.multiple_results else [result]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _call(params: Mapping[str, Any], inputs: list[Any]) -> KernelCall:
    grid = params["grid_mapping"]
    needed = grid.num_dynamic_grid_bounds + grid.num_index_operands
    known = {i: np.asarray(value) for i, value in enumerate(inputs) if value is not _UNKNOWN}
    scalars = {
        i: value
        for i, value in known.items()
        if value.size <= _MOST_WORDS and (value.dtype == bool or np.issubdtype(value.dtype, np.integer))
    }
    return KernelCall(params["name"] or "", scalars, tuple(i for i in range(needed) if i not in scalars))
