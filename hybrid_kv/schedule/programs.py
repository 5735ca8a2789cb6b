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
_OPTIONS: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 1,
    "xla_cpu_multi_thread_eigen": False,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
}

# Half the time to compile, and more to run where many keys are looked up or filed.
_QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def prefer_quick_compilation() -> None:
    """From now on compile for programs that run a few times: in tests, or over many configurations."""
    _OPTIONS.update(_QUICK)


@functools.cache
def _compiled(transition: Callable[..., Any], config: CacheConfig, consumes: bool) -> Callable[..., Any]:
    donated = (0,) if consumes else ()
    options = {name: value for name, value in _OPTIONS.items() if _is_known(name, value)}
    return jax.jit(functools.partial(transition, config), donate_argnums=donated, compiler_options=options)


@functools.cache
def _is_known(name: str, value: bool | int | str) -> bool:
    """Whether this version of the compiler has an option; they come and go."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


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
