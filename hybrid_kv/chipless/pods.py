"""Slices of pods and GPU meshes by name: their devices for the compiler, and what a device can hold and move.

Figures are per device as JAX sees it: both cores of a v5p chip are one device, each core of a tpu7x chip is one.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.experimental import topologies

from hybrid_kv.chipless.hopper import H100, hopper_compiler_installed
from hybrid_kv.chipless.targets import prepare_environment
from hybrid_kv.errors import UserError

_GIB, _TERA = 2**30, 1e12


@dataclass(frozen=True)
class Device:
    """What the roofline of a step depends on.

    Attributes:
      kernels: implementation of Pallas kernels, see `pallas_kernels.dispatch`.
      hbm: bytes that a program may use; for TPU what the compiler refuses to go beyond.
      bandwidth: of HBM, bytes per second, the vendor's figure.
      flops: bf16, per second, the vendor's dense peak.
      link: bytes per second that leave a device over all its links at once, half of the vendor's bidirectional figure.
    """

    kernels: str
    hbm: float
    bandwidth: float
    flops: float
    link: float


DEVICES = {
    "v5e": Device("tpu", 15.75 * _GIB, 0.819 * _TERA, 197 * _TERA, 0.2 * _TERA),
    "v5p": Device("tpu", 95.74 * _GIB, 2.765 * _TERA, 459 * _TERA, 0.6 * _TERA),
    "v6e": Device("tpu", 31.24 * _GIB, 1.64 * _TERA, 918 * _TERA, 0.4 * _TERA),
    "tpu7x": Device("tpu", 94.74 * _GIB, 3.69 * _TERA, 1153.5 * _TERA, 0.3 * _TERA),
    "h100": Device("gpu", 79.1 * _GIB, 3.35 * _TERA, 989 * _TERA, 0.45 * _TERA),
}


@dataclass(frozen=True)
class Pod:
    """A slice: its name as the compiler takes it, such as "v6e:4x4", and its devices, which cannot run anything."""

    topology: str
    chip: str
    devices: tuple[Any, ...]

    @property
    def device(self) -> Device:
        return DEVICES[self.chip]


@functools.cache
def pod(topology: str) -> Pod:
    """The slice of this name: `v6e:4x4` of TPUs, `h100:8` of GPUs in one host.

    Raises:
      UserError: unknown chip, a shape the compiler has no slice of, or the compiler is not installed.
    """
    chip, _, shape = topology.partition(":")
    if chip not in DEVICES or not shape:
        fix = f"write chip and shape, as v6e:4x4 or h100:8; chips are {', '.join(DEVICES)}"
        raise UserError("topology", topology, fix)
    return Pod(topology, chip, tuple(_gpus(topology, shape) if chip == "h100" else _tpus(topology)))


def _tpus(topology: str) -> Sequence[Any]:
    prepare_environment()
    try:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    except Exception as error:  # the compiler raises several kinds
        raise UserError("topology", topology, f"the compiler has no such slice ({_first_line(error)})") from error


def _gpus(topology: str, shape: str) -> Sequence[Any]:
    if not shape.isdecimal() or not 1 <= int(shape) <= 8:
        raise UserError("topology", topology, "write the GPUs of one host, 1 to 8, as h100:8")
    if not hopper_compiler_installed():
        raise UserError("jax-cuda13-plugin", "not installed", "install it with: pip install 'hybrid-kv[aot]'")
    os.environ["JAX_PLATFORMS"] = "cpu"  # else the plugin looks for a driver, and is not there for the compiler either
    return topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology=f"1x{shape}x1", target_config=H100
    ).devices


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
