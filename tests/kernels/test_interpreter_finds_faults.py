"""The checks that the kernels of this folder pass do find what they are for, in a kernel with one fault."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.races import races_found
from tests.kernels.tpu import CHECKED


def copied_row(x: jax.Array, row: jax.Array | int = 0, *, wait_first: bool = True, copy: bool = True) -> jax.Array:
    """Row `row` of x [8, 128], which came by a copy, as [1, 128]; read before its arrival or with no copy at all."""

    def body(row: Any, x: Any, out: Any, buffer: Any, semaphore: Any) -> None:
        coming = pltpu.make_async_copy(x, buffer, semaphore)
        if copy:
            coming.start()
        if copy and wait_first:
            coming.wait()
        out[...] = buffer[pl.ds(row[0], 1)]
        if copy and not wait_first:
            coming.wait()

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(1,),
        in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
        out_specs=pl.BlockSpec((1, 128), lambda *_: (0, 0)),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA(())],
    )
    shape = jax.ShapeDtypeStruct((1, 128), x.dtype)
    call = pl.pallas_call(body, grid_spec=grid_spec, out_shape=shape, interpret=CHECKED)
    return call(jnp.asarray(row, jnp.int32).reshape(1), x)


X = jnp.arange(8.0 * 128).reshape(8, 128)


def test_a_right_kernel_passes():
    np.testing.assert_array_equal(jax.jit(copied_row)(X, 3), X[3:4])
    assert not races_found()


def test_a_read_before_the_wait_is_a_race():
    jax.block_until_ready(copied_row(X, wait_first=False))
    assert races_found()


def test_memory_that_nobody_wrote_is_nan():
    assert np.isnan(copied_row(X, copy=False)).all()


def test_a_read_past_the_end_is_refused():
    try:
        with pytest.raises(Exception, match="IndexError: Out-of-bounds read"):
            jax.block_until_ready(copied_row(X, 8))
    finally:
        pltpu.reset_tpu_interpret_mode_state()
