"""KDA on Hopper, as Mosaic GPU kernels."""

from pallas_kernels.kda.gpu.ops import commit, commit_verify, decode, prefill, verify

__all__ = ["commit", "commit_verify", "decode", "prefill", "verify"]
