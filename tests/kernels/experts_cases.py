"""Experts with known weights, plain and packed, and their outputs in float64."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.experts import Activation, ExpertWeights, NativeMatrix, PackedExperts, PackedMatrix
from pallas_kernels.experts.mxfp4 import unpack_host
from pallas_kernels.experts.packed import pack


class Experts(NamedTuple):
    """The same weights in every form, [layers, E, out, in] in float64."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    forms: dict[str, ExpertWeights | PackedExperts]


def random_codes(rng, outputs: int, inputs: int, scales: tuple[int, int] = (118, 128)):
    """Published bytes of one matrix: codes [out, in / 2] and scales [out, in / 32]."""
    codes = rng.integers(0, 256, (outputs, inputs // 2), np.uint8)
    return codes, rng.integers(*scales, (outputs, inputs // 32)).astype(np.uint8)


def _packed(bytes_of, kind, interleave: bool):
    slices = [
        [pack(*matrix, interleave=interleave, native=kind is NativeMatrix) for matrix in layer] for layer in bytes_of
    ]
    return kind(*(jnp.asarray(np.stack([np.stack(part) for part in layer])) for layer in zip_parts(slices)))


def zip_parts(slices):
    """[layers][experts] of slices, turned into one such nest for each field."""
    return [[[one[i] for one in layer] for layer in slices] for i in range(3)]


def random_experts(seed: int, layers: int, local: int, width: int, hidden: int) -> Experts:
    """Weights that MXFP4 holds, so that every form of them is exact."""
    rng = np.random.default_rng(seed)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    octets = [[[random_codes(rng, *shape) for _ in range(local)] for _ in range(layers)] for shape in shapes]
    values = [
        np.stack([np.stack([unpack_host(*m) for m in layer]) for layer in matrix]).astype(np.float64)
        for matrix in octets
    ]
    forms: dict = {"plain": ExpertWeights(*(jnp.asarray(v, jnp.bfloat16) for v in values))}
    for name, kind in (("packed", PackedMatrix), ("native", NativeMatrix)):
        forms[name] = PackedExperts(*(_packed(m, kind, i < 2) for i, m in enumerate(octets)))
    return Experts(*values, forms)


def truth(x, ids, weights, experts: Experts, layer: int, first: int, activation: Activation) -> np.ndarray:
    """The contract in float64."""
    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    out = np.zeros_like(x)
    for e in range(experts.gate.shape[1]):
        share = np.where(np.asarray(ids) == first + e, weights, 0).sum(axis=1, keepdims=True)
        g, u = x @ experts.gate[layer, e].T, x @ experts.up[layer, e].T
        open_ = 0.5 + 0.5 * np.tanh(g / 2)
        if activation.beta is not None:
            g = activation.beta * np.tanh(g / activation.beta)
        if activation.linear_beta is not None:
            u = activation.linear_beta * np.tanh(u / activation.linear_beta)
        out += share * ((open_ * g * u) @ experts.down[layer, e].T)
    return out


def routing(rng, tokens: int, top_k: int, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Experts of each token, none twice, and weights."""
    ids = np.argsort(rng.random((tokens, total)), axis=1)[:, :top_k]
    return ids.astype(np.int32), rng.random((tokens, top_k)).astype(np.float32)
