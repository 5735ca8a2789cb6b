"""Kernels for an H100: they compile at real sizes, in place, and spill little."""

import functools

import jax
import jax.numpy as jnp
import pytest

from hybrid_kv.chipless.hopper import Assembled, compile_for_hopper, hopper_compiler_installed, read_assembler
from pallas_kernels.conv1d import causal_conv1d
from pallas_kernels.kda import (
    Commit,
    Records,
    kda_commit,
    kda_commit_verify,
    kda_decode,
    kda_prefill,
    kda_verify,
)
from pallas_kernels.mla import mla_attention
from pallas_kernels.rows import RaggedRows

WIDTH, LAYERS, SLOTS = 128, 4, 512
REPORT = """ptxas info    : Compiling entry function 'kda_sweep_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for kda_sweep_mosaic_gpu_kernel
    40 bytes stack frame, 36 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 40 bytes cumulative stack size, 1 bytes smem"""


def test_the_report_of_the_assembler_is_read():
    assert read_assembler(REPORT) == Assembled("kda_sweep", 255, 64)
    slow = "ptxas info : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...\n"
    assert read_assembler(slow + REPORT) == Assembled("kda_sweep", 255, 64, serialized=True)
    with pytest.raises(ValueError, match="ptxas fatal"):
        read_assembler("ptxas fatal: no such file")


shape = jax.ShapeDtypeStruct
whole = functools.partial(shape, dtype=jnp.int32)


def _given(tokens: int, heads: int, rows: int, dtype=jnp.float32):
    """Inputs of so many tokens, the gate's parameters and a pool, the numbers of rows."""
    wide = [shape((tokens, heads, WIDTH), jnp.bfloat16)] * 4
    gate = [shape((heads,), jnp.float32), shape((heads, WIDTH), jnp.float32)]
    pool = shape((LAYERS, SLOTS, heads, WIDTH, WIDTH), dtype)
    return (*wide, shape((tokens, heads), jnp.bfloat16), *gate, pool), whole((rows,))


def _assembled(op, given, pool_at: int, **options):
    call = functools.partial(op, lower_bound=-5.0, implementation="gpu", **options)
    pool = given[pool_at]
    donate = () if op is kda_verify else (pool_at,)
    compilation, kernels = compile_for_hopper(call, *given, donate=donate)
    (kernel,) = kernels
    bytes_of_pool = pool.dtype.itemsize * pool.size
    assert compilation.temporary_bytes < bytes_of_pool / 2  # no copy of it
    assert kernel.registers <= 255 and kernel.spilled <= 512
    assert "kda_sweep" in compilation.executable.as_text()
    return compilation


needs_compiler = pytest.mark.skipif(not hopper_compiler_installed(), reason="needs the extra [aot]")


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(
    ("rows", "heads", "dtype"), [(1, 32, jnp.float32), (256, 12, jnp.float32), (64, 32, jnp.bfloat16)]
)
def test_decode_compiles_in_place(rows, heads, dtype):
    given, row = _given(rows, heads, rows, dtype)
    _assembled(kda_decode, (*given, whole(()), shape((rows,), bool), row, row, row), 7)


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(("tokens", "heads", "emissions"), [(512, 1, 0), (2048, 32, 4), (8192, 12, 1)])
def test_prefill_compiles_in_place(tokens, heads, emissions):
    given, row = _given(tokens, heads, 8)
    saves = whole((8, emissions))
    _assembled(kda_prefill, (*given, whole(()), RaggedRows(row, row, row), row, row, saves, saves), 7)


@pytest.mark.aot
@needs_compiler
def test_verify_and_commit_compile_and_verify_copies_no_pool():
    rows, heads, most = 64, 8, 8
    given, row = _given(rows * most, heads, rows)
    ragged = RaggedRows(row, row, row)
    _assembled(kda_verify, (*given, whole(()), ragged, row), 7, most=most)
    kept = (rows, most, heads, WIDTH)
    records = Records(shape(kept, jnp.float32), shape(kept, jnp.bfloat16), shape(kept, jnp.bfloat16))
    which = Commit(row, row, row, row, row)
    _assembled(kda_commit, (records, *given[5:], whole(()), which), 3)
    _assembled(kda_commit_verify, (*given, whole(()), ragged, records, which), 7)


@pytest.mark.aot
@needs_compiler
def test_the_convolution_compiles_in_place():
    tokens, channels, row = 2048, 12_288, whole((8,))
    x, pool = shape((tokens, channels), jnp.bfloat16), shape((LAYERS, SLOTS, 3, channels), jnp.bfloat16)
    given = (x, shape((4, channels), jnp.float32), pool, whole(()), RaggedRows(row, row, row), row, row)
    call = functools.partial(causal_conv1d, implementation="gpu")
    compilation, (kernel,) = compile_for_hopper(call, *given, whole((8, 2)), whole((8, 2)), donate=(2,))
    assert compilation.temporary_bytes < 2 * pool.size / 2 and kernel.spilled == 0 and kernel.registers <= 128
    assert "causal_conv1d" in compilation.executable.as_text()


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(
    ("tokens", "rows", "heads", "per_page", "rules"),
    [
        (128, 128, 32, 64, {}),
        (128, 128, 96, 64, {}),
        (128, 128, 12, 256, {"window": 1024, "soft_cap": 30.0}),
        (2048, 4, 32, 128, {}),
    ],
)
def test_latent_attention_compiles_without_spills(tokens, rows, heads, per_page, rules):
    row, columns = whole((rows,)), 8192 // per_page
    queries = [shape((tokens, heads, width), jnp.bfloat16) for width in (512, 64)]
    pool = shape((LAYERS, rows * columns + 1, per_page * 9 // 2, 128), jnp.bfloat16)
    call = functools.partial(
        mla_attention, scale=192**-0.5, shards=8, interleave=1, query_tile=64, implementation="gpu", **rules
    )
    given = (*queries, pool, whole(()), RaggedRows(row, row, row), whole((rows, columns)))
    compilation, (kernel,) = compile_for_hopper(lambda *each: call(*each[:-1], rank=each[-1]), *given, whole(()))
    assert compilation.temporary_bytes < 2 * pool.size  # no copy of the pool
    assert kernel.registers <= 168 and kernel.spilled == 0 and not kernel.serialized  # 3 x 128 threads
    assert "mla_attention" in compilation.executable.as_text()
