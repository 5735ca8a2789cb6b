"""Functions that several programs have inside, traced once for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax

T = TypeVar("T")


def traced_once(function: Callable[..., T]) -> Callable[..., T]:
    """`function(config, ...)`, of which the trace is kept for whatever else has it inside. All but the configuration
    are trees of arrays."""
    return functools.wraps(function)(jax.jit(function, static_argnums=0, inline=True))
