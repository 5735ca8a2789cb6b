"""Under what conditions a report came about: versions, machine, commit."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hybrid_kv

PACKAGES = ("hybrid-kv", "jax", "jaxlib", "numpy", "flax")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide a result; None for one without metadata."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """What matters to the times in a report; nothing that names the machine or its owner."""
    return {"cpu_count": os.cpu_count()}


def commit() -> str | None:
    """The checkout's commit, with `+` if files differ from it; None for an installed package."""
    assert hybrid_kv.__file__ is not None
    root = Path(hybrid_kv.__file__).parent.parent
    if not (root / ".git").exists():  # an installed copy may lie inside somebody else's checkout
        return None
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
