"""Groups to pools: nothing is padded in pools by row shape; common pages show what they waste."""

import dataclasses

import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.planning import BlockOptions, CacheOptions, CacheShape, LayerSpec, per_shape, plan_cache, unified
from hybrid_kv.planning.published import MODELS, full_window_gdn, kimi_k3, kimi_k3_with_draft, kimi_linear
from hybrid_kv.planning.unified import group_size, least_rows
from hybrid_kv.sharding import MeshSpec

FREE = BlockOptions(hash_unit=None)


def indices(layout, name):
    return [[layer.index for layer in group.layers] for group in layout.groups if group.layers[0].name == name]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", ["1x1", "model=8", "dcp=8", "model=2,dcp=4"])
def test_pools_by_row_shape_waste_nothing(name, mesh):
    layout = per_shape(MODELS[name](), BlockOptions(MeshSpec.parse(mesh)))
    assert all(layout.padding(group) == 0 for group in range(len(layout.groups)))
    assert layout.geometry.hash_unit == layout.geometry.schedule_block == 64


def test_groups_with_equal_pages_share_a_pool():
    layers = [LayerSpec("swa", i, "sliding_window", 1024, window=64 * (1 + i)) for i in range(2)]
    layout = per_shape([*layers, LayerSpec("full", 2, "full", 1024)], BlockOptions())
    assert [pool.name for pool in layout.pools] == ["swa+swa-2+full"]
    layout = per_shape([*layers, LayerSpec("kda", 2, "recurrent", 1024 * 64)], BlockOptions())
    assert [pool.name for pool in layout.pools] == ["swa+swa-2", "kda"]  # as many bytes, but no rows


def test_the_unified_kimi_linear_block_at_tp1_is_1885_tokens():
    layout = unified(kimi_linear(), FREE)
    blocks = {group.name: group.block for group in layout.geometry.groups}
    assert blocks["mla"] == 1_885
    assert layout.geometry.hash_unit == layout.geometry.hit_unit == 1_885
    assert layout.pools[0].block_bytes == 7 * 1_885 * 1_152
    # Three state groups of 7, 7 and 6 layers: the page is 640 bytes larger than a state, the last has a page too many.
    assert [layout.padding(i) for i in range(4)] == [7 * 640, 7 * 640, 6 * 640 + 1_885 * 1_152, 0]


@pytest.mark.parametrize(
    ("model", "tensor", "least", "of_128"),
    [
        (kimi_linear, 1, 1_885, 1_920),
        (kimi_linear, 4, 472, 512),
        (kimi_linear, 8, 236, 256),
        (kimi_k3, 8, 707, 768),
        (kimi_k3, 16, 354, 384),
    ],
)
def test_unified_blocks_grow_to_the_published_sizes(model, tensor, least, of_128):
    options = BlockOptions(MeshSpec(model=tensor), hash_unit=None)
    kernel = dataclasses.replace(options, row_multiple=128)
    for chosen, rows in ((options, least), (kernel, of_128)):
        layout = unified(model(), chosen)
        assert layout.geometry.groups[layout.geometry.attention[0]].block == rows


def test_a_hash_unit_raises_the_unified_block_to_whole_units():
    layout = unified(kimi_linear(), BlockOptions())
    assert [group.block for group in layout.geometry.groups] == [64, 64, 64, 1_920]
    assert layout.geometry.hit_unit == 64
    striped = unified(kimi_linear(), BlockOptions(MeshSpec(dcp=8)))
    group = striped.geometry.groups[-1]
    assert (group.spec.rows_per_rank, group.block) == (240, 1_920)


def test_a_draft_of_equal_rows_widens_unified_groups_until_states_are_padded():
    layout = unified(kimi_k3_with_draft(), FREE)
    assert [len(group.layers) for group in layout.groups] == [23, 23, 23, 29]
    page = 5_654 * 1_152
    assert layout.padding(0) == 29 * page - 23 * 6_512_640


def test_window_and_full_rows_share_pages_of_unlike_blocks():
    layout = unified(full_window_gdn(), FREE)
    assert {g.name: g.block for g in layout.geometry.groups if g.name in ("full", "swa")} == {"full": 524, "swa": 1048}
    assert [len(group.layers) for group in layout.groups] == [6] * 8


def sizes(full, window, width=1024):
    """Layers 1..: the full ones first, then the windowed ones."""
    return [LayerSpec("full", i + 1, "full", 1024) for i in range(full)] + [
        LayerSpec("swa", full + i + 1, "sliding_window", width, window=32) for i in range(window)
    ]


@pytest.mark.parametrize(
    ("full", "window", "groups"),
    [
        (2, 4, [[1, 2], [3, 5], [4, 6]]),
        (3, 7, [[1, 2, 3], [4, 7, 10], [5, 8], [6, 9]]),
        (6, 5, [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]),
    ],
)
def test_unified_groups_are_those_of_the_reference_system(full, window, groups):
    layout = unified(sizes(full, window), BlockOptions(hash_unit=None, row_multiple=16))
    assert [[layer.index for layer in group.layers] for group in layout.groups] == groups


