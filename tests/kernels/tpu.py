"""Pallas TPU kernels without a TPU: interpreted with checks, or compiled ahead of time for named chips."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def across_chips(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each case with a chip before it, the chips in turn: every case is compiled, and for every chip several."""
    return [(chip, *case) for chip, case in zip(itertools.cycle(TOPOLOGIES), cases)]


# Scratch memory starts as NaN and copies happen as late as allowed, so an early read shows.
CHECKED = pltpu.InterpretParams(detect_races=True)
PLAIN = pltpu.InterpretParams()


def compile_for(chip: str, fn, *arguments, **jit):
    """Compiles `fn` for one device of a chip; arguments are (shape, dtype)."""
    pytest.importorskip("libtpu")
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "TPU_LOG_DIR": "disabled",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)  # read when the library is first loaded
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(topology_name=TOPOLOGIES[chip], platform="tpu")
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in arguments]
    with jax.set_mesh(mesh):
        return jax.jit(fn, **jit).lower(*shapes).compile()
