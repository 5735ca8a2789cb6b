"""One pool with common pages: rows of attention fill the page of a state, or are padded to it.

What the reference system does with models of mixed layers. It is planned here to be compared: `docs/08-planning.md`
says what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybrid_kv.errors import UserError
from hybrid_kv.planning.groups import LayerGroup, group_layers, unique_names
from hybrid_kv.planning.layers import LayerSpec
from hybrid_kv.planning.layout import BlockOptions, Layout, PoolLayout, group_pages, resolve_groups


def unified(layers: Sequence[LayerSpec], options: BlockOptions) -> Layout:
    """One pool whose block is `group_size` pages of one size, whichever group takes it.

    The page is the least whole number of steps of the widest rows that holds a state and one step of every other
    rows; a step is what hash unit, interleave and `row_multiple` allow. Narrower rows get as many steps as fit. What
    is left of a page, and the pages of groups with fewer layers, are padding. `rows_per_rank` is not used.

    Raises UserError if heads do not fit the mesh, or if there are only states and no hash unit.
    """
    buckets = group_layers(layers, lambda layer: (layer.geometry, layer.bytes, layer.heads))
    page, anchor = common_page(buckets, options)
    rows = [_rows(bucket, page, anchor, options) for bucket in buckets]
    size = group_size([len(bucket.layers) for bucket in buckets])
    pairs = [(part, count) for bucket, count in zip(buckets, rows, strict=True) for part in split_bucket(bucket, size)]
    names = unique_names(part.name for part, _ in pairs)
    groups = tuple(LayerGroup(name, part.layers) for name, (part, _) in zip(names, pairs, strict=True))
    counts = [count for _, count in pairs]
    return Layout(
        name="unified",
        mesh=options.mesh,
        geometry=resolve_groups(groups, counts, options),
        groups=groups,
        content=tuple(sum(group_pages(group, n, options.mesh)) for group, n in zip(groups, counts, strict=True)),
        pools=(PoolLayout("all", tuple(range(len(groups))), size * page),),
    )


def least_rows(state_bytes: int, row_bytes: int, multiple: int = 1) -> int:
    """The fewest rows, a multiple of `multiple`, that are no smaller than a state."""
    return multiple * max(-(-state_bytes // (multiple * row_bytes)), 1)


def common_page(buckets: Sequence[LayerGroup], options: BlockOptions) -> tuple[int, int]:
    """(bytes of a page of one layer on a device, rows a rank holds of it of the widest rows; 0 without any rows)."""
    sizes = [(bucket, max(layer.local_bytes(options.mesh) for layer in bucket.layers)) for bucket in buckets]
    rows = [(width, _step(bucket, options)) for bucket, width in sizes if not bucket.layers[0].recurrent]
    state = max((width for bucket, width in sizes if bucket.layers[0].recurrent), default=0)
    if not rows:
        return state, 0
    widest, step = max(rows)
    anchor = least_rows(max(state, *(width * steps for width, steps in rows)), widest, step)
    return anchor * widest, anchor


def group_size(counts: Sequence[int]) -> int:
    """Layers of a group: the shortest bucket, or the longest if it is less than half as long again.

    Source: the reference system's rule, which keeps groups equally wide and short ones few.
    """
    return max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)


def split_bucket(bucket: LayerGroup, size: int) -> tuple[LayerGroup, ...]:
    """Groups of at most `size` layers; group i of n takes layers i, i + n, i + 2n, ..."""
    count = -(-len(bucket.layers) // size)
    return tuple(LayerGroup(bucket.name, bucket.layers[start::count]) for start in range(count))


def _rows(bucket: LayerGroup, page: int, anchor: int, options: BlockOptions) -> int:
    if bucket.layers[0].recurrent:
        span = options.hash_unit or anchor
        if not span:
            raise UserError("hash_unit", None, "a model that keeps only states has no rows to take it from: give it")
        return span
    step = _step(bucket, options)
    return page // (bucket.layers[0].local_bytes(options.mesh) * step) * step


def _step(bucket: LayerGroup, options: BlockOptions) -> int:
    """Rows that a rank's part of a block is a multiple of, so that hash unit and interleave divide the block."""
    shards = options.mesh.dcp if bucket.striped else 1
    unit = options.hash_unit or 1
    stripe = options.interleave if shards > 1 else 1
    return math.lcm(options.row_multiple, stripe, unit // math.gcd(unit, shards))
