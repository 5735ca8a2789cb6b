"""The transitions of a configuration, compiled: one set for all configurations that share a program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from hybrid_kv.cache.config import CacheConfig

# Transitions are hundreds of small operations: optimising their machine code was measured to change
# no run time and to make compilation a third longer; handing one to several threads takes longer than it; and constants
# that are moved out of loops are computed even where the loop has no round.
_OPTIONS = {
    "xla_backend_optimization_level": 1,
    "xla_cpu_multi_thread_eigen": False,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
}


@functools.cache
def _compiled(transition: Callable[..., Any], config: CacheConfig, consumes: bool) -> Callable[..., Any]:
    donated = (0,) if consumes else ()
    return jax.jit(functools.partial(transition, config), donate_argnums=donated, compiler_options=_OPTIONS)


def compiled(transition: Callable[..., Any], config: CacheConfig, consumes: bool = True) -> Callable[..., Any]:
    """`transition(config, state, ...)` as a compiled function of (state, ...).

    consumes: the state given is used up, so that nothing is copied; not for those that only read.
    """
    return _compiled(transition, config.program, consumes)


def make_room(most: int = 48) -> None:
    """Drop all compiled programs if there are more than `most` transitions: each takes memory maps of the process, of
    which Linux gives it 65,530. For those that go through many configurations; whoever uses one again compiles it."""
    if _compiled.cache_info().currsize > most:
        _compiled.cache_clear()
        jax.clear_caches()
