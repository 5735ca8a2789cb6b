"""The chips kernels are compiled for, and the one place that sets the environment of the compiler.

Figures are per TensorCore, as a JAX device sees it: v5p shows both cores of a chip as one device but a kernel
runs on one; tpu7x shows two devices a chip.
"""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from hybrid_kv.errors import UserError


@dataclass(frozen=True)
class Chip:
    """What the cost of a kernel depends on.

    Attributes:
      name: as in `CHIPS`.
      topology: the smallest slice, as the compiler names it.
      clock: Hz; the vendor's peak over twice the multiply-adds per cycle.
      macs: bf16 multiply-adds per cycle of all matrix units.
      fp8_macs: the same for fp8 operands.
      hbm_bandwidth: bytes per second, the vendor's figure for one core.
      vmem: bytes of vector memory.
      branch_delay: bundles that still issue after a taken branch.
      dma_latency: cycles from the issue of a small copy to its landing, fitted to the compiler's own model.
    """

    name: str
    topology: str
    clock: float
    macs: int
    fp8_macs: int
    hbm_bandwidth: float
    vmem: int
    branch_delay: int
    dma_latency: int

    @property
    def hbm_bytes_per_cycle(self) -> float:
        return self.hbm_bandwidth / self.clock

    def limit(self, hbm_bytes: float = 0, macs: float = 0) -> "Limit":
        """The fewest cycles in which this much can be moved and multiplied (bf16)."""
        return Limit(hbm=hbm_bytes / self.hbm_bytes_per_cycle, mxu=macs / self.macs)


@dataclass(frozen=True)
class Limit:
    """Cycles below which no kernel can be, by the unit that says so."""

    hbm: float
    mxu: float

    @property
    def cycles(self) -> float:
        return max(self.hbm, self.mxu)

    @property
    def unit(self) -> str:
        return "HBM" if self.hbm >= self.mxu else "MXU"


_MIB = 1 << 20
_SMALL, _LARGE = 128 * 128, 256 * 256  # sizes of one matrix unit; every chip has four, or two of twice the rate

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v5e", "v5e:2x2", 1.5e9, 4 * _SMALL, 4 * _SMALL, 8.19e11, 128 * _MIB, 4, 780),
        Chip("v5p", "v5p:2x2x1", 1.75e9, 4 * _SMALL, 4 * _SMALL, 2.765e12 / 2, 64 * _MIB, 4, 640),
        Chip("v6e", "v6e:2x2", 1.75e9, 4 * _LARGE, 4 * _LARGE, 1.64e12, 128 * _MIB, 4, 500),
        Chip("tpu7x", "tpu7x:2x2x1", 2.2e9, 4 * _LARGE, 8 * _LARGE, 7.38e12 / 2, 64 * _MIB, 6, 900),
    )
}


def chip_named(name: str) -> Chip:
    """The chip of this name.

    Raises:
      UserError: there is none.
    """
    if name not in CHIPS:
        raise UserError("chip", name, f"known are {', '.join(CHIPS)}")
    return CHIPS[name]


def compiler_installed() -> bool:
    """Whether the ahead-of-time compiler of TPUs can be loaded."""
    return importlib.util.find_spec("libtpu") is not None


# Passes of which the compiler writes text: the schedule with its latency gaps, the code as it is stored, and the
# units each bundle uses. Unfiltered dumps are twenty times as large.
SCHEDULE = "packed-bundles-post-ra"
CODE = "final_bundles"
UNITS = "pre-delay_hlo-static-per-bundle-utilization"


def dump_flags(folder: Path | str) -> str:
    """Flags with which the compiler writes into `folder` what `schedule.read_dump` reads."""
    passes = "|".join((SCHEDULE, CODE, UNITS))
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex=({passes})"
    )


_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # never look for a chip of this machine
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",  # this and the next only silence the start of the library;
    "TPU_ACCELERATOR_TYPE": "v6e-4",  # topologies of all chips compile with it
    "TPU_LOG_DIR": "disabled",  # else every process leaves files in the temporary folder
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process fails on a lock file
}


def _compiler_loaded() -> bool:
    maps = Path("/proc/self/maps")
    return maps.exists() and "libtpu.so" in maps.read_text()


def prepare_environment(dump: Path | str | None = None) -> None:
    """Set what the compiler reads when it is loaded; call it before the first topology is made.

    Args:
      dump: folder to write schedules to; None writes none. It holds for the whole process, because the compiler
        reads its flags once: names of kernels have to differ within a process.

    Raises:
      UserError: the compiler is not installed, or was loaded before with other flags.
    """
    if not compiler_installed():
        raise UserError("libtpu", "not installed", "install it with: pip install 'hybrid-kv[aot]'")
    wanted = dict(_ENVIRONMENT)
    if dump is not None:
        wanted["LIBTPU_INIT_ARGS"] = dump_flags(dump)
    if _compiler_loaded():
        differ = [name for name, value in wanted.items() if os.environ.get(name) != value]
        if differ:
            raise UserError("environment", ", ".join(differ), "libtpu is loaded already; prepare a fresh process first")
    os.environ.update(wanted)
