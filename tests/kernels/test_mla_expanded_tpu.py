"""The TPU kernel of expanded attention, interpreted on the CPU, agrees with float64 and its reference; it compiles.

Tiles have 256 queries and blocks 256 keys, so few programs of few sizes serve all tests.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv.chipless.targets import CHIPS, compiler_installed
from pallas_kernels.mla.expanded import mla_expanded, online
from pallas_kernels.mla.expanded import tpu as kernel
from pallas_kernels.mla.expanded.driver import expanded
from pallas_kernels.mla.pages import pool_shape
from pallas_kernels.mla.visible import visible
from pallas_kernels.rows import RaggedRows
from tests.kernels import golden, tpu
from tests.kernels.mla_expanded_cases import SCALE, expanded_case
from tests.kernels.races import races_found

QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
# Relative RMSE against float64 on the same bf16 inputs: keys, values and weights are rounded to bf16 once more.
BF16 = 5e-3


def interpreted(interpret=True, **changes):
    """The TPU implementation for the driver, interpreted."""
    kernels = {name: functools.partial(getattr(kernel, name), interpret=interpret) for name in ("attend", "expand")}
    return types.SimpleNamespace(**(vars(kernel) | kernels | changes))


def run_with(form, workspace, shards=1, interleave=1, cache_scale=None, **sees):
    """Compiled, with the rank as last argument."""
    rules = visible(True, sees.get("window"), sees.get("soft_cap"))

    def run(*arguments):
        return expanded(
            form, *arguments[:-1], rank=arguments[-1], scale=SCALE, shards=shards, interleave=interleave,
            workspace=workspace, axis=None, sees=rules, cache_scale=cache_scale,
        )  # fmt: skip

    return jax.jit(run, compiler_options=QUICK_TO_COMPILE)


def case_of(lengths, contexts, tokens, n=64, dtype=jnp.bfloat16, **options):
    return expanded_case(
        lengths, contexts, nope=128, value=128, latent=128, position=64, planes=True, n=n, tokens=tokens, dtype=dtype,
        q_dtype=jnp.bfloat16, **options,
    )  # fmt: skip


def close_to_float64(got, want):
    out, lse = (np.asarray(x, np.float32) for x in got)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want[1]))
    assert (out[np.isneginf(lse)] == 0).all()
    assert golden.rel_rmse(out, want[0]) <= BF16
    seen = np.isfinite(want[1])
    np.testing.assert_allclose(lse[seen], want[1][seen], atol=0.03)


# Workspace (and so the pieces), ranks, interleave, heads, type of the pool, and what a query sees.
KINDS = [
    (8192, 1, 1, 2, jnp.bfloat16, {}),
    (512, 1, 1, 1, jnp.bfloat16, {}),
    (1024, 1, 1, 2, jnp.bfloat16, {"window": 270, "soft_cap": 3.0}),
    (512, 2, 16, 3, jnp.float8_e4m3fn, {"cache_scale": 0.5}),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind[:4])))
def test_any_ragged_batch_is_the_float64_attention(kind):
    workspace, shards, interleave, heads, dtype, sees = kind
    run = run_with(interpreted(), workspace, shards, interleave, **sees)

    @settings(max_examples=4, deadline=None)
    @given(
        lengths=st.permutations([0, 1, 300, 520]),
        contexts=st.lists(st.sampled_from([0, 1, 255, 256, 500]), min_size=4, max_size=4),
        seed=st.integers(0, 99),
    )
    def check(lengths, contexts, seed):
        case = case_of(
            lengths, contexts, 1100, heads=heads, shards=shards, interleave=interleave, dtype=dtype, seed=seed,
            columns=-(-1020 // (64 * shards)),
        )  # fmt: skip
        for rank in range(shards):
            want = case.attention(rank=rank, **sees)
            close_to_float64(run(*case.arguments, *case.step(rank), rank), want)

    check()
    assert run._cache_size() == 1


def test_scores_that_outgrow_the_reference_are_computed_with_the_running_maximum():
    """Later keys win by more than fp32 can express relative to the first ones: not finite without a second attempt."""
    case = case_of([300], [600], 512, gain=120.0)
    arguments = (*case.arguments, *case.step(), 0)
    once = interpreted(overflowed=lambda state, valid: jnp.asarray(False))
    assert not np.isfinite(np.asarray(run_with(once, 512)(*arguments)[1][:300])).all()
    (out, lse), want = run_with(interpreted(), 512)(*arguments), run_with(online, 512)(*arguments)
    assert np.isfinite(np.asarray(lse[:300])).all()
    assert golden.rel_rmse(np.asarray(out, np.float32), np.asarray(want[0], np.float32)) <= BF16
    np.testing.assert_allclose(lse, want[1], rtol=1e-5)


@pytest.mark.parametrize("tiles", [1, 2])
def test_without_races_unwritten_reads_and_copies_left_over(tiles, monkeypatch):
    """Two programs, groups of one tile or of two, a context in two pieces and rows that share a tile."""
    monkeypatch.setattr(kernel, "heads_per_program", lambda heads: 2)
    monkeypatch.setattr(kernel, "MOST_TILES", tiles)
    case = case_of([100, 400], [200, 300], 512, heads=4)
    form = interpreted(tpu.CHECKED)
    close_to_float64(run_with(form, 768)(*case.arguments, *case.step(), 0), case.attention())
    assert not races_found()


@pytest.mark.parametrize(("heads", "each"), [(2, 2), (12, 12), (16, 16), (32, 16), (64, 16), (96, 16), (34, 2)])
def test_programs_take_as_many_heads_as_divide(heads, each):
    assert kernel.heads_per_program(heads) == each


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": 64}, "w_uv: got values 64 wide"),
        ({"nope": 64}, "q_nope, q_rope: got bfloat16, bfloat16, 64 and 64 wide"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(change, message):
    sizes = {"heads": 2, "nope": 128, "value": 128} | change
    case = expanded_case([3], [4], latent=128, position=64, q_dtype=jnp.bfloat16, **sizes)
    with pytest.raises(ValueError, match=message):
        mla_expanded(
            *case.arguments, *case.step(), scale=1.0, shards=1, rank=0, interleave=1, workspace=256,
            implementation="tpu",
        )  # fmt: skip


def whole(chip_dtype, heads, tokens=2048, rows=8, columns=64):
    """Shapes of a prefill over a pool of real size."""
    shape = jax.ShapeDtypeStruct
    bf16, i32 = (functools.partial(shape, dtype=t) for t in (jnp.bfloat16, jnp.int32))
    pool = shape(pool_shape(7, 4096, 128, 512, 64, planes=True), chip_dtype)
    return (
        bf16((tokens, heads, 128)), bf16((tokens, heads, 64)), bf16((heads, 128, 512)), bf16((heads, 128, 512)),
        pool, i32(()), RaggedRows(*[i32((rows,))] * 3), i32((rows, columns)),
    )  # fmt: skip


@pytest.mark.aot
@pytest.mark.skipif(not compiler_installed(), reason="needs the extra [aot]")
@pytest.mark.parametrize(
    ("chip", "heads", "dtype"),
    [
        ("v5e", 32, jnp.bfloat16),
        ("v5p", 96, jnp.bfloat16),
        ("v6e", 3, jnp.bfloat16),
        ("v6e", 12, jnp.float8_e4m3b11fnuz),
        ("tpu7x", 64, jnp.float8_e4m3fn),
    ],
)
def test_the_whole_path_compiles_within_the_memory_of_its_workspace(chip, heads, dtype):
    assert chip in CHIPS
    run = functools.partial(
        mla_expanded, scale=0.07, shards=1, rank=0, interleave=1, workspace=8192, implementation="tpu"
    )
    compiled = tpu.compile_for(chip, run, *whole(dtype, heads))
    assert compiled.seconds <= 60
    heads += heads % 2
    context, state = 8192 * (heads * 256 + 64) * 2, 2048 * heads * (144 * 4 + 128 * 2)
    # Besides: the queries padded and side by side, chunks of 4,096 rows, positions.
    assert compiled.temporary_bytes <= 1.2 * (context + state) + 4 * 2048 * heads * 192 * 2
