"""KDA prefill on a TPU: one kernel for ragged rows, any gate, saves at any offset.

The grid is (groups of heads, chunks + 1); see `kernel` for a step and `chunk` for the mathematics.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.kda.tpu import chunk as chunk_math
from pallas_kernels.kda.tpu.arithmetic import Arithmetic
from pallas_kernels.kda.tpu.chunk import CHUNK, WIDTH
from pallas_kernels.kda.tpu.kernel import INPUTS, STAGED, kernel
from pallas_kernels.kda.tpu.plan import betas, chunk_plan
from pallas_kernels.kda.tpu.shift import ALIGN
from pallas_kernels.kda.tpu.tiles import BUFFERS, WINDOW, heads_per_program
from pallas_kernels.rows import RaggedRows, tokens
from pallas_kernels.vmem import SMALLEST_VMEM

# Above the budget of `tiles`, for what the compiler adds, and within the smallest VMEM.
_VMEM_LIMIT = SMALLEST_VMEM - (4 << 20)


def _call(plan, tensors, beta, gate, states, *, heads, arithmetic, scale, out_dtype, interpret, name):
    """The kernel on [rows, H K] tensors and a pool of K = V = 128."""
    rows, total = tensors[0].shape[0], states.shape[2]
    chunks = plan.first.shape[0]
    pairs = (heads + 1) // 2
    operand = arithmetic.dtype
    sums = jnp.asarray(chunk_math.sum_matrix(arithmetic), operand)
    level = jnp.asarray(chunk_math.level_map())
    selector = jnp.asarray(chunk_math.beta_selector(heads), jnp.bfloat16)
    width = heads * WIDTH

    def constant(x):
        return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    vmem = pltpu.VMEM
    state = (heads, WIDTH, WIDTH)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(plan),
        grid=(total // heads, chunks),
        in_specs=[
            *[hbm] * INPUTS,
            hbm,
            hbm,
            pl.BlockSpec((2, width), lambda g, *_: (0, g)),
            constant(sums),
            constant(level),
            constant(selector),
            hbm,
        ],
        out_specs=[hbm, hbm],
        scratch_shapes=[
            vmem((BUFFERS, INPUTS, WINDOW, width), tensors[0].dtype),
            vmem((BUFFERS, CHUNK, 3 * heads), jnp.bfloat16),
            vmem((BUFFERS, pairs, 2 * CHUNK), jnp.float32),
            vmem((2, WINDOW, width), out_dtype),
            vmem((ALIGN, width), out_dtype),
            vmem(state, jnp.float32),
            vmem(state, jnp.float32),
            vmem(state, states.dtype),
            vmem((STAGED, *state), states.dtype),
            vmem((CHUNK, width), operand),
            vmem((2 * pairs, 2 * CHUNK, WIDTH), operand),
            vmem((pairs, 2 * CHUNK, WIDTH), operand),
            vmem((pairs, CHUNK, 2 * CHUNK), operand),
            vmem((pairs, CHUNK, 2 * CHUNK), operand),
            vmem((pairs, 16, 2 * CHUNK), jnp.float32),
            vmem((pairs, 8, WIDTH), jnp.float32),
            pltpu.SemaphoreType.DMA((3, BUFFERS)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA(()),
            pltpu.SemaphoreType.DMA((STAGED,)),
        ],
    )
    operands = (*plan, *tensors, *beta, gate, sums, level, selector, states)
    return pl.pallas_call(
        functools.partial(kernel, heads=heads, arithmetic=arithmetic, scale=scale, rows=rows),
        out_shape=[
            jax.ShapeDtypeStruct((rows, total * WIDTH), out_dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        grid_spec=grid_spec,
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT, disable_bounds_checks=True
        ),
        interpret=interpret,
        name=name,
    )(*operands)


def prefill(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    raw_gate: Float[Array, "T H K"],
    raw_beta: Float[Array, "T H"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    rows: RaggedRows,
    read: Int32[Array, "R"],
    write: Int32[Array, "R"],
    emit_position: Int32[Array, "R E"],
    emit_slot: Int32[Array, "R E"],
    *,
    lower_bound: float | None,
    chunk: int,
    interpret: Any = False,
    name: str = "kda_prefill",
) -> tuple[Float[Array, "T H V"], Float[Array, "layers S H K V"]]:
    """See `kda.api.kda_prefill`. bf16 q, k, v, raw gate take bf16 products; any in fp32 makes all of it fp32.

    Args:
      chunk: 64.
      interpret: passed on to `pallas_call`, for tests without a TPU.
      name: of the kernel, for profiles.

    Raises:
      ValueError: K or V other than 128, another chunk, a pool that is neither fp32 nor bf16, or heads that do not
        fit into VMEM.
    """
    count, heads, key = q.shape
    value = v.shape[-1]
    if chunk != CHUNK:
        raise ValueError(f"kda_prefill on TPU: chunk must be {CHUNK}, got {chunk}")
    if (key, value) != (WIDTH, WIDTH):
        raise ValueError(f"kda_prefill on TPU: K and V must be {WIDTH}, got {key} and {value}")
    if states.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"kda_prefill on TPU: states in float32 or bfloat16, got {states.dtype}")
    inputs = (q, k, v, raw_gate)
    exact = any(x.dtype != jnp.bfloat16 for x in inputs)
    arithmetic = Arithmetic(exact, lower_bound)
    dtype = jnp.dtype(jnp.float32 if exact else jnp.bfloat16)
    group = heads_per_program(heads, dtype, dtype, states.dtype, exact)

    rows_padded = max(WINDOW, -(-count // ALIGN) * ALIGN)

    def packed(x):
        return jnp.pad(x.astype(dtype).reshape(count, heads * WIDTH), ((0, rows_padded - count), (0, 0)))

    plan = chunk_plan(rows, count, CHUNK, ALIGN, layer, read, write, emit_position, emit_slot)
    gate = arithmetic.gate_constants(a_log, dt_bias).reshape(2, heads * WIDTH)
    out, states = _call(
        plan, [packed(x) for x in inputs], betas(raw_beta, plan, CHUNK, group), gate, states,
        heads=group, arithmetic=arithmetic, scale=key**-0.5, out_dtype=dtype, interpret=interpret, name=name,
    )  # fmt: skip
    # Blocks between rows were never written.
    valid = tokens(rows, count).valid[:, None, None]
    return jnp.where(valid, out[:count].reshape(v.shape), 0).astype(v.dtype), states
