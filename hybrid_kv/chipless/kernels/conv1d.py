"""Short convolution of q, k and v together: 32 heads of 3 x 128 channels, everything in bf16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from hybrid_kv.chipless.cases import Case, Problem
from pallas_kernels.conv1d import tpu
from pallas_kernels.rows import RaggedRows

CHANNELS, SLOTS, LAYERS = 12288, 2048, 20


def _convolution(x, weight, pool, layer, rows, read, write, emit_position, emit_slot):
    x = pltpu.with_memory_space_constraint(x, pltpu.HBM)
    # The pool is held in columns of 128 channels (docs/12-conv-kernel.md); the contract sees them joined.
    flat = pool.reshape(*pool.shape[:3], CHANNELS)
    y, flat = tpu.causal_conv1d(x, weight, flat, layer, rows, read, write, emit_position, emit_slot)
    return y, flat.reshape(pool.shape)


def _problem(lengths: list[int], emissions: int, per: str, saved: int) -> Problem:
    """Rows of these lengths, packed without gaps from a token that begins no tile, each resumed and saved."""
    count = len(lengths)
    total = sum(lengths)
    ends = np.cumsum(lengths)
    rows = RaggedRows(*(jnp.asarray(a, jnp.int32) for a in (ends - lengths, lengths, np.full(count, 100))))
    slots = np.random.default_rng(0).permutation(np.arange(1, SLOTS))[: count * (1 + emissions)].astype(np.int32)
    own, emitted = slots[:count], slots[count:].reshape(count, emissions)
    positions = 100 + np.minimum(np.asarray(lengths)[:, None], 64 * (1 + np.arange(emissions)) + 28).astype(np.int32)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    arguments = (
        shape((-(-total // 16) * 16, CHANNELS)), jax.ShapeDtypeStruct((4, CHANNELS), jnp.float32),
        shape((LAYERS, SLOTS, 3, CHANNELS // 128, 128)), np.int32(3), rows, own, own, positions, emitted,
    )  # fmt: skip
    history = 3 * CHANNELS * 2
    return Problem(
        _convolution, arguments, hbm_bytes=2 * total * CHANNELS * 2 + (count + saved) * history, donate=(2,),
        per=(total, per),
    )  # fmt: skip


def _decode() -> Problem:
    return _problem([1] * 128, 0, "row", saved=128)


def _prefill() -> Problem:
    return _problem([512] * 4, 0, "token", saved=4)


def _ragged() -> Problem:
    """Two emissions a row, offsets that fit no tile."""
    return _problem([509, 514, 511, 514], 2, "token", saved=12)


def _mixed() -> Problem:
    """A prefill beside decodes."""
    return _problem([1] * 120 + [1925], 0, "token", saved=121)


CASES = (
    Case("decode-128", _decode, cycles={"v6e": 30_500, "tpu7x": 17_650}, bundles={"v6e": 4_000, "tpu7x": 4_000}),
    Case("prefill-4x512", _prefill, cycles={"v6e": 122_000, "tpu7x": 100_500}, bundles={"v6e": 4_150, "tpu7x": 4_150}),
    Case("prefill-ragged", _ragged, cycles={"tpu7x": 101_100}, bundles={"tpu7x": 4_500}),
    Case("mixed", _mixed, cycles={"v6e": 148_000}, bundles={"v6e": 4_150}),
)
