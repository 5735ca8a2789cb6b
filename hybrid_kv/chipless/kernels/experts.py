"""Routed experts: Kimi Linear (bf16) and K3 (MXFP4 and bf16) on one rank of an expert-parallel group."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from hybrid_kv.chipless.cases import Problem, limited
from pallas_kernels.experts.activation import SILU, Activation, situ
from pallas_kernels.experts.packed import scale_rows
from pallas_kernels.experts.tpu.driver import expert_ffn
from pallas_kernels.experts.weights import ExpertWeights, NativeMatrix, PackedExperts, PackedMatrix


class Model(NamedTuple):
    """Sizes of a mixture."""

    hidden: int
    width: int
    experts: int
    per_token: int
    activation: Activation


LINEAR = Model(2304, 1024, 256, 8, SILU)
K3 = Model(3584, 3072, 896, 16, situ(4.0, 25.0))
LAYERS = 4


def _ids(model: Model, tokens: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.argsort(rng.random((tokens, model.experts)), axis=1)[:, : model.per_token].astype(np.int32)


def _packed(shape: tuple[int, ...], native: bool) -> PackedMatrix | NativeMatrix:
    *outer, outputs, inputs = shape
    word: Any = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    factors: Any = jax.ShapeDtypeStruct((*outer, 1, outputs), jnp.float32)
    # Shapes alone stand for what the scalars of the kernel do not depend on.
    kind = NativeMatrix if native else PackedMatrix
    return kind(word((*outer, inputs // 8, outputs)), word((*outer, scale_rows(inputs), outputs)), factors)


def _problem(model: Model, local: int, tokens: int, packed: bool = False, native: bool = False) -> Problem:
    shape: Any = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    d, f = model.hidden, model.width
    shapes = [(LAYERS, local, f, d), (LAYERS, local, f, d), (LAYERS, local, d, f)]
    experts: ExpertWeights | PackedExperts
    if packed:
        experts = PackedExperts(*(_packed(s, native) for s in shapes))
    else:
        experts = ExpertWeights(*map(shape, shapes))
    weight_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(experts)) / (LAYERS * local)
    ids = _ids(model, tokens)

    def run(x, ids, weights, experts, layer, first):
        x = pltpu.with_memory_space_constraint(x, pltpu.HBM)
        return expert_ffn(x, ids, weights, experts, layer, first, activation=model.activation, total=model.experts)

    chosen = (ids >= local) & (ids < 2 * local)
    active = len(np.unique(ids[chosen]))
    arguments = (
        shape((tokens, d)), ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32), experts, np.int32(2), np.int32(local),
    )  # fmt: skip
    moved = active * weight_bytes + 2 * 2 * tokens * d
    return Problem(run, arguments, hbm_bytes=moved, macs=int(chosen.sum()) * 3 * d * f, per=(active, "expert"))


_part = functools.partial
CASES = (
    limited("decode-64", _part(_problem, LINEAR, 16, 64), {"v6e": (243_000, 3_450), "tpu7x": (140_500, 3_600)}),
    limited("decode-64-32-experts", _part(_problem, LINEAR, 32, 64)),
    limited("decode-64-k3", _part(_problem, K3, 7, 64)),
    limited("decode-64-k3-packed", _part(_problem, K3, 7, 64, packed=True), {"v6e": (117_500, 2_450)}),
    limited("decode-64-k3-native", _part(_problem, K3, 7, 64, packed=True, native=True), {"tpu7x": (94_500, 2_150)}),
    limited("verify-256", _part(_problem, LINEAR, 16, 256), {"tpu7x": (169_000, 8_300)}),
    limited("verify-256-k3-packed", _part(_problem, K3, 7, 256, packed=True)),
    limited("verify-256-k3-native", _part(_problem, K3, 7, 256, packed=True, native=True)),
    limited("prefill-8192", _part(_problem, LINEAR, 16, 8192), {"v6e": (548_000, 17_000), "tpu7x": (445_000, 17_400)}),
    limited("prefill-8192-k3", _part(_problem, K3, 7, 8192)),
    limited("prefill-8192-k3-packed", _part(_problem, K3, 7, 8192, packed=True), {"v6e": (472_000, 15_700)}),
    limited(
        "prefill-8192-k3-native", _part(_problem, K3, 7, 8192, packed=True, native=True), {"tpu7x": (446_000, 15_800)}
    ),
)
