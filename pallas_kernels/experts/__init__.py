"""Routed experts: their feed-forward layers on one rank, with weights in bf16 or in four bits."""

from pallas_kernels.experts.activation import SILU, Activation, situ
from pallas_kernels.experts.api import expert_ffn
from pallas_kernels.experts.weights import ExpertWeights, NativeMatrix, PackedExperts, PackedMatrix

__all__ = [
    "SILU",
    "Activation",
    "ExpertWeights",
    "NativeMatrix",
    "PackedExperts",
    "PackedMatrix",
    "expert_ffn",
    "situ",
]
