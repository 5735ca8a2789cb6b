"""From a model's layers to groups, pools and bytes; see `docs/08-planning.md`."""

from hybrid_kv.planning.balance import Demand, balance, trace_demand
from hybrid_kv.planning.groups import LayerGroup, group_layers
from hybrid_kv.planning.layers import LayerSpec
from hybrid_kv.planning.layout import BlockOptions, Layout, PoolLayout, per_shape
from hybrid_kv.planning.options import CacheOptions, CachePlan, CacheShape, plan_cache
from hybrid_kv.planning.sizing import Budget, PoolPlan, size_pools
from hybrid_kv.planning.tables import plan_record, plan_table
from hybrid_kv.planning.unified import least_rows, unified

__all__ = [
    "BlockOptions",
    "Budget",
    "CacheOptions",
    "CachePlan",
    "CacheShape",
    "Demand",
    "LayerGroup",
    "LayerSpec",
    "Layout",
    "PoolLayout",
    "PoolPlan",
    "balance",
    "group_layers",
    "least_rows",
    "per_shape",
    "plan_cache",
    "plan_record",
    "plan_table",
    "size_pools",
    "trace_demand",
    "unified",
]
