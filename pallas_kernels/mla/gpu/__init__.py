"""Latent attention on Hopper, as a Mosaic GPU kernel."""

from pallas_kernels.mla.gpu.attention import fits, mla_attention

__all__ = ["fits", "mla_attention"]
