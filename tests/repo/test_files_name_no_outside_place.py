"""No project file names a folder of one machine or a place outside the repository."""

import re
import subprocess
from pathlib import Path

import pytest

# Spelled in parts so that this file does not find itself.
OUTSIDE = re.compile("|".join(("/" + "work/", "/" + "root/", "/" + "home/", r"\.\./" + "shared", "/" + r"tmp/[a-z]")))


def project_files(root: Path) -> list[Path]:
    """Tracked and new files that git does not ignore; ignored ones are nobody's business."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.decode().split("\0") if name and (path := root / name).is_file()]


def test_no_file_names_a_place_outside(repo_root: Path) -> None:
    found = []
    for path in project_files(repo_root):
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if OUTSIDE.search(line):
                found.append(f"{path.relative_to(repo_root)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


def test_no_file_is_a_link_or_larger_than_5_mb(repo_root: Path) -> None:
    files = project_files(repo_root)
    assert not [path for path in files if path.is_symlink()]
    assert not [path for path in files if path.stat().st_size > 5_000_000]
