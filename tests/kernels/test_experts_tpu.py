"""The TPU kernels of the experts, interpreted, against float64; and compiled for every chip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts import SILU, ExpertWeights, NativeMatrix, PackedExperts, PackedMatrix, expert_ffn, situ
from pallas_kernels.experts.packed import scale_rows
from pallas_kernels.experts.plan import sort
from pallas_kernels.experts.tpu import driver, tiles
from pallas_kernels.experts.tpu.tiles import FfnTiles, RowTiles
from tests.kernels.experts_cases import random_experts, routing, truth
from tests.kernels.golden import rel_rmse
from tests.kernels.races import races_found
from tests.kernels.tpu import CHECKED, compile_for

LAYERS, LOCAL, WIDTH, HIDDEN, TOTAL, TOP_K, LAYER = 2, 3, 256, 128, 12, 4, 1
EXPERTS = random_experts(0, LAYERS, LOCAL, WIDTH, HIDDEN)
SMALL = FfnTiles(32, 128), RowTiles(128, 4)
WHOLE = FfnTiles(32, WIDTH), RowTiles(128, 4)  # packed scales come in whole blocks
FORMS = ("plain", "packed", "native")
# Largest relative RMSE: roundings of the hidden layer and of the result; in a prefill of each expert's output too.
DECODE, PREFILL = 3e-3, 3.5e-3


@functools.partial(jax.jit, static_argnames=("activation", "few", "interpret", "tiles"))
def on_tpu(x, ids, weights, experts, layer, first, activation=SILU, few=0, interpret=True, tiles=None):
    if tiles is None:
        tiles = SMALL if isinstance(experts, ExpertWeights) else WHOLE
    return driver.expert_ffn(
        x, ids, weights, experts, layer, first, activation=activation, few=few, tiles=tiles, interpret=interpret
    )


def tokens(count: int, seed: int):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(count, HIDDEN)), jnp.bfloat16), *routing(rng, count, TOP_K, TOTAL)


def holds(x, ids, weights, form, first, limit, **options):
    got = on_tpu(x, ids, weights, EXPERTS.forms[form], jnp.int32(LAYER), jnp.int32(first), **options)
    want = truth(x, ids, weights, EXPERTS, LAYER, first, options.get("activation", SILU))
    if not want.any():
        np.testing.assert_array_equal(got, 0)
    else:
        assert rel_rmse(got, want) < limit
    untouched = ~want.any(axis=1)
    np.testing.assert_array_equal(np.asarray(got, np.float32)[untouched], 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("few", "limit"), [(1000, DECODE), (0, PREFILL)])
def test_any_routing_gives_the_contract(form, few, limit):
    count = 150
    for seed, first in ((1, 0), (2, 4), (3, TOTAL - LOCAL), (4, 100)):
        holds(*tokens(count, seed), form, first, limit, few=few)
    x, ids, weights = tokens(count, 5)
    everyone = np.where(ids == 7, ids[:, :1], ids)
    everyone[:, 0] = 7
    holds(x, everyone, weights, form, 6, limit, few=few)  # all tokens to one expert
    holds(x, np.tile(np.arange(TOP_K, dtype=np.int32), (count, 1)), weights, form, 1, limit, few=few)  # and to all
    alone = np.tile(np.arange(8, 8 + TOP_K, dtype=np.int32), (count, 1))
    alone[77, 2] = 3
    holds(x, alone, weights, form, 2, limit, few=few)  # one token for one expert


def test_situ():
    holds(*tokens(150, 6), "plain", 2, DECODE, few=1000, activation=situ(4.0, 25.0))


@pytest.mark.parametrize(("count", "few"), [(1, 1000), (17, 1000), (257, 0)])
def test_any_number_of_tokens(count, few):
    holds(*tokens(count, 7), "plain", 3, PREFILL, few=few)


def test_sizes_that_the_kernel_chooses():
    """Blocks that are no power of two, and longer than what is left of the tokens."""
    x, ids, weights = tokens(300, 11)
    plain = EXPERTS.forms["plain"]
    got = jax.jit(
        lambda *a: driver.expert_ffn(*a, plain, LAYER, 2, activation=SILU, total=TOTAL, interpret=True)
    )(x, ids, weights)  # fmt: skip
    assert rel_rmse(got, truth(x, ids, weights, EXPERTS, LAYER, 2, SILU)) < PREFILL


@pytest.mark.parametrize(("form", "few"), [("plain", 1000), ("native", 1000), ("packed", 0)])
def test_kernels_neither_race_nor_read_what_is_not_there(form, few):
    count = 20 if few else 130
    x, ids, weights = tokens(count, 8)
    ids = np.where(ids == 3, 11, ids) if form == "packed" else ids  # an expert that nobody chose
    holds(x, ids, weights, form, 2, PREFILL, few=few, interpret=CHECKED)
    assert not races_found()


@pytest.mark.parametrize("few", [1000, 0])
def test_a_token_without_a_finite_value_spoils_no_other(few):
    x, ids, weights = tokens(150, 9)
    bad = x.at[3].set(jnp.nan).at[140, 5].set(jnp.inf)
    run = functools.partial(on_tpu, experts=EXPERTS.forms["plain"], layer=jnp.int32(0), first=jnp.int32(2), few=few)
    good = np.delete(np.arange(150), [3, 140])
    np.testing.assert_array_equal(
        np.asarray(run(bad, ids, weights), np.float32)[good], np.asarray(run(x, ids, weights), np.float32)[good]
    )


def test_a_token_gets_the_same_bits_wherever_it_stands():
    """Groups, tiles and chunks hold other tokens; none of them is in its sums."""
    x, ids, weights = tokens(150, 10)
    order = np.random.default_rng(0).permutation(150)
    run = functools.partial(on_tpu, experts=EXPERTS.forms["plain"], layer=jnp.int32(1), first=jnp.int32(2), few=0)
    np.testing.assert_array_equal(
        np.asarray(run(x[order], ids[order], weights[order]), np.float32),
        np.asarray(run(x, ids, weights), np.float32)[order],
    )


def test_every_row_of_a_plan_has_one_token():
    """Ranks count the tokens of an expert and block; groups cover them, and no two lie on one place."""
    block, tile = 128, 64
    for seed in range(5):
        chosen = np.random.default_rng(seed).random((LOCAL, 300)) < (0.0, 0.1, 0.5, 1.0, 0.3)[seed]
        plan = jax.jit(sort, static_argnums=(2, 3, 4))(chosen, chosen.astype(np.float32), block, tile, LOCAL)
        rank = np.asarray(plan.rank).reshape(LOCAL, 3, block)
        groups = np.asarray(plan.groups)
        experts, ranks, rows = (
            np.asarray(a).reshape(3, -1) for a in (plan.group_expert, plan.group_rank, plan.group_row)
        )
        seen = []
        for b in range(3):
            ours = list(zip(experts[b], ranks[b], strict=True))[: groups[b]]
            want = [(e, r) for e in range(LOCAL) for r in range(0, int(rank[e, b].max()) + 1, 16)]
            assert ours == want
            assert all(np.asarray(plan.tile_expert)[rows[b, i] * 16 // tile] == e for i, (e, _) in enumerate(ours))
            seen += rows[b, : groups[b]].tolist()
        assert len(set(seen)) == len(seen) and max(seen, default=0) * 16 < int(plan.tiles[0]) * tile <= plan.rows


def test_what_the_kernel_does_not_take_is_refused():
    x, ids, weights = tokens(4, 0)
    plain = EXPERTS.forms["plain"]
    ids, weights = jnp.asarray(ids), jnp.asarray(weights)
    run = functools.partial(expert_ffn, layer=0, first=0, activation=SILU, implementation="tpu")
    with pytest.raises(ValueError, match="x: got float32; the TPU kernel takes bfloat16"):
        run(x.astype(jnp.float32), ids, weights, plain)
    with pytest.raises(ValueError, match="experts: got weights in float32"):
        run(x, ids, weights, ExpertWeights(*(w.astype(jnp.float32) for w in plain)))
    with pytest.raises(ValueError, match=r"experts\.hidden: got 96"):
        run(x[:, :96], ids, weights, ExpertWeights(plain.gate[..., :96], plain.up[..., :96], plain.down[:, :, :96]))
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    wide = ExpertWeights(*(shape((1, 1, *s)) for s in ((128, 1 << 15), (128, 1 << 15), (1 << 15, 128))))
    with pytest.raises(ValueError, match=r"take \d+ MiB of vector memory, more than 60 MiB"):
        tiles.ffn_tiles(tiles.form_of(wide), 64, fixed=True)
    form = tiles.form_of(plain)
    with pytest.raises(ValueError, match=r"x: got \d+ tokens; their groups take \d+ KiB of scalar memory"):
        tiles.prefill_tiles(form, 1 << 20, 8, LOCAL, None)


def _shapes(hidden: int, width: int, local: int, kind: type | None):
    shape = jax.ShapeDtypeStruct
    outer = (4, local)
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    if kind is None:
        return ExpertWeights(*(shape((*outer, *s), jnp.bfloat16) for s in sizes))
    return PackedExperts(*(
        kind(
            shape((*outer, i // 8, o), jnp.int32), shape((*outer, scale_rows(i), o), jnp.int32),
            shape((*outer, 1, o), jnp.float32),
        )
        for o, i in sizes
    ))  # fmt: skip


# Kimi Linear and K3; the benchmark's cases compile the other sizes for v6e and tpu7x.
_LINEAR, _K3 = (2304, 1024, 16, 8, 256), (3584, 3072, 14, 16, 896)


def _compile(chip, model, kind, count):
    hidden, width, local, top_k, total = model
    experts = _shapes(hidden, width, local, kind)

    def run(x, ids, weights, experts, layer, first):
        return driver.expert_ffn(x, ids, weights, experts, layer, first, activation=SILU, total=total)

    i32 = jnp.int32
    return compile_for(
        chip, run, ((count, hidden), jnp.bfloat16), ((count, top_k), i32), ((count, top_k), jnp.float32), experts,
        ((), i32), ((), i32),
    )  # fmt: skip


@pytest.mark.aot
@pytest.mark.parametrize(
    ("chip", "model", "kind", "count"),
    [
        ("v5e", _LINEAR, None, 64),
        ("v5p", _K3, PackedMatrix, 64),
        ("v5e", _K3, PackedMatrix, 8192),
        ("v5p", _LINEAR, None, 8192),
        ("v6e", _K3, None, 128),
        ("v6e", _LINEAR, None, 300),
        ("tpu7x", _K3, NativeMatrix, 256),
    ],
)
def test_real_sizes_compile_without_a_copy_of_the_weights(chip, model, kind, count):
    done = _compile(chip, model, kind, count)
    hidden, _, local, top_k, _ = model
    # The rows of a prefill at most, their weights, and nothing else of note.
    rows = 0 if count <= tiles.FEW else count * min(top_k, local) + (16 + 512) * local * 9
    assert done.temporary_bytes < rows * (2 * hidden + 512) + (4 << 20)


@pytest.mark.aot
def test_native_weights_are_for_tpu7x_alone():
    with pytest.raises(ValueError, match="experts: got the native packed form, which only tpu7x converts"):
        _compile("v6e", _K3, NativeMatrix, 64)
