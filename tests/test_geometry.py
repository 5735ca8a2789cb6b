"""Every group derives its own block sizes; what cannot divide is refused with the reason."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupKind, GroupSpec, WrappedSpec, resolve


def mla(name="mla", rows=16, **more):
    return GroupSpec(name, GroupKind.MLA, rows, **more)


def kda(name="kda", rows=16, **more):
    return GroupSpec(name, GroupKind.RECURRENT, rows, **more)


def test_only_append_only_groups_are_striped():
    kinds = [mla(), GroupSpec("full", "full", 16), GroupSpec("swa", "sliding_window", 16, window=64),
             GroupSpec("local", "chunked_local", 16, window=64), kda(), mla("draft", replicated=True)]  # fmt: skip
    geometry = resolve(kinds, dcp=8)
    assert [g.block for g in geometry.groups] == [128, 128, 16, 16, 16, 16]
    assert geometry.hash_unit == 16 and geometry.schedule_block == 128


def test_a_striped_block_counts_all_ranks_and_a_replicated_one_its_own():
    geometry = resolve([mla(), mla("draft", draft=True), kda()], dcp=8)
    assert geometry.columns_of_hit(256) == (2, 2, 16)
    geometry = resolve([mla(), mla("draft", draft=True, replicated=True), kda()], dcp=8)
    assert geometry.columns_of_hit(256) == (2, 16, 16)


def test_dcp_4_with_64_rows_a_rank_gives_the_reference_table_widths():  # F2
    geometry = resolve([mla(rows=16), mla("draft", rows=16, replicated=True)], dcp=4)
    assert geometry.columns_of_hit(1024) == (16, 64)
    assert geometry.columns_of_hit(65) == (2, 5)


@given(
    shards=st.sampled_from([1, 2, 4, 8]),
    pieces=st.integers(1, 4),
    interleave=st.sampled_from([1, 2, 8, 16]),
    length=st.integers(0, 500),
)
def test_every_position_has_one_home_and_counts_add_up(shards, pieces, interleave, length):
    group = resolve([mla(rows=pieces * interleave)], dcp=shards, interleave=interleave).groups[0]
    homes = {(group.column(p), group.rank(p), group.slot(p)) for p in range(length)}
    assert len(homes) == length
    assert all(slot < group.spec.rows_per_rank for _, _, slot in homes)
    for rank in range(shards):
        assert group.count(length, rank) == sum(group.rank(p) == rank for p in range(length))
    assert sum(group.count(length, rank) for rank in range(shards)) == length


def test_lengths_under_dcp_differ_by_one_interleave_unit_at_most():
    group = resolve([mla(rows=16)], dcp=8).groups[0]
    counts = [group.count(4396, rank) for rank in range(8)]
    assert sum(counts) == 4396 and max(counts) - min(counts) <= 1


def test_hash_unit_defaults_to_the_greatest_common_divisor():
    geometry = resolve([mla(rows=128), kda(rows=896)], dcp=8)
    assert geometry.hash_unit == math.gcd(1024, 896) == 128
    assert geometry.hit_unit == 128


def test_a_recurrent_block_need_not_be_a_multiple_of_the_unit_if_states_can_lie_anywhere():
    assert resolve([mla(rows=64), kda(rows=528)], hash_unit=64).hit_unit == 64
    with pytest.raises(UserError, match=r"hash_unit: got 64; it must divide the block of group 'kda' \(528"):
        resolve([mla(rows=64), kda(rows=528)], hash_unit=64, states_at_any_unit=False)


def test_a_window_coarser_than_the_unit_makes_hits_coarse():
    swa = GroupSpec("swa", "sliding_window", 8, window=8)
    assert resolve([mla(rows=32), swa]).hit_unit == 8
    assert resolve([mla(rows=32), swa], hash_unit=4).hit_unit == 32


def test_a_wrapped_group_takes_its_members_answer_and_all_their_layers():
    wrapped = WrappedSpec("pair", (mla("a", layers=(0,), row_bytes=10), mla("b", layers=(3,), row_bytes=30)))
    group = resolve([wrapped], dcp=4).groups[0]
    assert (group.block, group.spec.layers, group.spec.row_bytes) == (64, (0, 3), 30)


@pytest.mark.parametrize(
    ("specs", "options", "words"),
    [
        ([], {}, "groups: got ()"),
        ([WrappedSpec("w", (mla(), kda()))], {}, "w.kind"),
        ([WrappedSpec("w", (mla(), mla("b", replicated=True)))], {}, "w.replicated"),
        ([WrappedSpec("w", ())], {}, "w.members"),
        ([mla(), mla()], {}, "name of its own"),
        ([mla(rows=16)], {"interleave": 3}, "interleave: got 3; it must divide the 16 rows"),
        ([mla(rows=16)], {"dcp": 0}, "dcp: got 0"),
        ([mla(rows=16)], {"hash_unit": 24}, "hash_unit: got 24"),
        ([mla(rows=16)], {"hash_unit": 0}, "hash_unit: got 0"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(specs, options, words):
    with pytest.raises(UserError) as refusal:
        resolve(specs, **{"dcp": 2, **options})
    assert words in str(refusal.value)


def test_unknown_kinds_and_stray_windows_are_refused():
    with pytest.raises(UserError, match=r"group\.kind: got 'rotary'; use one of: mla, full"):
        GroupSpec("x", "rotary", 16)
    with pytest.raises(UserError, match=r"x\.window"):
        GroupSpec("x", "sliding_window", 16)
    with pytest.raises(UserError, match=r"x\.rows_per_rank: got 0"):
        GroupSpec("x", "mla", 0)


def test_the_table_names_every_group_and_the_units():
    table = resolve([mla(), kda()], dcp=8).table()
    assert "mla" in table and "128" in table and "hash unit 16, schedule block 128, hit unit 16" in table


def test_unsharding_changes_no_block_and_no_unit():
    geometry = resolve([mla(), mla("draft", replicated=True), kda()], dcp=8, interleave=2)
    plain = geometry.unsharded()
    assert [g.block for g in plain.groups] == [g.block for g in geometry.groups]
    assert (plain.hash_unit, plain.schedule_block, plain.hit_unit) == (16, 128, 16)
    assert all(g.shards == 1 for g in plain.groups)
