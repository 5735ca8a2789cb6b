"""The TPU kernel of latent attention, interpreted, against float64 from the same stored rows; compiled for every chip.

Few programs, many batches: every shape is compiled once and run over random rows.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.mla import merge_lse, mla_attention
from pallas_kernels.mla.pages import pool_shape
from pallas_kernels.mla.tpu import attention
from pallas_kernels.mla.tpu import tiles as tiles_of
from pallas_kernels.mla.tpu.blocks import blocks_of
from pallas_kernels.mla.tpu.tiles import Tiles, vmem_bytes
from pallas_kernels.mla.visible import Visible, visible
from pallas_kernels.rows import RaggedRows
from pallas_kernels.vmem import VMEM_BYTES
from tests.kernels import mla_oracle as oracle
from tests.kernels import tpu
from tests.kernels.races import races_found

SCALE, LAYER = 0.1, 1
BF16, E4M3, B11 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e4m3b11fnuz
# Half the time to compile; each program runs a few times.
FOUR_LANES, CAUSAL = Tiles(4, 128, 1), Visible()
# All pages of a block are copied, those never written (NaN) too, into a buffer for each two lanes.
WHOLE = FOUR_LANES._replace(groups=2, whole=True)
QUICK = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a program is compiled for: 5 rows, tables for `longest` tokens, 40 packed tokens or one for each row."""

    dtype: object = BF16
    n: int = 64
    heads: int = 4
    latent: int = 128
    shards: int = 1
    interleave: int = 1
    query_tile: int = 1
    tiles: Tiles = FOUR_LANES
    sees: Visible = CAUSAL
    cache_scale: float | None = None
    longest: int = 300

    @property
    def columns(self):
        return -(-self.longest // (self.n * self.shards))

    @property
    def tokens(self):
        return 7 if self.query_tile == 1 else 5 * self.query_tile if self.query_tile < 64 else 64

    def case(self, lengths, contexts, seed):
        given = oracle.case(
            lengths, contexts, heads=self.heads, n=self.n, shards=self.shards, interleave=self.interleave, planes=True,
            latent=self.latent, position=64, tokens=self.tokens, columns=self.columns, dtype=self.dtype, seed=seed,
        )  # fmt: skip
        return dataclasses.replace(given, q=np.asarray(jnp.asarray(given.q, BF16).astype(jnp.float32)))

    def run(self, *arguments, interpret=True):
        *given, rank = arguments
        return attention.mla_attention(
            *given, scale=SCALE, shards=self.shards, rank=rank, interleave=self.interleave, query_tile=self.query_tile,
            visible=self.sees, cache_scale=self.cache_scale, tiles=self.tiles, interpret=interpret,
        )  # fmt: skip

    def wanted(self, given, rank=None):
        return oracle.attention(
            given, scale=SCALE, rank=rank, causal=self.sees.causal, window=self.sees.window,
            soft_cap=self.sees.soft_cap, cache_scale=self.cache_scale or 1.0,
        )  # fmt: skip


def arguments(given, rank=0):
    q = (jnp.asarray(a, BF16) for a in given.queries)
    return *q, given.pools[rank], jnp.int32(LAYER), given.rows, jnp.asarray(given.table), jnp.int32(rank)


def close(got, want):
    """Outputs of unit scale to 2.5e-2: with few keys a score rounded in bf16 shows; no keys, no output."""
    (out, lse), (want_out, want_lse) = (tuple(np.asarray(x, np.float64) for x in pair) for pair in (got, want))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_allclose(out, want_out, atol=2.5e-2)
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[seen], want_lse[seen], atol=2e-2)
    np.testing.assert_array_equal(out[~seen], 0)


