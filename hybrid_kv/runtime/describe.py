"""Everything a model and its cache put on a device, as text: geometry, sharding maps, memory."""

from __future__ import annotations

import jax.numpy as jnp

from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.parameters import Parameter, inventory
from hybrid_kv.models.sources import Experts, PackedExperts, Stack
from hybrid_kv.planning import CachePlan, CacheShape
from hybrid_kv.sharding import ArraySharding, ShardingMap


def cache_shape(model: KimiLinearConfig, dtype: str) -> CacheShape:
    """What the planner has to know of a model."""
    itemsize = jnp.dtype(dtype).itemsize
    return CacheShape(
        mla_layers=model.mla_layers,
        recurrent_layers=model.kda_layers,
        latent=model.latent_width,
        position=model.rope_width,
        heads=model.kda_heads,
        key=model.kda_head_dim,
        value=model.kda_head_dim,
        taps=model.conv_width,
        max_context=model.context_length,
        row_itemsize=itemsize,
        conv_itemsize=itemsize,
        state_axes=model.kda_axes,
    )


def weight_sharding(model: KimiLinearConfig, plan: CachePlan, dtype: str) -> ShardingMap:
    """The map of every parameter, stacked over the layers of its kind; weights are [out, in]."""
    arrays = []
    for name, entry in inventory(model).items():
        axes = _axes(entry)
        itemsize = jnp.dtype(entry.dtype or dtype).itemsize
        arrays.append(ArraySharding(name, entry.shape, axes, entry.spec, itemsize))
    return ShardingMap(plan.mesh, tuple(arrays))


def _axes(entry: Parameter) -> tuple[str, ...]:
    """Names of a parameter's axes: stacking axes first, then [out, in] of a matrix or the values of a vector."""
    stacking = {Stack: ("layer",), Experts: ("layer", "expert"), PackedExperts: ("layer", "expert")}.get(
        type(entry.source), ()
    )
    own = ("out", "in") if len(entry.shape) - len(stacking) == 2 else ("value",)
    return stacking + own


def describe(model: KimiLinearConfig, plan: CachePlan, dtype: str) -> str:
    """Geometry, sharding maps of caches and weights, memory per device."""
    weights = weight_sharding(model, plan, dtype)
    caches, total = plan.sharding.local_bytes, plan.sharding.local_bytes + weights.local_bytes
    memory = (
        f"memory per device: weights {weights.local_bytes / 2**20:.2f} MiB + caches {caches / 2**20:.2f} MiB"
        f" = {total / 2**20:.2f} MiB"
    )
    return "\n".join([plan.report(), "", "weights", weights.table(), "", memory])
