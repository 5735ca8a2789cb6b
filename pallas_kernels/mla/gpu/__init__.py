"""Latent attention on Hopper, as a Mosaic GPU kernel."""

from pallas_kernels.mla.gpu.attention import mla_attention

__all__ = ["mla_attention"]