KINDS = {
    "decode": (Kind(tiles=WHOLE), 30),
    "small-pages-fp8": (Kind(E4M3, n=16, heads=12, cache_scale=0.5), 20),
    "stripe-of-8": (Kind(n=16, heads=32, shards=8, interleave=16, tiles=Tiles(8, 64, 2, whole=True)), 15),
    "stripe-of-2-verify": (Kind(B11, n=32, shards=2, query_tile=4, cache_scale=0.25), 15),
    "large-pages-latent-512": (Kind(n=256, heads=64, latent=512, tiles=Tiles(2, 128, 1, whole=True)), 15),
    "mixed": (Kind(n=64, query_tile=64), 15),
    "window-and-cap": (Kind(n=32, query_tile=2, sees=Visible(True, 50, 3.0), tiles=WHOLE), 15),
    "staggered": (Kind(n=32, heads=12, query_tile=4, tiles=Tiles(3, 128, 1, 1, staggered=True, whole=True)), 15),
    "staggered-wide-fp8": (
        Kind(
            E4M3,
            n=64,
            heads=32,
            latent=512,
            query_tile=2,
            cache_scale=0.5,
            sees=Visible(True, 90, 3.0),
            tiles=Tiles(2, 128, 1, 2, staggered=True),
        ),
        10,
    ),
    "drafts": (Kind(n=32, query_tile=4, heads=96, sees=Visible(False), tiles=WHOLE), 10),
    # Pages in several sections; pieces of a stripe longer than a block, or half of one.
    "sections": (Kind(n=1024, tiles=Tiles(3, 512, 1, whole=True), longest=1900), 6),
    "sections-in-one-piece": (Kind(n=1024, shards=2, interleave=1024, tiles=Tiles(2, 512, 1), longest=4000), 5),
    "sections-fp8-verify": (
        Kind(E4M3, n=768, shards=2, interleave=256, query_tile=2, sees=Visible(True, 900, None), longest=3000),
        5,
    ),
    "many-heads": (Kind(n=128, heads=128, tiles=Tiles(3, 128, 3, 0)), 10),
}


@functools.cache
def program(name):
    kind = KINDS[name][0]
    given = kind.case([1] * 5, [0] * 5, 0)
    return jax.jit(kind.run).lower(*arguments(given)).compile(compiler_options=QUICK)


