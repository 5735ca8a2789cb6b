"""Latent attention on Hopper in the interpreter, against float64 on the same bf16 rows and queries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla import gpu, mla_attention
from pallas_kernels.mla.visible import Visible
from tests.kernels import mla_oracle as oracle
from tests.kernels.gpu_interpreter import assert_no_races, gpu_interpreter

SCALE = 192**-0.5


def case(lengths, contexts, **options):
    given = oracle.case(
        lengths, contexts, planes=True, latent=512, position=64, dtype=jnp.bfloat16, **{"n": 64} | options
    )  # fmt: skip
    return dataclasses.replace(given, q=np.asarray(jnp.asarray(given.q, jnp.bfloat16).astype(jnp.float32)))


def attend(given, visible, rank=0, cache_scale=None, table=None, attention=gpu.mla_attention, **options):
    call = functools.partial(
        attention, scale=SCALE, query_tile=4, visible=visible, cache_scale=cache_scale, **given.stripe, **options
    )  # fmt: skip
    queries = (jnp.asarray(q, jnp.bfloat16) for q in given.queries)
    table = jnp.asarray(given.table if table is None else table)
    out, lse = jax.jit(call)(*queries, given.pools[rank], jnp.int32(1), given.rows, table, rank=jnp.int32(rank))
    assert out.dtype == jnp.bfloat16
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def assert_alike(got, wanted):
    """P is rounded to bf16, and so is the output: 2 ** -9 of a value each."""
    (out, lse), (wanted_out, wanted_lse) = got, wanted
    assert np.sqrt(np.mean((out - wanted_out) ** 2) / np.mean(wanted_out**2)) < 3e-3
    np.testing.assert_allclose(out, wanted_out, atol=3e-2, rtol=1e-2)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5, rtol=1e-5)
    empty = np.isneginf(wanted_lse)
    np.testing.assert_array_equal(out[empty], 0)


@pytest.mark.parametrize(
    ("lengths", "contexts", "options", "rules"),
    [
        # A block of queries ends inside a token, the last one begins before its request.
        ([1, 3, 0, 20], [100, 70, 5, 130], {"heads": 5}, {}),
        # Fewer than 64 query rows; a sequence that begins; one page of each row is partly written.
        ([1, 2], [0, 40], {"heads": 4}, {}),
        # The context of a row is cut into stretches, some of them without a tile.
        ([1, 1], [500, 3], {"heads": 64, "n": 128}, {}),
        # Pages in sections of 64 rows, and in such of 256.
        ([1, 1], [330, 100], {"heads": 4, "n": 320}, {}),
        ([2], [1030], {"heads": 4, "n": 1024}, {"window": 700}),
        ([4, 1], [90, 64], {"heads": 12}, {"causal": False, "window": 70}),
        ([2, 1], [190, 20], {"heads": 8}, {"window": 33, "soft_cap": 1.5}),
    ],
)
def test_ragged_rows_match_float64(lengths, contexts, options, rules, capsys):
    given = case(lengths, contexts, **options)
    got = attend(given, Visible(**rules), interpret=gpu_interpreter())
    assert_alike(got, oracle.attention(given, scale=SCALE, **rules))
    assert_no_races(capsys)


@pytest.mark.parametrize(("interleave", "rank"), [(1, 3), (16, 0)])
def test_a_rank_attends_to_its_stripe(interleave, rank, capsys):
    given = case([3, 1, 1], [310, 20, 0], heads=7, shards=4, interleave=interleave)
    got = attend(given, Visible(), rank, interpret=gpu_interpreter())
    wanted = oracle.attention(given, scale=SCALE, rank=rank)
    assert_alike(got, wanted)
    # The row of one position, and for other ranks than the first nothing of it.
    assert np.isneginf(wanted[1][4]).all() == (rank > 0)
    assert_no_races(capsys)


def test_null_blocks_are_not_seen_and_rows_have_a_scale(capsys):
    given = case([1, 2], [150, 20], heads=6)
    table = given.table.copy()
    table[0, 1] = 0
    options = {"cache_scale": 0.25, "table": table}
    got = attend(given, Visible(), interpret=gpu_interpreter(), **options)
    reference = functools.partial(mla_attention, implementation="reference")
    wanted = attend(given, Visible(), attention=lambda *a, visible, **k: reference(*a, **k), **options)
    assert_alike(got, wanted)
    assert_no_races(capsys)


def test_what_the_kernel_does_not_take_is_refused_with_the_fix():
    given = case([1], [10], heads=2)
    wide = (*(jnp.asarray(q) for q in given.queries), given.pools[0], 0, given.rows, jnp.asarray(given.table))
    call = functools.partial(mla_attention, scale=1.0, rank=0, query_tile=1, implementation="gpu", **given.stripe)
    with pytest.raises(ValueError, match="q_latent: got float32; the GPU kernel takes bfloat16; use implementation"):
        call(*wide)
    narrow = case([1], [10], heads=2, n=32)
    with pytest.raises(ValueError, match=r"cache: got planes of 32 x \(512 \+ 64\).*multiple of 64 rows"):
        attend(narrow, Visible())
