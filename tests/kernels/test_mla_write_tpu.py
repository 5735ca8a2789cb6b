"""Row writes on TPU put exactly what the reference puts, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels.mla import api, mla_write
from pallas_kernels.mla.pages import pages_of, pool_shape
from pallas_kernels.mla.tpu import write
from tests.kernels import mla_oracle as oracle
from tests.kernels.races import races_found
from tests.kernels.tpu import CHECKED, CHIPS, compile_for

TOKENS, ROWS, COLUMNS, LAYER = 70, 4, 8, 1


def on_tpu(cache, new, layer, rows, table, interpret=True, cache_scale=None, **stripe):
    form = pages_of(cache, 512, 64)
    return write.mla_write(
        cache, new, layer, rows, table, form=form, cache_scale=cache_scale, interpret=interpret, **stripe
    )  # fmt: skip


def problem(lengths, contexts, n, dtype, seed, columns=COLUMNS):
    """Rows one after the other, slack NaN, a table with a null block, a pool whose every value differs."""
    rng = np.random.default_rng(seed)
    new = np.full((TOKENS, 576), np.nan, np.float32)
    new[: sum(lengths)] = rng.normal(size=(sum(lengths), 576))
    table = (rng.permutation(ROWS * columns) + 1).reshape(ROWS, columns)
    table[rng.integers(ROWS), rng.integers(columns)] = 0
    pool = rng.standard_normal(pool_shape(2, ROWS * columns + 1, n, 512, 64, planes=True), np.float32)
    offset = np.cumsum(lengths) - lengths
    rows = oracle.RaggedRows(*(jnp.asarray(x, jnp.int32) for x in (offset, lengths, contexts)))
    return jnp.asarray(pool).astype(dtype), jnp.asarray(new), LAYER, rows, jnp.asarray(table, jnp.int32)


def same(got, want):
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.parametrize(
    ("n", "shards", "interleave", "dtype"),
    [
        (16, 1, 1, jnp.bfloat16),
        (32, 2, 1, jnp.float8_e4m3fn),
        (64, 1, 1, jnp.float8_e4m3b11fnuz),
        (16, 8, 16, jnp.bfloat16),
        (48, 4, 3, jnp.float32),
        (544, 1, 1, jnp.bfloat16),
        (1024, 2, 1024, jnp.float8_e4m3fn),
    ],
)
def test_any_ragged_batch_is_written_as_the_reference_writes_it(n, shards, interleave, dtype):
    stripe = {"shards": shards, "interleave": interleave, "cache_scale": 0.5}
    kernel, reference = (jax.jit(functools.partial(op, **stripe)) for op in (on_tpu, mla_write))
    columns, longest = (COLUMNS, 150) if n <= 512 else (2, 2 * n * shards - 50)

    @settings(max_examples=10, deadline=None, phases=[Phase.generate])
    @given(
        lengths=st.lists(st.sampled_from([0, 1, 1, 2, 5, 17, 40]), min_size=ROWS, max_size=ROWS).filter(
            lambda x: sum(x) <= TOKENS
        ),
        contexts=st.lists(st.integers(0, longest), min_size=ROWS, max_size=ROWS),
        rank=st.integers(0, shards - 1),
        seed=st.integers(0, 99),
    )
    def check(lengths, contexts, rank, seed):
        given = problem(lengths, contexts, n, dtype, seed, columns)
        same(kernel(*given, rank=rank), reference(*given, rank=rank))

    check()


@pytest.mark.parametrize("n", [16, 64])
def test_patches_neither_race_nor_read_what_is_not_there(n):
    given = problem([1, 0, 45, 3], [9, 5, 3, 31], n, jnp.bfloat16, 0)
    stripe = {"shards": 1, "rank": 0, "interleave": 1}
    got = on_tpu(*given, interpret=CHECKED, **stripe)
    assert not races_found()
    same(got, mla_write(*given, **stripe))


def test_every_patch_is_listed_once():
    """Rows that fill whole pages and one token: no two patches share a tile, and each token has one."""
    rows = oracle.RaggedRows(*(jnp.asarray(x) for x in ([0, 0, 297, 0], [297, 0, 1, 0], [3, 0, 100, 7])))
    table = jnp.arange(1, 4 * 8 + 1).reshape(4, 8)
    patches, count = write.patches_of(rows, table, 0, blocks=33, chunk=320, n=64, shards=1, rank=0, interleave=1)
    fields = {name: np.asarray(field)[: int(count)] for name, field in patches._asdict().items()}
    tiles = list(zip(fields["block"].tolist(), fields["group"].tolist(), strict=True))
    assert len(set(tiles)) == len(tiles)
    tokens = [(0, x) for x in range(3, 300)] + [(2, 100)]
    assert set(tiles) == {(1 + 8 * row + x // 64, x % 32 // 8 * 8) for row, x in tokens}
    listed = fields["high"] - fields["low"] + fields["high2"] - fields["low2"]
    assert listed.sum() == 298 and (listed > 0).all()


@pytest.mark.parametrize("n", [16, 256])
def test_a_row_over_several_chunks_is_written_as_by_one(n, monkeypatch):
    given = problem([60, 0, 9, 1], [20, 0, 5, 3], n, jnp.bfloat16, 0)
    monkeypatch.setattr(write, "CHUNK", 16)
    stripe = {"shards": 1, "rank": 0, "interleave": 1}
    same(jax.jit(functools.partial(on_tpu, **stripe))(*given), mla_write(*given, **stripe))


def test_no_tokens_and_pages_the_tpu_does_not_write():
    pool, new, layer, rows, table = problem([0] * 4, [0] * 4, 16, jnp.bfloat16, 0)
    stripe = {"shards": 1, "rank": 0, "interleave": 1}
    same(mla_write(pool, new[:0], layer, rows, table, implementation="tpu", **stripe), pool)
    for bad in (jnp.zeros((1, 2, 8, 576)), jnp.zeros(pool_shape(1, 2, 24, 512, 64, planes=True))):
        with pytest.raises(ValueError, match="cache: got pages of"):
            mla_write(bad, new, 0, rows, table, implementation="tpu", **stripe)
        assert not api._written(pages_of(bad, 512, 64))("tpu")


def test_more_tokens_than_scalar_memory_has_room_for_are_refused():
    rows = oracle.RaggedRows(*(jnp.zeros(256, jnp.int32),) * 3)
    pool = jnp.zeros(pool_shape(1, 2, 16, 512, 64, planes=True), jnp.bfloat16)
    with pytest.raises(ValueError, match="new: got 40000 tokens of 256 rows"):
        on_tpu(
            pool, jnp.zeros((40000, 576)), 0, rows, jnp.zeros((256, 4), jnp.int32), shards=1, rank=0, interleave=1
        )  # fmt: skip


@pytest.mark.aot
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("n", "dtype"), [(16, jnp.bfloat16), (64, jnp.float8_e4m3fn), (1024, jnp.bfloat16)])
def test_writes_compile_in_place_for_every_chip(chip, n, dtype):
    rows = 128
    pool = (pool_shape(7, (1 << 20) // n, n, 512, 64, planes=True), dtype)  # more than 2^31 elements
    i32 = jnp.int32

    def run(cache, new, layer, offset, length, start, table):
        rows = oracle.RaggedRows(offset, length, start)
        return on_tpu(cache, new, layer, rows, table, interpret=False, shards=1, rank=0, interleave=1)

    done = compile_for(
        chip, run, pool, ((128, 576), jnp.bfloat16), ((), i32), *[((rows,), i32)] * 3, ((rows, 128), i32), donate=(0,)
    )
    assert done.alias_bytes == np.prod(pool[0]) * jnp.dtype(dtype).itemsize and done.temporary_bytes < 1 << 20
