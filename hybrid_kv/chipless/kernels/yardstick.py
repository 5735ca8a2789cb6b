"""Two kernels whose cost is known beforehand: they measure the measurement."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hybrid_kv.chipless.cases import Case, Problem


def _copy_body(source: jax.Ref, target: jax.Ref) -> None:
    target[...] = source[...]


def _copy(x: jax.Array) -> jax.Array:
    block = pl.BlockSpec((512, 1024), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        _copy_body, grid=(x.shape[0] // 512,), in_specs=[block], out_specs=block, out_shape=shape, name="yardstick_copy"
    )(pltpu.with_memory_space_constraint(x, pltpu.HBM))


def _copy_problem() -> Problem:
    x = jax.ShapeDtypeStruct((32768, 1024), jnp.float32)
    return Problem(_copy, (x,), hbm_bytes=2 * x.size * 4)


def _dot_body(left: jax.Ref, right: jax.Ref, out: jax.Ref) -> None:
    out[...] = jnp.dot(left[...], right[...], preferred_element_type=jnp.float32).astype(out.dtype)


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    rows, inner, columns = 256, left.shape[1], right.shape[1]
    return pl.pallas_call(
        _dot_body,
        grid=(left.shape[0] // rows,),
        in_specs=[pl.BlockSpec((rows, inner), lambda i: (i, 0)), pl.BlockSpec((inner, columns), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((rows, columns), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((left.shape[0], columns), left.dtype),
        name="yardstick_dot",
    )(left, right)


def _dot_problem() -> Problem:
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    left, right = shape((16384, 2048)), shape((2048, 1024))
    out = left.shape[0] * right.shape[1]
    return Problem(_dot, (left, right), hbm_bytes=2 * (left.size + right.size + out), macs=out * left.shape[1])


CASES = (
    Case("copy", _copy_problem, cycles={"v6e": 300_000, "tpu7x": 168_000}, bundles={"v6e": 375, "tpu7x": 380}),
    Case("dot", _dot_problem, cycles={"v6e": 178_000, "tpu7x": 168_000}, bundles={"v6e": 2_700, "tpu7x": 2_600}),
)
