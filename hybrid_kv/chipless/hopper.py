"""Compile a function for one H100, with no GPU at hand, and read what the assembler says of its kernels."""

import functools
import importlib.util
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from hybrid_kv.chipless.compile import Compilation
from hybrid_kv.errors import UserError

# The device as the compiler wants it described; the accelerated features are what allows matrix products of a
# warpgroup.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  device_memory_size: 84978434048
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclass(frozen=True)
class Assembled:
    """A kernel as assembled.

    Attributes:
      registers: of a thread.
      spilled: bytes that a thread spills, stores and loads.
      serialized: the assembler makes every matrix product wait for the one before.
    """

    name: str
    registers: int
    spilled: int
    serialized: bool = False


def hopper_compiler_installed() -> bool:
    """Whether kernels can be compiled for GPUs here: the plugin of JAX and the assembler."""
    return all(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "nvidia"))


def read_assembler(text: str) -> Assembled:
    """What the assembler (ptxas -v) printed of one kernel.

    Raises:
      ValueError: it printed something else.
    """
    name = re.search(r"Function properties for (\S+)", text)
    used = re.search(r"Used (\d+) registers", text)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if not (name and used and spilled):
        raise ValueError(f"not the assembler's report of a kernel: {text[:200]!r}")
    kernel, serialized = (
        name[1].removesuffix("_mosaic_gpu_kernel"),
        "wgmma.mma_async instructions are serialized" in text,
    )
    return Assembled(kernel, int(used[1]), int(spilled[1]) + int(spilled[2]), serialized)


@functools.cache
def _device() -> Any:
    topology = topologies.get_topology_desc(platform="cuda", topology_name="h100", topology="1x1x1", target_config=H100)
    return topology.devices[0]


@contextmanager
def _dumped() -> Iterator[Path]:
    """A folder that Mosaic GPU writes to, which it looks up for every kernel."""
    names = {"MOSAIC_GPU_DUMP_TO": "", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(names | {"MOSAIC_GPU_DUMP_TO": folder})
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def compile_for_hopper(
    function: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()
) -> tuple[Compilation, list[Assembled]]:
    """Compile `function` for one H100: what compiling told, and its Mosaic GPU kernels.

    Args:
      arguments: arrays or `jax.ShapeDtypeStruct`s, or pytrees of them; only shapes are used.
      donate: positions of arguments whose memory the outputs take over.

    Raises:
      UserError: the compiler is not installed.
      jax.errors.JaxRuntimeError, ValueError, NotImplementedError: what the compiler refuses.
    """
    if not hopper_compiler_installed():
        raise UserError("jax-cuda13-plugin", "not installed", "install it with: pip install 'hybrid-kv[aot]'")
    sharding = SingleDeviceSharding(_device())

    def shape(value: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(value), jax.dtypes.result_type(value), sharding=sharding)

    given = jax.tree.map(shape, arguments)
    began = time.perf_counter()
    with _dumped() as folder:
        executable = jax.jit(function, donate_argnums=tuple(donate)).lower(*given).compile()
        kernels = [read_assembler(file.read_text()) for file in sorted(folder.glob("*.ptxas"))]
    memory: Any = executable.memory_analysis()
    compilation = Compilation(
        executable,
        time.perf_counter() - began,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
    )
    return compilation, kernels
