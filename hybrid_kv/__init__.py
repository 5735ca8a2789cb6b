"""Prefix caching, scheduling and context-parallel geometry for hybrid models in JAX.

The names most users need are here; they load when first used, so that the pure core can be
imported without the runtime.
"""

from typing import TYPE_CHECKING, Any

from hybrid_kv.errors import UserError

if TYPE_CHECKING:
    from hybrid_kv.planning import CacheOptions
    from hybrid_kv.runtime.engine import Engine, EngineStats, RequestResult, SamplingParams, StepOutput

__all__ = [
    "CacheOptions",
    "Engine",
    "EngineStats",
    "RequestResult",
    "SamplingParams",
    "StepOutput",
    "UserError",
]

_ROOMS = {"CacheOptions": "hybrid_kv.planning"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hybrid_kv' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_ROOMS.get(name, "hybrid_kv.runtime.engine")), name)
