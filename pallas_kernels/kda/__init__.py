"""Kimi Delta Attention: gated delta rule over a per-head state [K, V]."""

from pallas_kernels.kda.api import kda_decode, kda_prefill

__all__ = ["kda_decode", "kda_prefill"]
