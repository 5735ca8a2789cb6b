"""Transitions compiled for the CPU back end: one set for all configurations that share a program."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any, Literal

import jax

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.schedule import pieces

# Transitions are hundreds of small operations: optimising their machine code beyond this was measured to change
# no run time and to make compilation a third longer; handing one to several threads takes longer than it; and constants
# that are moved out of loops are computed even where the loop has no round.
_OPTIONS: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 1,
    "xla_cpu_multi_thread_eigen": False,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
}
# Writes to places of an array become loops, which a single kernel can have inside.
_IN_KERNELS: dict[str, bool | int | str] = {"xla_cpu_use_fusion_emitters": False}
# Half the time to compile, and more to run where many keys are looked up or filed.
_QUICK: dict[str, bool | int | str] = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
# How a transition is made machine code of: one kernel; one for each `pieces.piece` of it, since large ones take long to
# compile; or many, one an operation.
Kernels = Literal["one", "pieces", "many"]


def prefer_quick_compilation() -> None:
    """From now on compile for programs that run a few times: in tests, or over many configurations."""
    _OPTIONS.update(_QUICK)


def dispatch_inline() -> None:
    """Let the CPU back end run programs in the thread that calls them; JAX's default is to hand each to another thread,
    which takes longer than a step. For processes in which that back end is there for the scheduler. Call it before
    anything runs: JAX looks only once."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)


@functools.cache
def _compiled(
    transition: Callable[..., Any], config: CacheConfig, consumes: bool, seldom: bool, kernels: Kernels
) -> Callable[..., Any]:
    donated = (0,) if consumes else ()
    step: Callable[..., Any] = functools.partial(transition, config)
    # A utility is put in order by a sort, which no kernel has inside.
    if kernels != "many" and config.utility is None and pieces.work(*_options(_IN_KERNELS).items()):
        options = _options(_IN_KERNELS | (_QUICK if seldom else {}))
        step = pieces.in_one_piece(step, consumes) if kernels == "one" else pieces.in_pieces(step)
    else:
        options = _options(_QUICK if seldom else {})
    return jax.jit(step, donate_argnums=donated, compiler_options=options)


def _options(more: Mapping[str, bool | int | str]) -> dict[str, bool | int | str]:
    return {name: value for name, value in {**_OPTIONS, **more}.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: bool | int | str) -> bool:
    """Whether this version of the compiler has an option; they come and go."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def compiled(
    transition: Callable[..., Any],
    config: CacheConfig,
    consumes: bool = True,
    seldom: bool = False,
    kernels: Kernels = "one",
) -> Callable[..., Any]:
    """`transition(config, state, ...)` as a compiled function of (state, ...).

    consumes: the state given is used up, so that nothing is copied; not for those that only read. seldom: compile for
    something that is not done in most steps. kernels: see `Kernels`.
    """
    return _compiled(transition, config.program, consumes, seldom, kernels)


def compile_together(calls: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
    """Compile programs (of `compiled`) for these arguments, as many at a time as there are processors; nothing is run
    and nothing used up. Arguments may be `jax.ShapeDtypeStruct`."""
    with _no_collections(), futures.ThreadPoolExecutor(os.cpu_count()) as workers:
        # Tracing goes on while others are compiled.
        for job in [workers.submit(program.lower(*given).compile) for program, given in calls]:
            job.result()


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Without Python's search for unreachable cycles: tracing makes millions of objects and few cycles, and a tenth of
    its time would go into looking."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def make_room(most: int = 48) -> None:
    """Drop all compiled programs if there are more than `most` transitions: each takes memory maps of the process, of
    which Linux gives it 65,530. For those that go through many configurations; whoever uses one again compiles it."""
    if _compiled.cache_info().currsize > most:
        _compiled.cache_clear()
        jax.clear_caches()
