"""Expanded attention over a workspace agrees with float64 attention, whatever the batch, the stripe and the pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.mla import merge_lse, mla_attention
from pallas_kernels.mla.expanded import expansion_pays, mla_expanded
from pallas_kernels.mla.expanded.plan import (
    EDGE,
    FIRST,
    OPEN,
    SKIP,
    START,
    Tiling,
    block_of,
    group_of,
    kind_of,
    plan_of,
)
from pallas_kernels.mla.expanded.workspace import UNSEEN, queue_of, units_of, workspace_of
from pallas_kernels.mla.pages import Pages
from tests.kernels.kda_oracle import rows_of
from tests.kernels.mla_expanded_cases import SCALE, expanded_case

ONE = {"shards": 1, "rank": 0, "interleave": 1}


def run_with(**options):
    """Compiled, with the rank as last argument."""
    options = {"scale": SCALE, "implementation": "xla", **options}
    return jax.jit(lambda *given: mla_expanded(*given[:-1], rank=given[-1], **options))


def close(got, want, limit=1e-5):
    np.testing.assert_allclose(got, want, atol=limit, rtol=limit)


def close_to_float64(got, want, limit=1e-5):
    for one, other in zip(got, want, strict=True):
        close(one, other, limit)
    assert (np.asarray(got[0])[np.isneginf(got[1])] == 0).all()


# Planes, rows of a page on a rank, ranks, interleave, heads, workspace, type of the pool, and what a query sees.
KINDS = [
    (False, 16, 1, 1, 2, 256, jnp.float32, {}),
    (True, 64, 1, 1, 4, 1024, jnp.float32, {"window": 70}),
    (False, 256, 1, 1, 2, 512, jnp.float32, {"soft_cap": 2.0}),
    (True, 16, 4, 1, 2, 128, jnp.bfloat16, {}),
    (True, 32, 2, 16, 12, 384, jnp.float32, {"window": 300, "soft_cap": 3.0}),
    (False, 16, 8, 16, 2, 128, jnp.float8_e4m3fn, {"cache_scale": 0.25}),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind[:6])))
def test_any_ragged_batch_is_the_float64_attention_on_every_rank_and_merged(kind):
    planes, n, shards, interleave, heads, workspace, dtype, sees = kind
    latent, position = (128, 64) if planes else (32, 16)
    run = run_with(shards=shards, interleave=interleave, workspace=workspace, **sees)

    @settings(max_examples=8, deadline=None)
    @given(
        lengths=st.lists(st.sampled_from([0, 1, 1, 17, 63, 100]), min_size=4, max_size=4),
        contexts=st.lists(st.sampled_from([0, 1, 90, 300]), min_size=4, max_size=4),
        seed=st.integers(0, 999),
    )
    def check(lengths, contexts, seed):
        case = expanded_case(
            lengths, contexts, heads=heads, n=n, shards=shards, interleave=interleave, planes=planes, latent=latent,
            position=position, tokens=400, columns=-(-400 // (n * shards)), dtype=dtype, seed=seed,
        )  # fmt: skip
        parts = [run(*case.arguments, *case.step(rank), rank) for rank in range(shards)]
        for rank, part in enumerate(parts):
            close_to_float64(part, case.attention(rank=rank, **sees))
        merged = merge_lse(*(jnp.stack(x) for x in zip(*parts, strict=True)))
        close_to_float64(merged, case.attention(**sees))

    check()
    assert run._cache_size() == 1


LONG = ([5, 0, 63, 300, 1, 2], [0, 40, 1, 500, 300, 0])


@functools.cache
def long_case(shards=1, interleave=1, n=16):
    return expanded_case(*LONG, heads=8, n=n, shards=shards, interleave=interleave)


@pytest.mark.parametrize("shards", [2, 8])
@pytest.mark.parametrize("interleave", [1, 16])
def test_ranks_that_gather_together_have_the_whole_for_their_own_heads(shards, interleave):
    case = long_case(shards, interleave)
    mesh = Mesh(np.array(jax.devices()[:shards]), ("dcp",))

    def local(q_nope, q_rope, w_uk, w_uv, pool, rows, table):
        return mla_expanded(
            q_nope, q_rope, w_uk, w_uv, pool[0], 1, rows, table, scale=SCALE, shards=shards, axis="dcp",
            rank=jax.lax.axis_index("dcp"), interleave=interleave, workspace=512, implementation="xla",
        )  # fmt: skip

    heads = P(None, "dcp"), P(None, "dcp"), P("dcp"), P("dcp")
    spread = jax.shard_map(
        local, mesh=mesh, in_specs=(*heads, P("dcp"), P(), P()), out_specs=(P(None, "dcp"),) * 2, check_vma=False
    )
    _, _, rows, table = case.step()
    close_to_float64(jax.jit(spread)(*case.arguments, jnp.stack(case.given.pools), rows, table), case.attention())


@pytest.mark.parametrize(("workspace", "parts"), [(2048, 1), (1024, 2), (640, 3), (384, 5)])
def test_a_context_in_parts_is_the_whole(workspace, parts):
    """1172 context rows, in blocks of 128 that each belong to one request: 13 of them."""
    case = long_case()
    blocks = sum(-(-(n + c) // 128) for n, c in zip(*LONG, strict=True) if n)
    assert -(-blocks // (workspace // 128)) == parts
    run = run_with(shards=1, interleave=1, workspace=workspace)
    close_to_float64(run(*case.arguments, *case.step(), 0), case.attention())


def test_the_expanded_form_is_the_absorbed_one():
    case = long_case()
    q_nope, q_rope, w_uk, w_uv = case.arguments
    got = run_with(shards=1, interleave=1, workspace=512)(*case.arguments, *case.step(), 0)
    q_latent = jnp.einsum("tnd,ndl->tnl", q_nope, w_uk, precision="highest")
    out, lse = mla_attention(
        q_latent, q_rope, *case.step(), scale=SCALE, query_tile=64, implementation="reference", **ONE
    )
    close(got[0], jnp.einsum("tnl,nvl->tnv", out, w_uv, precision="highest"))
    close(got[1], lse)


def test_null_blocks_and_what_lies_beyond_the_table_are_not_seen():
    case = expanded_case([40, 30], [0, 100], n=16)
    run = run_with(shards=1, interleave=1, workspace=256)
    pool, layer, rows, table = case.step()
    got = run(*case.arguments, pool, layer, rows, table.at[0].set(0).at[1, 3].set(0), 0)
    np.testing.assert_array_equal(got[0][:40], 0)
    assert np.isneginf(got[1][:40]).all()
    hidden = np.zeros(130, bool)
    hidden[48:64] = True
    q = case.given.q[40:70]
    s = SCALE * np.einsum("tnk,pk->tnp", q, case.given.keys[1, :130].astype(np.float64))
    causal = np.arange(130) <= 100 + np.arange(30)[:, None]
    s = np.where((causal & ~hidden)[:, None], s, -np.inf)
    close(got[1][40:70], np.log(np.exp(s).sum(-1)))
    short = run(*case.arguments, pool, layer, rows, table[:, :4], 0)
    s = np.where(
        (np.arange(130) < 64), SCALE * np.einsum("tnk,pk->tnp", q, case.given.keys[1, :130].astype(np.float64)), -np.inf
    )
    close(short[1][40:70], np.log(np.exp(s).sum(-1)))


def test_rows_without_new_tokens_cost_nothing():
    """Their pages are not even read: the table names blocks of NaN without a position that is live."""
    case = expanded_case([3, 0, 0], [10, 50, 50], n=16)
    run = run_with(shards=1, interleave=1, workspace=128)
    pool, layer, rows, table = case.step()
    rows = rows._replace(start=jnp.asarray([10, 2**30, -5], jnp.int32))
    close_to_float64(run(*case.arguments, pool, layer, rows, table, 0), case.attention())


def temporary_bytes(columns, workspace, n=16, tokens=64, heads=4):
    shape = jax.ShapeDtypeStruct
    latent, position = 128, 64
    arguments = (
        shape((tokens, heads, 128), jnp.float32), shape((tokens, heads, position), jnp.float32),
        shape((heads, 128, latent), jnp.float32), shape((heads, 128, latent), jnp.float32),
        shape((1, 4 * columns + 1, n, latent + position), jnp.float32), 0, rows_of([0] * 4, [0] * 4, [0] * 4),
        shape((4, columns), jnp.int32), 0,
    )  # fmt: skip
    compiled = run_with(shards=1, interleave=1, workspace=workspace).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_is_bounded_by_the_workspace_and_not_by_the_context():
    small = temporary_bytes(64, 8192)
    assert temporary_bytes(4096, 8192) <= small + 4 * 4096 * 4 * 2
    row = 4 * (4 * (128 + 128) + 128 + 64)
    assert 0.9 * 8192 * row <= temporary_bytes(64, 16384) - small <= 1.2 * 8192 * row


@functools.partial(jax.jit, static_argnames="window")
def plan_in_small(rows, window, careful):
    """Tiles of 16 queries in pairs, blocks and pages of 16 keys; the plan, positions of keys and units."""
    space = workspace_of(2048, Pages(16, 64, 16, planes=False), 1, 1, 1, 16)
    queue = queue_of(rows, 64, space, window)
    units = units_of(queue, 0, space.units)
    place = units.number[:, None] * 16 + jnp.arange(16)
    live = (place < (rows.start + rows.length)[units.row][:, None]) & units.used[:, None]
    at = jnp.where(live, place, UNSEEN)
    none = jnp.zeros(len(rows.length), bool)
    return plan_of(rows, units, none, none, at, Tiling(16, 16, 2, 8), space.span, window, careful), at, units


def planned(lengths, contexts, window=None, offset=0, careful=False):
    """Kinds [tiles, blocks] of rows behind `offset` slack tokens, positions of keys [blocks, 16], rows of blocks."""
    rows = rows_of(offset + np.cumsum(lengths) - lengths, lengths, contexts)
    plan, at, units = plan_in_small(rows, window, careful)
    kinds = np.zeros((16, len(at)), int)
    step = plan.step[: int(plan.used)]
    for t in range(2):
        kinds[2 * np.asarray(group_of(step)) + t, np.asarray(block_of(step))] = kind_of(step, t)
    return kinds, np.asarray(at), np.where(np.asarray(units.used), np.asarray(units.row), -1)


def test_tiles_from_nothing_start_once_and_mask_only_the_diagonal():
    kinds, _, _ = planned([256, 0, 0], [0, 0, 0])
    want = np.tril(np.full((16, 16), OPEN), -1) + EDGE * np.eye(16, dtype=int)
    want[:, 0] = START
    np.testing.assert_array_equal(kinds[:, :16], want)
    assert not kinds[:, 16:].any()
    assert set(np.unique(planned([256, 0, 0], [0, 0, 0], careful=True)[0])) == {SKIP, FIRST}


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 15, 16, 40, 64]), min_size=3, max_size=3),
    contexts=st.lists(st.integers(0, 200), min_size=3, max_size=3),
    window=st.sampled_from([None, 33]),
    offset=st.integers(0, 20),
)
def test_plans_visit_what_can_be_seen_and_keep_a_reference_only_where_all_queries_have_one(
    lengths, contexts, window, offset
):
    kinds, at, owner = planned(lengths, contexts, window, offset)
    row = np.repeat([0, 1, 2], lengths)
    position = np.concatenate([c + np.arange(n) for n, c in zip(lengths, contexts, strict=True)]).astype(int)
    row = np.concatenate([np.full(offset, -2), row, np.full(256 - offset - len(row), -2)])
    position = np.concatenate([np.zeros(offset, int), position, np.zeros(256 - offset - len(position), int)])
    sees = (owner[None, :, None] == row[:, None, None]) & (at[None] <= position[:, None, None])
    if window is not None:
        sees &= at[None] > position[:, None, None] - window
    sees = sees.reshape(16, 16, len(owner), 16)  # tiles, queries, blocks, keys
    for tile in range(16):
        for r in range(3):
            mine = row.reshape(16, 16)[tile] == r
            known = np.zeros(mine.sum(), bool)
            for block in np.flatnonzero(owner == r):
                kind, seen = kinds[tile, block], sees[tile, :, block][mine]
                assert (kind != SKIP) >= seen.any()
                if kind == OPEN:
                    assert mine.all() and seen.all() and known.all()
                if kind == EDGE:
                    assert known.all()
                if kind == START:
                    assert mine.all() and seen[:, 0].all() and not known.any()
                known |= seen.any(-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workspace": 100}, "workspace: got 100 rows; give at least 128"),
        ({"interleave": 3}, "interleave: got 3"),
        ({"window": 0}, "window: got 0"),
        ({"implementation": "tpu"}, "takes bfloat16"),
    ],
)
def test_what_cannot_be_done_is_refused(options, message):
    case = expanded_case([3], [4])
    with pytest.raises(ValueError, match=message):
        mla_expanded(*case.arguments, *case.step(), **{"scale": 1.0, "workspace": 256, **ONE, **options})


def test_expansion_pays_from_about_170_queries_on_long_contexts_and_always_from_nothing():
    assert expansion_pays(1, 0) and expansion_pays(2048, 0)
    assert not expansion_pays(1, 1000) and not expansion_pays(8, 100_000)
    assert not expansion_pays(170, 1_000_000) and expansion_pays(171, 1_000_000)
    assert not expansion_pays(113, 113) and expansion_pays(114, 114)
    assert expansion_pays(512, 3584)
