"""The sharding map says which mesh axes split every device array, and refuses what does not divide."""

import dataclasses

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hybrid_kv.errors import UserError
from hybrid_kv.planning import CacheOptions, CacheShape, plan_cache
from hybrid_kv.planning.forms import PLAIN
from hybrid_kv.sharding import ArraySharding, MeshSpec, ShardingMap

SHAPE = CacheShape(
    mla_layers=(3, 6), recurrent_layers=(0, 1, 2, 4, 5), latent=32, position=8, heads=8, key=16, value=16, taps=4,
    max_context=4096, row_itemsize=4, conv_itemsize=4,
)  # fmt: skip


def test_mla_rows_are_split_by_dcp_and_states_by_heads_over_the_tensor_group():
    plan = plan_cache(SHAPE, CacheOptions(max_requests=2, max_context=256), MeshSpec(model=2, dcp=4))
    local = {array.name: array.local_shape(plan.mesh) for array in plan.sharding.arrays}
    assert local == {"mla": (2, 9, 16, 40), "kda": (5, 17, 1, 16, 16), "conv": (5, 17, 3, 48)}
    assert plan.sharding["mla"].spec == P(None, "data", "dcp", None)
    assert plan.sharding["kda"].spec == P(None, "data", ("model", "dcp"), None, None)
    assert plan.sharding["mla"].rule == "rank = p % 64 // 1 % 4"


@pytest.mark.parametrize(("axes", "heads", "split", "rule"), [
    (("model",), 4, "slot:data head:model ", "by heads"), ((), 8, "slot:data ", "whole state on every rank"),
])  # fmt: skip
def test_states_are_split_over_fewer_axes_where_the_model_says_so(axes, heads, split, rule):
    shape = dataclasses.replace(SHAPE, state_axes=axes)
    plan = plan_cache(shape, CacheOptions(max_requests=2, max_context=256), MeshSpec(model=2, dcp=4))
    local = {array.name: array.local_shape(plan.mesh) for array in plan.sharding.arrays}
    assert local == {"mla": (2, 9, 16, 40), "kda": (5, 17, heads, 16, 16), "conv": (5, 17, 3, 48 * heads)}
    (line,) = [line for line in plan.sharding.table().splitlines() if line.startswith("kda")]
    assert split in line and rule in line and ("head:" in line) == bool(axes)
    assert {spec.local_bytes(plan.mesh) for spec in shape.layers() if spec.recurrent} == {
        heads * 16 * 16 * 4 + 3 * 48 * heads * 4
    }


def test_heads_need_to_divide_only_over_the_axes_that_split_them():
    six = dataclasses.replace(SHAPE, heads=6)
    with pytest.raises(UserError, match="mesh: got 'model=2,dcp=2'; model x dcp must divide the 6 heads"):
        plan_cache(six, CacheOptions(max_requests=2), MeshSpec(model=2, dcp=2))
    for axes, heads in ((("model",), 3), ((), 6)):
        shape = dataclasses.replace(six, state_axes=axes)
        plan = plan_cache(shape, CacheOptions(max_requests=2), MeshSpec(model=2, dcp=2))
        assert plan.sharding["kda"].local_shape(plan.mesh)[2] == heads


def test_pools_of_replicas_lie_one_behind_the_other():
    one, four = (plan_cache(SHAPE, CacheOptions(max_requests=2), MeshSpec(data=n, dcp=2)).sharding for n in (1, 4))
    for array in one.arrays:
        both = four[array.name]
        assert both.shape[1] == 4 * array.shape[1]
        assert both.local_shape(MeshSpec(data=4, dcp=2)) == array.local_shape(MeshSpec(dcp=2))


def test_the_report_says_that_sizes_are_of_one_replica():
    one, two = (plan_cache(SHAPE, CacheOptions(max_requests=2), MeshSpec(data=n)).report() for n in (1, 2))
    assert "pool of kda: 16 states\n" in one and "pool of kda: 16 states for each replica\n" in two
    assert "256, 1024 tokens for each replica\n" in two


WIDE = dataclasses.replace(SHAPE, latent=512, position=64, key=128, value=128)


@pytest.mark.parametrize("kernels", ["tpu", "gpu"])
def test_pools_for_kernels_lie_in_whole_tiles(kernels):
    mesh, options = MeshSpec(model=2, dcp=4), CacheOptions(max_requests=2, max_context=256)
    plain, tiled = plan_cache(WIDE, options, mesh), plan_cache(WIDE, options, mesh, kernels)
    assert tiled.sharding["mla"].local_shape(mesh) == (2, 9, 72, 128)
    assert plain.sharding["mla"].local_shape(mesh) == (2, 9, 16, 576)
    assert tiled.sharding["conv"].local_shape(mesh) == (5, 17, 3, 3, 128)
    assert plain.sharding["conv"].local_shape(mesh) == (5, 17, 3, 384)
    for array in plain.sharding.arrays:
        assert tiled.sharding[array.name].local_bytes(mesh) == array.local_bytes(mesh)


