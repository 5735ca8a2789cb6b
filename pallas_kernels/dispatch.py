"""Choice of an implementation: None picks by platform, a named one never falls back."""

import importlib
from collections.abc import Callable, Mapping

import jax

# By name: functions, or "module:function" for those whose module needs a compiler that other platforms may lack.
Implementations = Mapping[str, Callable | str]


class ImplementationError(ValueError):
    """A kernel implementation was named that this op does not have."""


def choose(
    op: str, implementation: str | None, available: Implementations, fits: Callable[[str], bool] = lambda form: True
) -> Callable:
    """The callable that runs `op`.

    Args:
      op: name used in the message.
      implementation: "tpu", "gpu", "xla" or "reference"; None takes the one named like the platform of
        the default device, else, off the CPU, the parallel form in plain XLA, else the reference.
      available: implementations that exist. "reference" always does.
      fits: whether one is for these shapes; those that are not are not taken unless named, and then say why they can't.

    Raises:
      ImplementationError: the named implementation does not exist for this op.
    """
    if implementation is None:
        platform = jax.default_backend()
        parallel = available["reference"] if platform == "cpu" else available.get("xla", available["reference"])
        return _function(available[platform] if platform in available and fits(platform) else parallel)
    if implementation not in available:
        exist = ", ".join(sorted(available))
        raise ImplementationError(f"{op}: implementation {implementation!r} does not exist; this op has: {exist}")
    return _function(available[implementation])


def _function(named: Callable | str) -> Callable:
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    return getattr(importlib.import_module(module), name)


def on_hopper() -> bool:
    """Whether the default device is a GPU that the GPU kernels are made for."""
    return str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9.")
