"""Counts XLA compilations, so that "nothing compiles after warm-up" is a number."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0
_listening = False


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == _EVENT:
        _count += 1


def compilations() -> int:
    """Programs this process has compiled or loaded since the first call."""
    global _listening
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_listen)
        _listening = True
    return _count
