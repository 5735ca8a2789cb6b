"""Block operations compile for TPUs in place."""

import functools

import jax
import jax.numpy as jnp
import pytest

from hybrid_kv.chipless.compile import compile_for
from hybrid_kv.chipless.targets import CHIPS, compiler_installed
from pallas_kernels.paged import copy_blocks, gather_blocks, scatter_blocks, zero_blocks

shape = jax.ShapeDtypeStruct


@pytest.mark.aot
@pytest.mark.skipif(not compiler_installed(), reason="needs the extra [aot]")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "pool",
    [shape((2, 256, 8, 128, 128), jnp.float32), shape((7, 4096, 64, 640), jnp.bfloat16)],
    ids=["states", "latent rows"],
)
def test_copies_compile_in_place(chip, pool):
    pairs = shape((64,), jnp.int32)
    compilation = compile_for(
        chip, functools.partial(copy_blocks, implementation="tpu"), pool, pairs, pairs, donate=(0,)
    )
    whole = pool.size * pool.dtype.itemsize
    assert compilation.alias_bytes >= whole and compilation.temporary_bytes < whole / 2


@pytest.mark.aot
@pytest.mark.skipif(not compiler_installed(), reason="needs the extra [aot]")
@pytest.mark.parametrize("chip", CHIPS)
def test_the_others_compile_in_place_for_pages_in_planes(chip):
    pool, ids = shape((7, 4096, 288, 128), jnp.bfloat16), shape((64,), jnp.int32)
    content = shape((7, 64, 288, 128), jnp.bfloat16)
    size = pool.size * 2

    def on_tpu(op):
        return functools.partial(op, implementation="tpu")

    for op, more in ((zero_blocks, ()), (scatter_blocks, (content,))):
        done = compile_for(chip, on_tpu(op), pool, ids, *more, donate=(0,))
        assert done.alias_bytes >= size and done.temporary_bytes < size / 64
    gathered = compile_for(chip, on_tpu(gather_blocks), pool, ids)
    assert gathered.output_bytes == content.size * 2 and gathered.temporary_bytes < size / 16
