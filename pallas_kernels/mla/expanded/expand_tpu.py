"""Expansion of context rows on a TPU, a kernel of its own.

XLA estimates four times as many cycles for these two products as they have multiplications, and prefers to write V with
rows and heads exchanged, which is a copy of the whole workspace on the way to the attention.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.mla.expanded.forms import Filled

# Context rows of a step, and heads whose products stand together.
_ROWS, _TOGETHER = 512, 4
_VMEM_BYTES = 60 << 20


def _kernel(factors: Any, rows: Any, w_uk: Any, w_uv: Any, nope: Any, value: Any, *, heads: int) -> None:
    latent, width = w_uk.shape[1], w_uk.shape[0] // heads
    size = math.gcd(heads, _TOGETHER) * width

    def product(a, b):
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    def some_heads(i, carry):
        at = pl.ds(pl.multiple_of(i * size, size), size)
        found = rows[:, :latent]
        nope[:, at] = (product(found, w_uk[at]) * factors[:1, :size]).astype(nope.dtype)
        value[at] = (product(w_uv[at], found) * factors[1:]).astype(value.dtype)
        return carry

    lax.fori_loop(0, w_uk.shape[0] // size, some_heads, None)


def expand(
    filled: Filled,
    w_uk: Float[Array, "N D L"],
    w_uv: Float[Array, "N V L"],
    factors: Float[Array, "2"],
    heads: int,
    *,
    interpret: Any = False,
    name: str = "mla_expand",
) -> tuple[Float[Array, "W ND"], Float[Array, "NV W"]]:
    """Keys without position key, and transposed values, of the filled rows; the rest means nothing.

    Args:
      factors: of the keys and of the values.
      heads: of a program.
    """
    total, latent = filled.rows.shape[0], w_uk.shape[-1]
    steps = -(-filled.used // _ROWS)
    keys, values = (w.astype(filled.rows.dtype).reshape(-1, latent) for w in (w_uk, w_uv))
    wide = heads * w_uk.shape[1]
    weights = pl.BlockSpec((wide, latent), lambda h, i: (h, 0))
    shape = jax.ShapeDtypeStruct
    return pl.pallas_call(
        lambda *refs: _kernel(*refs, heads=heads),
        grid=(len(keys) // wide, steps),
        in_specs=[
            pl.BlockSpec((2, _ROWS), lambda h, i: (0, 0)),
            pl.BlockSpec((_ROWS, filled.rows.shape[1]), lambda h, i: (i, 0)),
            weights,
            weights,
        ],
        out_specs=[pl.BlockSpec((_ROWS, wide), lambda h, i: (i, h)), pl.BlockSpec((wide, _ROWS), lambda h, i: (h, i))],
        out_shape=[shape((total, len(keys)), keys.dtype), shape((len(values), total), values.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True
        ),
        interpret=interpret,
        name=name,
    )(jnp.broadcast_to(factors[:, None], (2, _ROWS)), filled.rows, keys, values)
