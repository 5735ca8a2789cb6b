"""Access to the golden vectors and the error measure used against them."""

from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def load(name: str) -> dict[str, np.ndarray]:
    """All arrays of one golden file."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def rel_rmse(got, want) -> float:
    """Root mean square error relative to the root mean square of the truth."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def bound(value) -> float | None:
    """Gate bound of a file: NaN stands for the softplus gate."""
    return None if np.isnan(value) else float(value)
