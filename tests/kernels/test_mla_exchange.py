"""Ranks that hold a stripe of the tokens and some of the heads get the attention of all tokens for their heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.mla import context_parallel, exchange, mla_attention
from pallas_kernels.mla.exchange import gather_heads
from tests.kernels import mla_oracle as oracle

OPTIONS = {"scale": 0.15, "query_tile": 4}


def ring(ranks):
    return Mesh(np.array(jax.devices()[:ranks]), ("dcp",))


def spread(given, how):
    """Heads and stripes over all ranks of the case."""
    ranks = given.stripe["shards"]
    mesh = ring(ranks)

    def local(q_latent, q_rope, pool):
        def attend(*heads):
            return mla_attention(
                *heads, pool[0], 1, given.rows, jnp.asarray(given.table), rank=jax.lax.axis_index("dcp"),
                **OPTIONS, **given.stripe,
            )  # fmt: skip

        return context_parallel(attend, q_latent, q_rope, "dcp", exchange=how)

    heads = P(None, "dcp")
    run = jax.shard_map(local, mesh=mesh, in_specs=(heads, heads, P("dcp")), out_specs=(heads, heads), check_vma=False)
    return jax.jit(run)(*map(jnp.asarray, given.queries), jnp.stack(given.pools))


@pytest.mark.parametrize("how", ["reduce_scatter", "all_to_all"])
@pytest.mark.parametrize(("shards", "interleave", "planes"), [(1, 1, False), (2, 16, True), (8, 1, True)])
def test_own_heads_see_the_tokens_of_every_rank(how, shards, interleave, planes):
    """Contexts of 0 to a few tokens: most ranks have no key for some rows, and slack has none anywhere."""
    latent, position = (128, 64) if planes else (32, 16)
    given = oracle.case(
        [1, 4, 0, 2], [0, 3, 5, 70], heads=8, shards=shards, interleave=interleave, planes=planes, latent=latent,
        position=position,
    )  # fmt: skip
    out, lse = spread(given, how)
    want_out, want_lse = oracle.attention(given, scale=OPTIONS["scale"])
    np.testing.assert_allclose(out, want_out, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(out[7:], 0)


@pytest.mark.parametrize(
    ("how", "kinds"),
    [("reduce_scatter", {"all-gather", "reduce-scatter"}), ("all_to_all", {"all-gather", "all-to-all"})],
)
def test_what_travels_is_the_latent_width_of_queries_and_outputs(how, kinds):
    ranks, tokens, heads, latent = 4, 3, 8, 32
    mesh = ring(ranks)

    def local(q_latent, q_rope):
        return context_parallel(lambda a, b: (a, b.sum(-1)), q_latent, q_rope, "dcp", exchange=how)

    spec = P(None, "dcp")
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(run).lower(jnp.zeros((tokens, heads, latent)), jnp.zeros((tokens, heads, 16))).compile().as_text()
    lines = [line for line in text.splitlines() if "f32[" in line and "(" in line]
    found = {
        kind
        for kind in ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")
        if any(f" {kind}" in x for x in lines)
    }
    assert found == kinds


def test_an_unknown_exchange_is_refused():
    with pytest.raises(ValueError, match="exchange: got 'ring'"):
        context_parallel(lambda a, b: (a, b), jnp.zeros((1, 1, 1)), jnp.zeros((1, 1, 1)), "dcp", exchange="ring")


def test_the_merge_of_long_prefills_needs_one_partial_and_one_accumulator():  # 69
    """16,384 tokens of 96 heads, compiled only: a bf16 partial and an fp32 accumulator, nothing per rank."""
    mesh = ring(8)
    tokens, heads = 16384, 96
    run = jax.shard_map(
        functools.partial(exchange.reduce_scatter, axis="dcp"), mesh=mesh, in_specs=P(), out_specs=P(None, "dcp"),
        check_vma=False,
    )  # fmt: skip
    shape = jax.ShapeDtypeStruct
    lowered = jax.jit(run).lower(shape((tokens, heads, 512), jnp.bfloat16), shape((tokens, heads), jnp.float32))
    partial = tokens * heads * 512 * 2
    assert lowered.compile().memory_analysis().temp_size_in_bytes <= partial + 2 * partial


def test_queries_are_gathered_in_one_collective():
    mesh = ring(4)
    run = jax.shard_map(
        lambda *q: gather_heads(*q, "dcp"), mesh=mesh, in_specs=P(None, "dcp"), out_specs=P(), check_vma=False
    )  # fmt: skip
    q = jnp.arange(2 * 8 * 4.0).reshape(2, 8, 4), jnp.arange(2 * 8 * 2.0).reshape(2, 8, 2)
    for got, want in zip(jax.jit(run)(*q), q, strict=True):
        np.testing.assert_array_equal(got, want)
    assert jax.jit(run).lower(*q).compile().as_text().count(" all-gather(") == 1
