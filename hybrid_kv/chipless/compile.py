"""Compile a function for one device of a named chip, with no such chip at hand."""

import functools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hybrid_kv.chipless.targets import chip_named, prepare_environment


@dataclass(frozen=True)
class Compilation:
    """A compiled function and what compiling it told.

    Attributes:
      executable: what `jax.stages.Lowered.compile` returned; cannot be run here.
      seconds: lowering and compilation.
      argument_bytes, output_bytes, alias_bytes, temporary_bytes: device memory by purpose; aliased bytes are
        outputs that live in donated arguments.
    """

    executable: Any
    seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int


@functools.cache
def mesh_of(chip: str, devices: int = 1) -> Mesh:
    """Mesh ("x",) of the first devices of the chip's smallest slice."""
    # pltpu.get_tpu_info() and the lowering of kernels ask this mesh, not the machine, for the kind of device.
    prepare_environment()
    topology = topologies.get_topology_desc(topology_name=chip_named(chip).topology, platform="tpu")
    return Mesh(np.array(topology.devices[:devices]), ("x",))


def compile_for(
    chip: str, function: Callable[..., Any], *arguments: Any, donate: Sequence[int] = (), static: Sequence[int] = ()
) -> Compilation:
    """Compile `function` for one device of `chip`.

    Args:
      arguments: arrays or `jax.ShapeDtypeStruct`s, or pytrees of them; only shapes are used, so nothing is allocated
        for the latter. Give pools their real size: XLA moves small operands into vector memory ahead of a kernel.
      donate: positions of arguments whose memory the outputs take over.
      static: positions of arguments that are constants.

    Raises:
      UserError: unknown chip, or the compiler is not installed.
      jax.errors.JaxRuntimeError, ValueError, NotImplementedError: what the compiler refuses.
    """
    mesh = mesh_of(chip)
    replicated = NamedSharding(mesh, PartitionSpec())

    def shape(value: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(value), jax.dtypes.result_type(value), sharding=replicated)

    given = [a if i in static else jax.tree.map(shape, a) for i, a in enumerate(arguments)]
    began = time.perf_counter()
    with jax.set_mesh(mesh):
        jitted = jax.jit(function, donate_argnums=tuple(donate), static_argnums=tuple(static))
        executable = jitted.lower(*given).compile()
    seconds = time.perf_counter() - began
    memory: Any = executable.memory_analysis()
    return Compilation(
        executable,
        seconds,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def refusal(error: Exception) -> str:
    """The first telling line of what the compiler refused."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    telling = [
        line for line in lines if re.search(r"RESOURCE_EXHAUSTED|INTERNAL|INVALID|Unsupported|not implemented", line)
    ]
    return (telling or lines or [type(error).__name__])[0].strip()
