"""From a model's layers to groups, pools and bytes; see `docs/08-planning.md`."""

from hybrid_kv.planning.options import CacheOptions, CachePlan, CacheShape, plan_cache

__all__ = ["CacheOptions", "CachePlan", "CacheShape", "plan_cache"]
