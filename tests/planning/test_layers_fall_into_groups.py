"""Layers of equal kind and geometry share a group; what a layer cannot be is refused with its message."""

import dataclasses

import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupKind, resolve
from hybrid_kv.planning import LayerSpec, group_layers
from hybrid_kv.planning.layers import check_whole
from hybrid_kv.planning.published import MODELS, full_window_gdn, kimi_k3, kimi_k3_with_draft, kimi_linear
from hybrid_kv.sharding import MeshSpec


def row(index, name="mla", width=1152, kind="mla", **more):
    return LayerSpec(name, index, kind, width, **more)


def state(index, size=4096, **more):
    return LayerSpec("kda", index, "recurrent", size, **more)


def test_the_kimi_layer_lists_are_the_published_ones():
    linear, k3 = ({g.name: g.layers for g in group_layers(model())} for model in (kimi_linear, kimi_k3))
    assert [layer.index + 1 for layer in linear["mla"]] == [4, 8, 12, 16, 20, 24, 27]
    assert (len(linear["kda"]), len(k3["mla"]), len(k3["kda"])) == (20, 24, 69)
    assert [layer.index + 1 for layer in k3["mla"]][-2:] == [92, 93]


def test_bytes_are_the_published_ones():
    linear, k3 = ({g.name: g.layers for g in group_layers(model())} for model in (kimi_linear, kimi_k3))
    assert sum(layer.bytes for layer in linear["mla"]) == 8_064
    assert sum(layer.bytes for layer in k3["mla"]) == 27_648
    assert linear["kda"][0].bytes == 2_097_152 + 73_728
    assert k3["kda"][0].bytes == 6_291_456 + 221_184
    assert round(sum(layer.bytes for layer in linear["kda"]) / 2**20, 2) == 41.41
    assert round(sum(layer.bytes for layer in k3["kda"]) / 2**20, 2) == 428.55
    assert k3["kda"][0].local_bytes(MeshSpec(model=16)) == 407_040


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_in_one_group(name):
    layers = MODELS[name]()
    grouped = [layer for group in group_layers(layers) for layer in group.layers]
    assert sorted(layer.index for layer in grouped) == list(range(len(layers)))


def test_a_draft_mark_never_changes_grouping_and_replication_does():
    (_, together) = group_layers(kimi_k3_with_draft())
    assert len(together.layers) == 29 and together.draft
    apart = group_layers([row(0), row(1, draft=True, replicated=True)])
    assert [group.draft for group in apart] == [False, True]
    assert [group.block for group in resolve([g.declare(16) for g in apart], dcp=8).groups] == [128, 16]


def test_unlike_row_widths_of_one_geometry_are_a_wrapped_group():
    (group,) = group_layers([row(0), row(1, width=656), row(2)])
    wrapped = group.declare(64)
    assert [member.row_bytes for member in wrapped.members] == [1152, 656]
    assert resolve([wrapped]).groups[0].spec.layers == (0, 1, 2)


def test_windows_of_unlike_length_are_groups_of_their_own():
    kinds = [row(i, "swa", kind="sliding_window", window=window) for i, window in enumerate((512, 1024, 512))]
    assert [[layer.index for layer in group.layers] for group in group_layers(kinds)] == [[0, 2], [1]]
    assert [group.name for group in group_layers(kinds)] == ["swa", "swa-2"]


def test_layers_forced_into_one_group_must_share_their_geometry():
    (group,) = group_layers([row(0, group="all"), state(1, group="all")])
    with pytest.raises(UserError, match=r"all\.kind: got .*members of a wrapped group share one kind; put unlike"):
        resolve([group.declare(64)])
    (group,) = group_layers([row(0, group="all"), row(1, group="all", replicated=True)])
    with pytest.raises(UserError, match=r"all\.replicated: got \(False, True\); members of a wrapped group"):
        resolve([group.declare(64)], dcp=2)


def test_windowed_groups_stay_whole_on_every_dcp_rank():
    groups = group_layers(full_window_gdn())
    blocks = {g.name: resolve([g.declare(16)], dcp=8).groups[0].block for g in groups}
    assert blocks == {"gdn": 16, "swa": 16, "full": 128}


