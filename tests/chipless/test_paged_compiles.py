"""Block copies compile for TPUs in place."""

import functools

import jax
import jax.numpy as jnp
import pytest

from hybrid_kv.chipless.compile import compile_for
from hybrid_kv.chipless.targets import CHIPS, compiler_installed
from pallas_kernels.paged import copy_blocks

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
