"""The interpreter of Mosaic GPU kernels, which JAX does not export yet."""

import jax
import pytest


def gpu_interpreter():
    """Parameters for `interpret`: on the CPU, races are looked for, memory that nobody wrote to is NaN."""
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    return params.InterpretGPUParams(detect_races=True)


def assert_no_races(capsys) -> None:
    """Races are printed, not raised."""
    jax.effects_barrier()
    assert "RACE DETECTED" not in capsys.readouterr().out