@pytest.mark.parametrize("name", KINDS)
def test_any_ragged_batch_is_the_float64_attention_and_stripes_merge_to_it(name):
    kind, examples = KINDS[name]
    run = program(name)
    lengths = st.integers(0, min(kind.query_tile, 24))

    @settings(max_examples=examples, deadline=None)
    @given(
        lengths=st.lists(lengths, min_size=5, max_size=5),
        contexts=st.lists(st.integers(0, kind.longest - 30), min_size=5, max_size=5),
        seed=st.integers(0, 999),
    )
    def check(lengths, contexts, seed):
        while sum(lengths) > kind.tokens:
            lengths = [n // 2 for n in lengths]
        given = kind.case(lengths, contexts, seed)
        parts = [run(*arguments(given, rank)) for rank in range(kind.shards)]
        for rank, part in enumerate(parts):
            close(part, kind.wanted(given, rank))
        if kind.shards > 1:
            close(merge_lse(*(jnp.stack(x) for x in zip(*parts, strict=True))), kind.wanted(given))

    check()


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_null_blocks_are_not_seen_wherever_they_are(name):
    kind, run = KINDS[name][0], program(name)
    given = kind.case([1, 1, 1, 0, 1], [200, 130, 63, 0, 5], 3)
    table = given.table.copy()
    table[0, 1] = table[1, 0] = table[4, 0] = 0
    out, lse = run(*arguments(dataclasses.replace(given, table=table)))
    for row, gone in ((0, range(64, 128)), (1, range(64)), (2, ())):
        at = np.setdiff1d(np.arange(given.context[row] + 1), np.asarray(gone, int))
        keys = given.keys[row, at].astype(np.float64)
        s = SCALE * given.q[row].astype(np.float64) @ keys.T
        w = np.exp(s - s.max(-1, keepdims=True))
        np.testing.assert_allclose(out[row].astype(jnp.float32), w @ keys[:, :128] / w.sum(-1)[:, None], atol=2e-2)
        np.testing.assert_allclose(lse[row], s.max(-1) + np.log(w.sum(-1)), atol=2e-2)
    np.testing.assert_array_equal(out[3], 0)
    assert np.isneginf(lse[3:]).all()


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_positions_beyond_the_table_are_not_seen(name):
    """The last block of keys reaches behind the table, whose columns are no multiple of its pages."""
    kind, run = KINDS[name][0], program(name)
    assert kind.columns % (kind.tiles.keys // kind.n)
    last = kind.columns * kind.n - 1
    given = kind.case([1] * 5, [last, 5, last, 100, 0], 9)
    *before, rows, table, rank = arguments(given)
    far = rows._replace(start=rows.start.at[0].set(last + 400).at[2].set(last + 10))
    close(run(*before, far, table, rank), kind.wanted(given))


@pytest.mark.parametrize("contexts", [[62, 3, 0, 40, 31], [63, 3, 0, 40, 64]])
def test_pages_behind_the_end_may_be_nan_whether_or_not_a_page_is_full(contexts):
    """Whole blocks of two pages are copied; behind the ends stands a page written throughout, if there is one."""
    kind, run = KINDS["decode"][0], program("decode")
    assert kind.tiles.whole and kind.tiles.keys == 2 * kind.n
    given = kind.case([1, 1, 0, 1, 1], contexts, 4)
    close(run(*arguments(given)), kind.wanted(given))


def test_slack_between_rows_is_cleared():
    kind, run = KINDS["mixed"][0], program("mixed")
    given = kind.case([3, 1, 0, 20, 1], [10, 100, 0, 40, 200], 5)
    q, rope, *rest = arguments(given)
    move = np.concatenate([np.arange(2, 5), [7], np.arange(8, 28), [63]])
    rows = RaggedRows(jnp.array([2, 7, 1, 8, 63]), given.rows.length, given.rows.start)
    spread = [jnp.full_like(a, jnp.nan).at[move].set(a[:25]) for a in (q, rope)]
    rest[2] = rows
    out, lse = run(*spread, *rest)
    want_out, want_lse = kind.wanted(given)
    close((out[move], lse[move]), (want_out[:25], want_lse[:25]))
    slack = np.setdiff1d(np.arange(64), move)
    np.testing.assert_array_equal(out[slack], 0)
    assert np.isneginf(lse[slack]).all()


@pytest.mark.parametrize(
    "kind",
    [
        Kind(n=32, tiles=Tiles(2, 64, 2, 1, whole=True)),
        Kind(n=32, query_tile=2, tiles=Tiles(2, 32, 2, 0)),
        Kind(n=32, query_tile=2, tiles=Tiles(2, 64, 1, 1, staggered=True)),
    ],
)
def test_no_races_no_uninitialised_memory_and_nothing_out_of_bounds(kind):
    given = kind.case([1, 1, 0, 1, 1], [70, 3, 0, 100, 31], 1)
    got = jax.jit(functools.partial(kind.run, interpret=tpu.CHECKED))(*arguments(given))
    close(got, kind.wanted(given))
    assert not races_found()


def test_eight_devices_hold_a_stripe_each():
    kind = KINDS["stripe-of-8"][0]
    given = kind.case([1, 1, 0, 1, 1], [200, 3, 0, 130, 270], 7)
    mesh = Mesh(np.array(jax.devices()[:8]), ("dcp",))
    q, rope, _, layer, rows, table, _ = arguments(given)

    def local(q, rope, pool, layer, rows, table):
        out, lse = kind.run(q, rope, pool[0], layer, rows, table, jax.lax.axis_index("dcp"))
        return merge_lse(*(jax.lax.all_gather(a, "dcp") for a in (out, lse)))

    here, all_ranks = PartitionSpec("dcp"), PartitionSpec()
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(all_ranks, all_ranks, here, all_ranks, all_ranks, all_ranks),
        out_specs=all_ranks, check_vma=False,
    )  # fmt: skip
    got = (
        jax.jit(run)
        .lower(q, rope, jnp.stack(given.pools), layer, rows, table)
        .compile(compiler_options=QUICK)(q, rope, jnp.stack(given.pools), layer, rows, table)
    )
    close(got, kind.wanted(given))


def test_what_does_not_fit_is_refused_with_figures():
    blocks = blocks_of(256, 512, 512)
    with pytest.raises(ValueError, match=r"bytes of vector memory needed for 16 tokens of 128 heads, 16 lanes"):
        vmem_bytes(Tiles(16, 512, 1), blocks, 128, 16, 512, 2)
    shape = jax.ShapeDtypeStruct
    rows = RaggedRows(*[shape((4096,), jnp.int32)] * 3)

    def run(dtype, count=4096):
        pool = shape(pool_shape(1, 8, 64, 512, 64, planes=True), dtype)
        q, rope = shape((count, 16, 512), BF16), shape((count, 16, 64), BF16)
        table = shape((4096, 16384), jnp.int32)
        return jax.eval_shape(
            functools.partial(
                mla_attention, scale=1.0, shards=1, rank=0, interleave=1, query_tile=1, implementation="tpu"
            ), q, rope, pool, 0, rows, table,
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"\d+ bytes of scalar memory needed for 4096 tokens, 4096 rows"):
        run(BF16)
    with pytest.raises(ValueError, match="got float32 pages"):
        run(jnp.float32)


@pytest.mark.parametrize("heads", [12, 64, 96, 128])
@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
def test_chosen_tiles_fit_their_chip_and_many_rows_go_one_behind_the_other(monkeypatch, heads, chip):
    padded = -(-heads // 16) * 16
    most, generation = VMEM_BYTES[chip] * 7 // 8, {"v5p": 5, "v6e": 6, "tpu7x": 7}[chip]
    monkeypatch.setattr(tiles_of, "generation", lambda: generation)
    monkeypatch.setattr(tiles_of, "_vmem", lambda: most)
    for queries, dtype, n in itertools.product((1, 2, 4, 8), (BF16, E4M3), (16, 64, 256)):
        tiles, blocks = tiles_of.choose_tiles(padded, queries, 512, n, jnp.dtype(dtype))
        assert tiles.staggered == (padded * queries > 128)
        assert vmem_bytes(tiles, blocks, padded, queries, 512, jnp.dtype(dtype).itemsize) <= most


# heads, page, type, tokens of a row, query tile, layers and blocks of a pool that may be beyond 2^31 elements
SHAPES = [
    (32, 256, BF16, 1, 1, (7, 2300)),
    (32, 64, E4M3, 1, 1, (27, 9000)),
    (96, 64, BF16, 4, 4, (12, 9000)),
    (12, 256, E4M3, 1, 1, (61, 2300)),
    (12, 256, E4M3, 16, 64, (7, 2300)),
    (96, 1024, E4M3, 1, 1, (61, 1200)),
    (32, 64, B11, 4, 4, (7, 9000)),
    (12, 64, BF16, 1, 1, (61, 9000)),
]


@pytest.mark.aot
@pytest.mark.parametrize(("chip", "heads", "page", "dtype", "tokens", "tile", "pool"), tpu.across_chips(SHAPES))
def test_it_compiles_for_every_chip_and_copies_no_pool(chip, heads, page, dtype, tokens, tile, pool):
    count, rows = 32 * tokens, 32
    cache = (pool_shape(*pool, page, 512, 64, planes=True), dtype)
    run = functools.partial(
        attention.mla_attention, scale=SCALE, shards=1, interleave=1, query_tile=tile, visible=visible(True, None, None)
    )
    each = ((rows,), jnp.int32)
    found = tpu.compile_for(
        chip, lambda q, rope, cache, layer, a, b, c, table, rank: run(
            q, rope, cache, layer, RaggedRows(a, b, c), table, rank=rank
        ), ((count, heads, 512), BF16), ((count, heads, 64), BF16), cache, ((), jnp.int32), each, each, each,
        ((rows, 8192 // page), jnp.int32), ((), jnp.int32),
    )  # fmt: skip
    assert found.temporary_bytes < 64 << 20
