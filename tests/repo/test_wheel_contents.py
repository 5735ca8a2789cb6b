"""The wheel holds the two packages with all their modules, the licence and the command; nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hybrid_kv.chipless.slices import slice_names
from hybrid_kv.models.published import NAMES


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # From a copy, so that no build folder is left in the checkout and none there gets in.
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for item in ("pyproject.toml", "LICENSE", "README.md"):
        if (repo_root / item).exists():
            shutil.copy(repo_root / item, source)
    for package in ("hybrid_kv", "pallas_kernels"):
        shutil.copytree(repo_root / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", work / "dist", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (work / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_module_is_in_the_wheel_and_nothing_else(wheel: zipfile.ZipFile, repo_root: Path) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in packed} == {"hybrid_kv", "pallas_kernels"}
    modules = {
        str(path.relative_to(repo_root))
        for package in ("hybrid_kv", "pallas_kernels")
        for path in (repo_root / package).rglob("*.py")
    }
    assert {name for name in packed if name.endswith(".py")} == modules


def test_configurations_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    files = [f"models/{name}.json" for name in NAMES] + [f"slices/{name}.toml" for name in slice_names()]
    assert {f"hybrid_kv/configs/{file}" for file in files} <= {*wheel.namelist()}


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    def read(ending: str) -> str:
        (name,) = (name for name in wheel.namelist() if name.endswith(ending))
        return wheel.read(name).decode()

    metadata = read(".dist-info/METADATA")
    assert "Name: hybrid-kv\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "hybrid-kv = hybrid_kv.cli:main" in read("entry_points.txt")
    assert "Apache License" in read("LICENSE")
    # The core stays lean: everything else is an extra.
    required = {line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line}
    assert len(required) == 7