def test_heads_are_split_over_the_devices_that_tokens_are_not():
    full = row(0, kind="full", width=8 * 512, heads=8)
    assert full.local_bytes(MeshSpec(model=4, dcp=2)) == 2 * 512
    assert dataclasses.replace(full, replicated=True).local_bytes(MeshSpec(model=4, dcp=2)) == 512
    assert full.local_bytes(MeshSpec(model=16)) == 512  # two devices hold the same head
    assert row(0).local_bytes(MeshSpec(model=4, dcp=2)) == 1152
    assert state(0, heads=32).local_bytes(MeshSpec(model=4, dcp=2)) == 512
    assert state(0, heads=32, replicated=True).local_bytes(MeshSpec(model=5)) == 4096


BAD_LAYERS = {
    "unknown kind": ({"kind": "ring"}, "group.kind: got 'ring'; use one of: mla, full, sliding_window"),
    "no bytes": ({"width": 0}, r"layer 3 \(mla\).bytes: got 0; use a whole number, at least 1"),
    "negative bytes": ({"width": -1152}, r"layer 3 \(mla\).bytes: got -1152; use a whole number, at least 1"),
    "a flag for bytes": ({"width": True}, r"bytes: got True; use a whole number"),
    "no heads": ({"heads": 0}, r"heads: got 0; use a whole number, at least 1"),
    "unequal heads": ({"heads": 5}, "bytes: got 1152; its 5 heads must have equal parts of them"),
    "window of MLA": ({"window": 64}, "window: got 64; a mla layer has none: use 0"),
    "no window": ({"kind": "sliding_window"}, "window: got 0; give the window in tokens"),
    "negative window": ({"kind": "chunked_local", "window": -1}, "window: got -1; use a whole number, at least 0"),
}


@pytest.mark.parametrize("case", BAD_LAYERS)
def test_a_bad_layer_is_refused(case):
    fields, message = BAD_LAYERS[case]
    with pytest.raises(UserError, match=message):
        row(3, **fields)


@pytest.mark.parametrize("value", [0, -1, 0.5, 64.0, True, "64", None])
def test_a_size_is_a_positive_whole_number(value):
    with pytest.raises(UserError, match=r"blocks: got .*; use a whole number, at least 1"):
        check_whole("blocks", value)


def test_a_bad_index_is_refused():
    with pytest.raises(UserError, match="index: got -1; use a whole number, at least 0"):
        row(-1)


def test_no_layers_and_repeated_layers_are_refused():
    with pytest.raises(UserError, match=r"layers: got \(\); no layer keeps anything, so there is no pool to plan"):
        group_layers([])
    with pytest.raises(UserError, match=r"layers: got \[1\]; give every layer an index of its own"):
        group_layers([row(1), state(1)])


def test_states_are_split_over_the_axes_they_name():
    mesh = MeshSpec(model=2, dcp=4)
    for axes, parts in ((("model", "dcp"), 8), (("model",), 2), ((), 1)):
        assert state(0, heads=32, state_axes=axes).local_bytes(mesh) == state(0, heads=32).bytes // parts
    with pytest.raises(UserError, match=r"state_axes: got \('data',\); use axes of"):
        state(0, state_axes=("data",))


def test_heads_that_the_mesh_does_not_divide_are_refused():
    with pytest.raises(UserError, match=r"mesh: got 'dcp=3'; it splits the 32 heads of layer 0 \(kda\) into 3 parts"):
        state(0, heads=32).local_bytes(MeshSpec(dcp=3))
    with pytest.raises(UserError, match="into 64 parts: use a divisor, or mark it replicated"):
        state(0, heads=32).local_bytes(MeshSpec(model=64))
    with pytest.raises(UserError, match="into 6 parts: use a divisor or a multiple"):
        row(0, kind="full", width=4096, heads=8).local_bytes(MeshSpec(model=6))


def test_kinds_are_parsed_from_their_names():
    assert row(0).kind is GroupKind.MLA and state(0).kind is GroupKind.RECURRENT
