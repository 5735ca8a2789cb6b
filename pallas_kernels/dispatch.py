"""Choice of an implementation: None picks by platform, a named one never falls back."""

from collections.abc import Callable, Mapping

import jax


class ImplementationError(ValueError):
    """A kernel implementation was named that this op does not have."""


def choose(op: str, implementation: str | None, available: Mapping[str, Callable]) -> Callable:
    """The callable that runs `op`.

    Args:
      op: name used in the message.
      implementation: "tpu", "gpu", "xla" or "reference"; None takes the one named like the platform of
        the default device, else, off the CPU, the parallel form in plain XLA, else the reference.
      available: implementations that exist, by name. "reference" always does.

    Raises:
      ImplementationError: the named implementation does not exist for this op.
    """
    if implementation is None:
        platform = jax.default_backend()
        parallel = available["reference"] if platform == "cpu" else available.get("xla", available["reference"])
        return available.get(platform, parallel)
    if implementation not in available:
        exist = ", ".join(sorted(available))
        raise ImplementationError(f"{op}: implementation {implementation!r} does not exist; this op has: {exist}")
    return available[implementation]
