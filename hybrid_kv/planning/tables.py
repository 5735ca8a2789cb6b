"""Plans as text tables and as JSON: one row a group, one row a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_kv.geometry import format_table
from hybrid_kv.planning.layers import LayerSpec
from hybrid_kv.planning.sizing import PoolPlan, group_need
from hybrid_kv.planning.unified import least_rows
from hybrid_kv.sharding import MeshSpec


def plan_record(plan: PoolPlan) -> dict[str, Any]:
    """The plan as plain numbers: tokens, blocks, bytes on one device."""
    layout, geometry = plan.layout, plan.layout.geometry
    need = group_need(geometry, plan.budget.max_context, plan.budget)
    return {
        "layout": layout.name,
        "mesh": str(layout.mesh),
        "memory": plan.budget.memory,
        "max_context": plan.budget.max_context,
        "hash_unit": geometry.hash_unit,
        "schedule_block": geometry.schedule_block,
        "hit_unit": geometry.hit_unit,
        "groups": [
            {
                "name": group.name,
                "kind": group.kind.value,
                "layers": len(group.layers),
                "draft": group.draft,
                "rows_per_rank": resolved.spec.rows_per_rank,
                "shards": resolved.shards,
                "block": resolved.block,
                "pool": layout.pools[layout.pool_of(index)].name,
                "content_bytes": layout.content[index],
                "padding_bytes": layout.padding(index),
                "tail_bytes": layout.tail(index),
                "request_blocks": need[index],
            }
            for index, (group, resolved) in enumerate(zip(layout.groups, geometry.groups, strict=True))
        ],
        "pools": [
            {
                "name": pool.name,
                "block_bytes": pool.block_bytes,
                "blocks": plan.blocks[index],
                "bytes": plan.pool_bytes[index],
                "request_blocks": plan.need[index],
            }
            for index, pool in enumerate(layout.pools)
        ],
        "requests": plan.requests,
        "request_bytes": plan.request_bytes(),
        "request_padding_bytes": plan.request_padding(),
        "left_over_bytes": plan.left_over,
    }


def plan_table(plan: PoolPlan) -> str:
    """Groups, pools and what a request takes, as text. Bytes are those of one device."""
    record = plan_record(plan)
    head = ("group", "kind", "layers", "rows/rank", "shards", "block", "content B", "padding B", "%", "tail B", "draft")
    groups = [
        (
            group["name"],
            group["kind"],
            str(group["layers"]),
            f"{group['rows_per_rank']:,}",
            str(group["shards"]),
            f"{group['block']:,}",
            f"{group['content_bytes']:,}",
            f"{group['padding_bytes']:,}",
            f"{100 * group['padding_bytes'] / (group['content_bytes'] + group['padding_bytes']):.2f}",
            f"{group['tail_bytes']:,}",
            "yes" if group["draft"] else "no",
        )
        for group in record["groups"]
    ]
    pools = [
        (
            pool["name"],
            f"{pool['block_bytes']:,}",
            f"{pool['blocks'] - 1:,} + 1",
            f"{pool['bytes'] / 2**30:.2f}",
            f"{100 * pool['bytes'] / record['memory']:.2f}",
            f"{pool['request_blocks']:,}",
        )
        for pool in record["pools"]
    ]
    padding, taken = record["request_padding_bytes"], record["request_bytes"]
    return "\n".join(
        [
            f"{record['layout']}, mesh {record['mesh']}: hash unit {record['hash_unit']:,}, schedule block "
            f"{record['schedule_block']:,}, hit unit {record['hit_unit']:,} tokens",
            format_table(head, groups),
            "",
            format_table(("pool", "block B", "blocks + null", "GiB", "%", "a request"), pools),
            f"a request of {record['max_context']:,} tokens takes {taken / 2**20:,.2f} MiB, {padding / 2**20:,.2f} MiB "
            f"of it padding ({100 * padding / taken:.2f}%); {record['requests']:.2f} of them fit",
        ]
    )


def least_rows_line(layers: Sequence[LayerSpec], mesh: MeshSpec) -> str:
    """How many rows of the widest kind a state is worth on a device; "" for a model without either."""
    states = [layer.local_bytes(mesh) for layer in layers if layer.recurrent]
    rows = [layer.local_bytes(mesh) for layer in layers if not layer.recurrent]
    if not states or not rows:
        return ""
    state, row = max(states), max(rows)
    least = f"a block of common pages has at least {least_rows(state, row):,} rows a rank"
    return f"on a device a layer's state takes {state:,} B, its row {row:,} B: {least}"
