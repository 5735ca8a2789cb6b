"""Shared by all tests: eight stand-in devices, run-time type checks, data paths."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Before anything imports JAX: it reads these when it starts its CPU devices.
os.environ["JAX_PLATFORMS"] = "cpu"
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()

import jax
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).parent.parent

# Plain Python that calls small functions millions of times: the static checker sees all there is to see.
UNCHECKED = (
    "hybrid_kv.cache.reference",
    "hybrid_kv.chipless",
    "hybrid_kv.simulate.soak",
    "hybrid_kv.simulate.scenarios",
)


def _checked_modules() -> list[str]:
    files = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "hybrid_kv").rglob("*.py")]
    names = [".".join(file.parts) for file in files if file.name != "__init__"]
    return ["pallas_kernels", *(name for name in names if not name.startswith(UNCHECKED))]


# Every annotated function of the packages is checked at run time, array shapes included; the hook has to be in
# place before the first test module imports them. HYBRID_KV_TYPE_CHECKS=0 leaves it off, to see what it costs.
if os.environ.get("HYBRID_KV_TYPE_CHECKS") != "0":
    install_import_hook(_checked_modules(), "beartype.beartype")


from hybrid_kv.schedule.programs import prefer_quick_compilation  # behind the hook

prefer_quick_compilation()


@pytest.fixture(autouse=True)
def room_for_compiled_programs() -> Iterator[None]:
    """Drop compiled programs before they use up the memory maps of the process.

    A program on the CPU back end takes about a thousand maps; Linux allows 65,530 and XLA aborts beyond.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def traces_dir(data_dir: Path) -> Path:
    return data_dir / "traces"


@pytest.fixture(scope="session")
def tiny_checkpoint(data_dir: Path) -> Path:
    """A random Kimi Linear of seven layers with reference outputs beside it."""
    return data_dir / "tiny-kimi-linear"
