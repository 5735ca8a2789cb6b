"""A function as one kernel of XLA's CPU back end.

The back end makes a kernel of every operation and a graph of the kernels, and running that graph takes several times as
long as the few thousand instructions that a transition is. It also knows functions that become a single kernel, loops
and all: it marks small loops as such by itself, and here whole transitions are marked. What such a kernel cannot have
inside is a sort, a call of another library, and an array without elements or one that nothing depends on.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from hybrid_kv.cache.state import read_first, zero_after

_MARK = {"xla_cpu_small_call": "true", "inlineable": "false"}
_SPLITTING = contextvars.ContextVar("splitting", default=False)


def in_pieces(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, to be jitted for the CPU, with a kernel for every `piece` that it calls."""

    def call(*args):
        token = _SPLITTING.set(True)
        try:
            return step(*args)
        finally:
            _SPLITTING.reset(token)

    return call


def piece(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(config, state, ...)`, which returns the state first, a kernel of its own in programs of which that is
    asked (`in_pieces`). A kernel takes the longer to compile the larger it is, out of proportion."""

    @functools.wraps(function)
    def call(config, state, *args):
        if _SPLITTING.get():
            return _split_off(functools.partial(function, config), True, state, *args)
        return function(config, state, *args)

    return call


def reading_piece(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a function that only reads; where it is no kernel it is `read_first`, which comes to the same."""

    @functools.wraps(function)
    def call(config, state, *args):
        if _SPLITTING.get():
            return _split_off(functools.partial(function, config), False, state, *args)
        return read_first(lambda state: function(config, state, *args), state)

    return call


def _split_off(step: Callable[..., Any], consumes: bool, *args: Any) -> Any:
    token = _SPLITTING.set(False)
    try:
        return in_one_piece(step, consumes)(*args)
    finally:
        _SPLITTING.reset(token)


def in_one_piece(step: Callable[..., Any], consumes: bool) -> Callable[..., Any]:
    """`step`, to be jitted for the CPU, as a single kernel. Some result is of whole numbers or bool.

    consumes: the first argument is given up and the first results take its place, leaf by leaf.
    """

    def call(*args):
        leaves, tree = jax.tree.flatten(args)
        own = len(jax.tree.leaves(args[0])) if consumes else 0
        shapes: list[jax.ShapeDtypeStruct] = []
        made: list[Any] = []

        def piece(*given):
            filled = iter(given)
            full = [next(filled) if leaf.size else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
            results, result_tree = jax.tree.flatten(step(*jax.tree.unflatten(tree, full)))
            made.append(result_tree)
            shapes.extend(jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results)
            ends = [*results[:own], *full[own:]]
            small = min((each.size, nth) for nth, each in enumerate(results) if each.size and _is_whole(each))[1]
            results[small] = results[small] ^ zero_after(ends).astype(results[small].dtype)
            return [result for result in results if result.size]

        found = jax.jit(piece)(*[leaf for leaf in leaves if leaf.size])
        found[0] = set_xla_metadata(found[0], **_MARK)
        rest = iter(found)
        results = [next(rest) if each.size else jnp.zeros(each.shape, each.dtype) for each in shapes]
        return jax.tree.unflatten(made[0], results)

    return call


def _is_whole(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == bool


@functools.cache
def work(*options: tuple[str, bool | int | str]) -> bool:
    """Whether there is a CPU back end and this version of the compiler makes such kernels of it, with `options`."""

    def sample(values: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, at[0] + 2, lambda _, values: values.at[at].add(values.sum(), mode="drop"), values)

    piece = jax.jit(in_one_piece(sample, consumes=True), compiler_options=dict(options))
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            given = jnp.arange(8, dtype=jnp.int32), jnp.array([1, 9], jnp.int32)
            return bool((piece(*given) == sample(*given)).all())
    except (jax.errors.JaxRuntimeError, RuntimeError):
        return False
