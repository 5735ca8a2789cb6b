"""Packages that must stay portable import only what they are allowed to, directly."""

import grimp
import pytest

# Beside themselves. The layers in pyproject.toml say which way imports point; these say how few there are.
ALLOWED = {
    "pallas_kernels": set(),
    "hybrid_kv.geometry": {"errors", "typing"},
    "hybrid_kv.hashing": {"errors", "typing"},
    "hybrid_kv.simulate": {"geometry", "hashing", "cache", "schedule", "errors", "typing"},
    "hybrid_kv.models": {"geometry", "sharding", "errors", "typing", "pallas_kernels"},
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("hybrid_kv", "pallas_kernels", cache_dir=None)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_package_imports_only_its_allowed_few(graph: grimp.ImportGraph, package: str) -> None:
    allowed = {name if name in graph.modules else f"hybrid_kv.{name}" for name in ALLOWED[package]} | {package}
    members = {package} | graph.find_descendants(package)
    found = {
        (importer, imported)
        for importer in members
        for imported in graph.find_modules_directly_imported_by(importer)
        if not any(imported == name or imported.startswith(name + ".") for name in allowed)
    }
    assert not found