def test_step_sizes_are_multiples_of_what_splits_their_tokens():
    """Those that follow are rounded up, those that are given are not changed but refused."""

    def buckets(multiple, **options):
        return plan_cache(SHAPE, CacheOptions(**options), MeshSpec(dcp=8), None, multiple).buckets

    assert buckets(8, token_budget=100) == (32, 104) and buckets(1, token_budget=100) == (25, 100)
    assert buckets(8, token_budget=100, token_buckets=(16, 100)) == (16, 104)
    with pytest.raises(UserError, match=r'token_buckets: got 20; with this mesh and residual="sequence" .* of 8'):
        buckets(8, token_budget=100, token_buckets=(20,))


def test_columns_of_histories_depend_on_how_states_are_split():
    """Three columns of 128 channels: they fit a device whole, and no half of the devices."""
    narrow = dataclasses.replace(WIDE, heads=8, key=16, value=16)
    for axes, columns in ((("model", "dcp"), False), (("model",), True), ((), True)):
        plan = plan_cache(dataclasses.replace(narrow, state_axes=axes), CacheOptions(), MeshSpec(dcp=2), "tpu")
        assert plan.forms.columns == columns


def test_pools_stay_plain_where_sizes_have_no_tiles():
    plan = plan_cache(SHAPE, CacheOptions(max_requests=2), MeshSpec(dcp=2), "tpu")
    assert plan.forms == PLAIN
    with pytest.raises(UserError, match="kernels: got 'cuda'; use one of tpu, gpu, or None"):
        plan_cache(SHAPE, CacheOptions(), MeshSpec(), "cuda")


def test_the_map_gives_the_named_sharding_of_every_array():
    plan = plan_cache(SHAPE, CacheOptions(max_requests=2, max_context=256), MeshSpec(model=2, dcp=4))
    mesh = plan.mesh.build()
    named = plan.sharding.named(mesh)
    assert set(named) == {"mla", "kda", "conv"}
    assert all(isinstance(sharding, NamedSharding) for sharding in named.values())
    assert MeshSpec.of(mesh) == plan.mesh
    assert jax.ShapeDtypeStruct((2, 9, 64, 40), "float32", sharding=named["mla"]).sharding.shard_shape(
        (2, 9, 64, 40)
    ) == (2, 9, 16, 40)


def test_the_report_names_arrays_pools_and_units():
    report = plan_cache(SHAPE, CacheOptions(), MeshSpec(dcp=2)).report()
    for words in (
        "mla",
        "kda",
        "conv",
        "row:dcp",
        "hash unit 64",
        "steps of 16 (decode), 256, 1024 tokens",
        "MiB per device",
    ):
        assert words in report


@pytest.mark.parametrize(("text", "mesh"), [
    ("", MeshSpec()), ("1x1", MeshSpec()), ("model=2", MeshSpec(model=2)), (" dcp=4 , model=2", MeshSpec(1, 2, 4)),
])  # fmt: skip
def test_a_mesh_is_written_as_axes_and_sizes(text, mesh):
    assert MeshSpec.parse(text) == mesh
    assert MeshSpec.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    "text", ["modle=2", "model", "model=", "model=x", "model=-2", "model=0", "model=2,model=2", "model=²", "2x2"]
)
def test_other_mesh_texts_are_refused(text):
    with pytest.raises(UserError, match="mesh"):
        MeshSpec.parse(text)


def test_sizes_the_mesh_does_not_divide_are_refused_with_the_axis():
    array = ArraySharding("states", (1, 6), ("layer", "head"), P(None, ("model", "dcp")), 4)
    with pytest.raises(UserError, match="head: got 6; mesh model=2,dcp=2 splits this axis of 'states' into 4 parts"):
        ShardingMap(MeshSpec(model=2, dcp=2), (array,))
    with pytest.raises(UserError, match="it needs 64 devices, 8 are there"):
        MeshSpec(model=64).build()


def test_models_that_lack_a_kind_of_layer_keep_a_null_pool():
    only_kda = plan_cache(dataclasses.replace(SHAPE, mla_layers=()), CacheOptions(), MeshSpec(dcp=2))
    assert only_kda.sharding["mla"].shape == (0, 1, 2, 40)
    only_mla = plan_cache(dataclasses.replace(SHAPE, recurrent_layers=()), CacheOptions(), MeshSpec(dcp=2))
    assert only_mla.sharding["kda"].shape == (0, 1, 8, 16, 16)
