"""MLA writes, attention and merging: golden files, stripes, unwritten rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.mla import merge_lse, mla_attention, mla_expanded, mla_write, stripe
from pallas_kernels.mla.pages import pages_of, pool_shape
from pallas_kernels.rows import RaggedRows
from tests.kernels import golden
from tests.kernels import mla_oracle as oracle
from tests.kernels.kda_oracle import rows_of

LATENT = 64
write = jax.jit(mla_write, static_argnames=("shards", "interleave"))
attend = jax.jit(mla_attention, static_argnames=("scale", "shards", "interleave", "query_tile"))


def split(q):
    return jnp.asarray(q[..., :LATENT]), jnp.asarray(q[..., LATENT:])


def close(got, want, limit=3e-6):
    np.testing.assert_allclose(got, want, atol=limit, rtol=limit)


@pytest.mark.parametrize("tile", [1, 64])
def test_paged_attention_matches_the_golden_file(tile):
    file = golden.load("mla_absorbed")
    cache = np.stack([np.full_like(file["paged_cache"], np.nan), file["paged_cache"]])
    cache[1, file["block_table"][-1], 5:] = np.nan  # never written: 53 = 3 * 16 + 5 tokens
    table = jnp.asarray(np.concatenate([file["block_table"], [0, 0]])[None])
    q = np.concatenate([file["q_absorbed"], np.full((3, 4, 80), np.nan, np.float32)])
    out, lse = attend(
        *split(q), jnp.asarray(cache), 1, rows_of([0], [4], [49]), table,
        scale=float(file["scale"]), shards=1, rank=0, interleave=1, query_tile=tile,
    )  # fmt: skip
    close(out[:4], file["out_latent"])
    close(lse[:4], file["lse"])
    np.testing.assert_array_equal(out[4:], 0)
    assert np.isneginf(lse[4:]).all()


@pytest.mark.parametrize("case", ["dcp4_i1", "dcp4_i8", "dcp4_i1_short", "dcp4_i8_short"])
def test_striped_partials_and_their_merge_match_the_golden_file(case):
    file = golden.load("mla_absorbed")
    total, queries = int(file[f"{case}_total_len"]), int(file[f"{case}_num_query"])
    interleave, per_rank, shards = int(case[6]), 8, 4
    rows = np.concatenate([file["kv_c_normed"], file["k_pe"]], axis=1)[:total]
    table = jnp.asarray([[3, 1, 2]])
    parts = []
    for rank in range(shards):
        cache = jnp.full((1, 4, per_rank, 80), jnp.nan)
        cache = write(
            cache, jnp.asarray(rows), 0, rows_of([0], [total], [0]), table,
            shards=shards, rank=jnp.int32(rank), interleave=interleave,
        )  # fmt: skip
        assert np.isnan(cache[0, 0]).all()
        assert int((~np.isnan(cache[0, :, :, 0])).sum()) == file[f"{case}_local_len"][rank]
        parts.append(
            attend(
                *split(file["q_absorbed"][-queries:]), cache, 0, rows_of([0], [queries], [total - queries]), table,
                scale=float(file["scale"]), shards=shards, rank=jnp.int32(rank), interleave=interleave, query_tile=64,
            )
        )  # fmt: skip
    outs, lses = (jnp.stack(x) for x in zip(*parts, strict=True))
    close(outs, file[f"{case}_partial_out"])
    close(lses, file[f"{case}_partial_lse"])
    out, lse = merge_lse(outs, lses)
    close(out, file[f"{case}_out"])
    close(lse, file[f"{case}_lse"])


def test_partials_of_context_chunks_merge_to_the_whole():
    file = golden.load("mla_absorbed")
    out, lse = merge_lse(jnp.asarray(file["part_out"]), jnp.asarray(file["part_lse"]))
    close(out, file["out"])
    close(lse, file["lse"])


def test_merging_empties_is_safe_and_uses_natural_logarithms():
    outs = jnp.asarray([[[[jnp.nan]]], [[[2.0]]]])
    out, lse = merge_lse(outs, jnp.asarray([[[-jnp.inf]], [[0.3]]]))
    assert float(out[0, 0, 0]) == 2.0 and np.isclose(lse[0, 0], 0.3)
    out, lse = merge_lse(outs, jnp.full((2, 1, 1), -jnp.inf))
    assert float(out[0, 0, 0]) == 0.0 and np.isneginf(lse[0, 0])
    out, _ = merge_lse(jnp.asarray([[[[0.0]]], [[[1.0]]]]), jnp.asarray([[[0.0]], [[1.0]]]))
    assert np.isclose(out[0, 0, 0], 0.7310586)


def test_merge_needs_one_accumulator_beyond_its_arguments():
    outs, lses = jax.ShapeDtypeStruct((4, 2048, 8, 64), jnp.float32), jax.ShapeDtypeStruct((4, 2048, 8), jnp.float32)
    memory = jax.jit(merge_lse).lower(outs, lses).compile().memory_analysis()
    partial = 2048 * 8 * 64 * 4
    assert memory.temp_size_in_bytes <= 2.5 * partial


def plain(q, cache_rows, positions, scale):
    """Causal attention of each query at its position, in float64."""
    outs = []
    for query, p in zip(np.asarray(q, np.float64), positions, strict=True):
        keys = np.asarray(cache_rows[: p + 1], np.float64)
        s = scale * query @ keys.T
        w = np.exp(s - s.max(-1, keepdims=True))
        outs.append(w / w.sum(-1, keepdims=True) @ keys[:, :LATENT])
    return np.array(outs)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 33]), min_size=4, max_size=4),
    contexts=st.lists(st.integers(0, 60), min_size=4, max_size=4),
    layout=st.sampled_from([(2, 1), (4, 2)]),
    seed=st.integers(0, 99),
)
def test_stripes_over_any_shards_merge_to_unsharded_attention(lengths, contexts, layout, seed):
    shards, interleave = layout
    per_rank, rng = 4, np.random.default_rng(seed)
    columns = -(-96 // (per_rank * shards))
    offset = np.cumsum(lengths) - lengths
    keys = rng.normal(size=(4, 96, 80)).astype(np.float32)
    q = np.full((140, 2, 80), np.nan, np.float32)
    table = jnp.asarray(rng.permutation(4 * columns).reshape(4, columns) + 1, jnp.int32)
    parts = []
    new = np.full((140, 80), np.nan, np.float32)
    for row, (at, n, context) in enumerate(zip(offset, lengths, contexts, strict=True)):
        q[at : at + n] = rng.normal(size=(n, 2, 80))
        new[at : at + n] = keys[row, context : context + n]
    step = rows_of(offset, lengths, contexts)
    for rank in range(shards):
        kw = {"shards": shards, "rank": jnp.int32(rank), "interleave": interleave}
        cache = jnp.full((1, 1 + 4 * columns, per_rank, 80), jnp.nan)
        packed = np.concatenate(
            [keys[row, :c] for row, c in enumerate(contexts)] + [np.zeros((240 - sum(contexts), 80))]
        )
        before = rows_of(np.cumsum(contexts) - contexts, contexts, [0] * 4)
        cache = write(cache, jnp.asarray(packed, jnp.float32), 0, before, table, **kw)
        cache = write(cache, jnp.asarray(new), 0, step, table, **kw)
        parts.append(attend(*split(q), cache, 0, step, table, scale=0.1, query_tile=16, **kw))
    out, _ = merge_lse(*(jnp.stack(x) for x in zip(*parts, strict=True)))
    for row, (at, n, context) in enumerate(zip(offset, lengths, contexts, strict=True)):
        if n:
            close(out[at : at + n], plain(q[at : at + n], keys[row], context + np.arange(n), 0.1), 1e-5)
    np.testing.assert_array_equal(out[sum(lengths) :], 0)


def test_decode_tile_of_one_equals_the_prefill_tile():
    rng = np.random.default_rng(0)
    cache = jnp.asarray(rng.normal(size=(1, 13, 16, 80)), jnp.float32)
    table = jnp.asarray(rng.permutation(12).reshape(3, 4) + 1, jnp.int32)
    q = rng.normal(size=(3, 2, 80)).astype(np.float32)
    rows = rows_of([0, 1, 2], [1, 0, 1], [40, 0, 3])
    kw = {"scale": 0.1, "shards": 1, "rank": 0, "interleave": 1}
    one, many = (attend(*split(q), cache, 0, rows, table, query_tile=t, **kw) for t in (1, 64))
    for a, b in zip(one, many, strict=True):
        close(a, b)


@pytest.mark.parametrize(("per_rank", "shards", "interleave"), [(8, 1, 1), (8, 4, 1), (8, 4, 8), (6, 2, 3)])
def test_every_position_has_one_home_and_stripes_are_even(per_rank, shards, interleave):
    p = jnp.arange(3 * per_rank * shards)
    at = stripe.home(p, per_rank, shards, interleave)
    back = at.column * per_rank * shards + jax.vmap(stripe.position_in_block, (0, 0, None, None))(
        at.row, at.rank, shards, interleave
    )
    np.testing.assert_array_equal(back, p)
    rank = np.asarray(at.rank)
    for length in range(1, 3 * per_rank * shards):
        counts = np.bincount(rank[:length], minlength=shards)
        assert counts.max() - counts.min() <= interleave


# Form and type of the pages, rows of a page on a rank, ranks, interleave, heads, and what a query sees.
KINDS = [
    (True, jnp.bfloat16, 16, 1, 1, 4, {}),
    (True, jnp.float32, 16, 4, 1, 12, {}),
    (True, jnp.float32, 8, 8, 8, 32, {}),
    (True, jnp.float32, 32, 2, 16, 64, {"window": 7}),
    (True, jnp.float8_e4m3fn, 16, 1, 1, 96, {"cache_scale": 0.25}),
    (True, jnp.float32, 1024, 1, 1, 4, {}),
    (True, jnp.float32, 544, 2, 272, 4, {"window": 700}),
    (True, jnp.float8_e4m3b11fnuz, 16, 2, 1, 128, {"cache_scale": 0.5}),
    (False, jnp.float32, 16, 1, 1, 4, {"soft_cap": 3.0}),
    (False, jnp.float32, 4, 8, 1, 4, {"window": 20, "soft_cap": 2.0}),
    (False, jnp.float32, 6, 2, 3, 4, {"causal": False}),
    (False, jnp.float8_e4m3fn, 16, 1, 1, 4, {"causal": False, "window": 5}),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(str(x) for x in kind[2:6]))
def test_any_ragged_batch_is_the_float64_attention(kind):
    planes, dtype, n, shards, interleave, heads, sees = kind
    latent, position = (128, 64) if planes else (32, 16)
    options = {"scale": 0.15, "shards": shards, "interleave": interleave, "query_tile": 8 if heads < 64 else 2, **sees}
    run = jax.jit(lambda *given: mla_attention(*given[:-1], rank=given[-1], **options))
    longest = 90 if n <= 512 else 1500

    @settings(max_examples=20 if n <= 512 else 5, deadline=None)
    @given(
        lengths=st.lists(st.sampled_from([0, 1, 1, 2, 4, 9]), min_size=4, max_size=4),
        contexts=st.lists(st.integers(0, longest - 10), min_size=4, max_size=4),
        seed=st.integers(0, 999),
    )
    def check(lengths, contexts, seed):
        given = oracle.case(
            lengths, contexts, heads=heads, n=n, shards=shards, interleave=interleave, planes=planes, latent=latent,
            position=position, tokens=40, columns=-(-longest // (n * shards)), dtype=dtype, seed=seed,
        )  # fmt: skip
        parts = [
            run(*map(jnp.asarray, given.queries), pool, 1, given.rows, jnp.asarray(given.table), rank)
            for rank, pool in enumerate(given.pools)
        ]
        wanted = options | {"rank": None}
        wanted = {k: v for k, v in wanted.items() if k not in ("shards", "interleave", "query_tile")}
        for rank, (out, lse) in enumerate(parts):
            want_out, want_lse = oracle.attention(given, **wanted | {"rank": rank})
            close(out, want_out, 1e-5)
            close(lse, want_lse, 1e-5)
            assert (np.asarray(out)[np.isneginf(lse)] == 0).all()
        out, lse = merge_lse(*(jnp.stack(x) for x in zip(*parts, strict=True)))
        want_out, want_lse = oracle.attention(given, **wanted)
        close(out, want_out, 1e-5)
        close(lse, want_lse, 1e-5)

    check()
    assert run._cache_size() == 1


@pytest.mark.parametrize(
    ("dtype", "cache_scale"), [(jnp.float32, None), (jnp.bfloat16, None), (jnp.float8_e4m3fn, 0.5)]
)
@pytest.mark.parametrize("layout", [(16, 1, 1), (8, 4, 2), (6, 3, 6), (768, 1, 4)])
def test_rows_are_written_where_both_forms_of_a_page_have_them(layout, dtype, cache_scale):
    n, shards, interleave = layout
    given = oracle.case(
        [5, 0, 1, 40], [30, 7, 44, 3] if n < 512 else [382, 0, 767, 500], n=n, shards=shards, interleave=interleave,
        planes=True, latent=128, position=64,
    )  # fmt: skip
    new = np.full((60, 192), np.nan, np.float32)
    spans = zip(given.keys, given.length, given.context, strict=True)
    new[:46] = np.concatenate([keys[begin : begin + count] for keys, count, begin in spans])
    table = given.table.copy()
    table[0, 0] = 0  # the null block takes nothing
    for rank in range(shards):
        written = []
        for planes in (False, True):
            shape = pool_shape(2, int(table.max()) + 1, n, 128, 64, planes=planes)
            pool = write(
                jnp.full(shape, 7.0, dtype), jnp.asarray(new), 1, given.rows, jnp.asarray(table), shards=shards,
                rank=rank, interleave=interleave, cache_scale=cache_scale,
            )  # fmt: skip
            np.testing.assert_array_equal(pool[0].astype(jnp.float32), 7.0)
            written.append(np.asarray(pages_of(pool, 128, 64).split(pool)[1].astype(jnp.float32)))
        np.testing.assert_array_equal(*written)
        want = np.full_like(written[0], 7.0)
        for row, (count, context) in enumerate(zip(given.length, given.context, strict=True)):
            at = np.arange(context, context + count)
            column, home, place = oracle.local_rows(at, n, shards, interleave)
            own = (home == rank) & (table[row, column] != 0)
            values = given.keys[row, at[own]] / (cache_scale or 1.0)
            want[table[row, column[own]], place[own]] = jnp.asarray(values).astype(dtype).astype(jnp.float32)
        np.testing.assert_array_equal(written[0], want)


def test_what_a_narrow_type_cannot_hold_is_clipped():
    cache = jnp.zeros((1, 2, 8, 80), jnp.float8_e4m3fn)
    row = jnp.asarray([[1e4, -1e4, *[1.0] * 78]])
    place = {"shards": 1, "rank": 0, "interleave": 1}
    got = mla_write(cache, row, 0, rows_of([0], [1], [0]), jnp.ones((1, 1), jnp.int32), **place)
    np.testing.assert_array_equal(got[0, 1, 0, :3].astype(jnp.float32), [448, -448, 1])


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 4, 8, 100), "cache: got pages of 8 x 100"), ((1, 4, 70, 128), "cache: got pages of 70 x 128")],
)
def test_pages_of_another_shape_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        mla_attention(
            jnp.zeros((1, 2, 512)), jnp.zeros((1, 2, 64)), jnp.zeros(shape), 0, rows_of([0], [1], [0]),
            jnp.ones((1, 1), jnp.int32), scale=1.0, shards=1, rank=0, interleave=1, query_tile=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window: got 0"),
        ({"soft_cap": 0.0}, "soft_cap: got 0.0"),
        ({"query_tile": 0}, "query_tile: got 0"),
    ],
)
def test_a_window_or_cap_without_meaning_is_refused(options, message):
    given = {"scale": 1.0, "shards": 1, "rank": 0, "interleave": 1, "query_tile": 1, **options}
    with pytest.raises(ValueError, match=message):
        mla_attention(
            jnp.zeros((1, 2, 64)), jnp.zeros((1, 2, 16)), jnp.zeros((1, 2, 8, 80)), 0, rows_of([0], [1], [0]),
            jnp.ones((1, 1), jnp.int32), **given,
        )  # fmt: skip


def step(rows=2, tokens=2, columns=3, planes=False):
    """Arguments of a small step: pools of 4 blocks in 2 layers, every row with one token at position 3."""
    latent, position = (128, 64) if planes else (64, 16)
    each = jnp.arange(rows), jnp.ones(rows, jnp.int32), jnp.full(rows, 3)
    step = RaggedRows(*(jnp.asarray(x, jnp.int32) for x in each))
    pool = jnp.ones(pool_shape(2, 4, 16, latent, position, planes=planes))
    table = jnp.ones((rows, columns), jnp.int32)
    q = jnp.ones((tokens, 2, latent)), jnp.ones((tokens, 2, position))
    return q, pool, jnp.ones((tokens, latent + position)), step, table


PLACE = {"shards": 1, "rank": 0, "interleave": 1}
ATTEND = {"scale": 1.0, "query_tile": 1, **PLACE}


@pytest.mark.parametrize("sizes", [{"tokens": 0}, {"rows": 0}, {"columns": 0}], ids=str)
def test_steps_without_tokens_rows_or_columns_see_and_write_nothing(sizes):
    q, pool, new, rows, table = step(**sizes)
    out, lse = mla_attention(*q, pool, 0, rows, table, **ATTEND)
    assert out.shape == q[0].shape and (out == 0).all() and np.isneginf(lse).all()
    np.testing.assert_array_equal(mla_write(pool, new, 0, rows, table, **PLACE), pool)


@pytest.mark.parametrize("planes", [False, True])
def test_ids_outside_the_pool_write_nothing(planes):
    _, pool, new, rows, table = step(planes=planes)
    for wrong in (-1, 4, 99):
        table = table.at[:, 0].set(wrong)
        np.testing.assert_array_equal(mla_write(pool, new * 5, 0, rows, table, **PLACE), pool)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 2}, "layer: got 2; it lies in 0 to 1"),
        ({"layer": -1}, "layer: got -1"),
        ({"rank": 1}, "rank: got 1; it lies in 0 to 0"),
        ({"shards": 0}, "shards: got 0"),
        ({"table": jnp.ones((1, 3), jnp.int32)}, r"table: got shape \[1, 3\] for 2 rows"),
    ],
)
def test_what_does_not_belong_together_is_refused_by_every_op(change, message):
    q, pool, new, rows, table = step()
    given = {"layer": 0, "table": table, **PLACE, **change}
    layer, table = given.pop("layer"), given.pop("table")
    w = jnp.ones((2, 16, 64))
    for op in (
        lambda: mla_write(pool, new, layer, rows, table, **given),
        lambda: mla_attention(*q, pool, layer, rows, table, scale=1.0, query_tile=1, **given),
        lambda: mla_expanded(
            jnp.ones((2, 2, 16)), q[1], w, w, pool, layer, rows, table, scale=1.0, workspace=512, **given
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            op()


def test_rows_before_every_window_may_hold_anything():
    q, pool, _, rows, _ = step(rows=1, tokens=1)
    rows = rows._replace(start=jnp.asarray([40]))
    table, pool = jnp.asarray([[1, 2, 3]]), pool.at[:, 1].set(jnp.nan)
    out, lse = mla_attention(*q, pool, 0, rows, table, window=8, **ATTEND)
    np.testing.assert_allclose(out, 1.0)
    np.testing.assert_allclose(lse, 80 + np.log(8), rtol=1e-6)


def test_a_merge_of_nothing_or_of_other_shapes_is_refused():
    for outs, lses in (
        (jnp.zeros((0, 1, 2, 4)), jnp.zeros((0, 1, 2))),
        (jnp.zeros((2, 1, 2, 4)), jnp.zeros((2, 1, 1))),
    ):
        with pytest.raises((ValueError, TypeError)):
            merge_lse(outs, lses)


@pytest.mark.parametrize(("rows", "latent", "position"), [(7, 512, 64), (8, 500, 64), (8, 512, 32)])
def test_pages_that_have_no_planes_are_refused(rows, latent, position):
    with pytest.raises(ValueError, match="planes: got"):
        pool_shape(1, 2, rows, latent, position, planes=True)


def test_an_interleave_that_does_not_divide_the_rows_is_refused():
    with pytest.raises(ValueError, match="interleave: got 3"):
        mla_write(
            jnp.zeros((1, 2, 8, 80)), jnp.zeros((1, 80)), 0, rows_of([0], [1], [0]), jnp.zeros((1, 1), jnp.int32),
            shards=2, rank=0, interleave=3,
        )  # fmt: skip
