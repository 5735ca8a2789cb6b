"""Kimi Delta Attention: gated delta rule over a per-head state [K, V]."""

from pallas_kernels.kda.api import kda_commit, kda_commit_verify, kda_decode, kda_prefill, kda_verify
from pallas_kernels.kda.records import Commit, Records

__all__ = ["Commit", "Records", "kda_commit", "kda_commit_verify", "kda_decode", "kda_prefill", "kda_verify"]
