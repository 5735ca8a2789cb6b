"""What the linters, the type checker and the import contracts say is part of the suite."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "tool",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy",),
        ("lint-imports",),
    ],
    ids=["ruff check", "ruff format", "mypy", "import-linter"],
)
def test_tool_is_content(tool: tuple[str, ...], repo_root: Path) -> None:
    # All of them are commands of the environment that runs the tests.
    program = Path(sys.executable).with_name(tool[0])
    done = subprocess.run([program, *tool[1:]], cwd=repo_root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(tool)}\n{done.stdout}{done.stderr}"