def test_narrow_rows_get_more_of_them_and_uneven_ones_are_padded():
    options = BlockOptions(hash_unit=None, row_multiple=16)
    half = unified(sizes(2, 2, width=512), options)
    assert [group.block for group in half.geometry.groups] == [16, 32]
    uneven = unified(sizes(2, 2, width=768), options)
    assert [group.block for group in uneven.geometry.groups] == [16, 16]
    assert [uneven.padding(group) for group in range(2)] == [0, 2 * 16 * 256]


def test_an_uneven_latent_row_is_padded_not_refused():
    layers = [LayerSpec("mla", 0, "mla", 1152), LayerSpec("draft", 1, "mla", 656, replicated=True)]
    layout = unified(layers, BlockOptions(hash_unit=None, row_multiple=16))
    assert layout.padding(1) == 16 * (1152 - 656)


def test_a_model_of_one_kind_is_not_padded():
    layout = unified(sizes(4, 0), BlockOptions())
    assert (layout.geometry.groups[0].block, layout.padding(0)) == (64, 0)
    states = unified([LayerSpec("kda", 0, "recurrent", 4096)], BlockOptions())
    assert states.pools[0].block_bytes == 4096


@pytest.mark.parametrize(("counts", "size"), [((7, 20), 7), ((24, 69), 24), ((6, 5), 6), ((3, 2), 2), ((29, 69), 29)])
def test_a_group_is_as_wide_as_the_shortest_bucket_unless_the_longest_is_near(counts, size):
    assert group_size(counts) == size


def test_least_rows_hold_a_state_and_one_row_fewer_does_not():
    for state, row, multiple in ((2_170_880, 1_152, 1), (2_170_880, 1_152, 128), (1, 7, 3)):
        rows = least_rows(state, row, multiple)
        assert rows % multiple == 0 and rows * row >= state
        assert rows == multiple or (rows - multiple) * row < state


def test_the_tail_is_what_one_token_in_a_block_leaves_unfilled():
    assert per_shape(kimi_linear(), BlockOptions()).tail(1) == 7 * 63 * 1_152
    assert per_shape(kimi_linear(), BlockOptions(MeshSpec(dcp=8))).tail(1) == 7 * 8 * 1_152
    assert per_shape(kimi_linear(), BlockOptions()).tail(0) == 0


def test_the_engine_plan_has_the_blocks_of_the_default_layout():
    shape = CacheShape((3, 6), (0, 1, 2, 4, 5), 32, 8, 8, 16, 16, 4, 4096, row_itemsize=4, conv_itemsize=4)
    mesh = MeshSpec(model=2, dcp=4)
    plan = plan_cache(shape, CacheOptions(max_context=256), mesh)
    layout = per_shape(shape.layers(), BlockOptions(mesh))
    assert plan.config.geometry == layout.geometry
    blocks = plan.config.pool_blocks
    assert plan.sharding.local_bytes == sum(n * p.block_bytes for n, p in zip(blocks, layout.pools, strict=True))


REFUSED = {
    "hash unit zero": ({"hash_unit": 0}, "hash_unit: got 0; use a whole number, at least 1"),
    "rows negative": ({"rows_per_rank": -4}, "rows_per_rank: got -4; use a whole number, at least 1"),
    "interleave zero": ({"interleave": 0}, "interleave: got 0; use a whole number, at least 1"),
    "row multiple zero": ({"row_multiple": 0}, "row_multiple: got 0; use a whole number, at least 1"),
    "replicas": ({"mesh": MeshSpec(data=2)}, "mesh.data: got 2; replicas have caches of their own: plan one of them"),
    "unit does not divide": ({"rows_per_rank": 100}, "hash_unit: got 64; it must divide the block of group 'mla'"),
    "interleave does not divide": (
        {"mesh": MeshSpec(dcp=8), "interleave": 48},
        "interleave: got 48; it must divide the 64 rows a rank holds of a block of group 'mla'",
    ),
    "no unit and no rows": ({"hash_unit": None}, "hash_unit: got None; without it blocks need a size"),
    "mesh": ({"mesh": MeshSpec(dcp=3)}, "mesh: got 'dcp=3'; it splits the 32 heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_blocks_that_cannot_be_are_refused(case):
    fields, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        per_shape(kimi_linear(), BlockOptions(**fields))


def test_states_alone_need_a_hash_unit():
    with pytest.raises(UserError, match="hash_unit: got None; a model that keeps only states has no rows"):
        unified([LayerSpec("kda", 0, "recurrent", 4096)], FREE)


def test_units_follow_from_the_blocks():
    rows = BlockOptions(MeshSpec(dcp=8), hash_unit=None, rows_per_rank=16)
    geometry = per_shape(kimi_linear(), rows).geometry
    assert (geometry.schedule_block, geometry.hash_unit) == (128, 16)
    alone = per_shape(sizes(2, 0), BlockOptions(hash_unit=None, rows_per_rank=16)).geometry
    assert (alone.schedule_block, alone.hash_unit) == (16, 16)
