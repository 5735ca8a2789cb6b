"""Latent attention and row writes as Mosaic kernels for TPU."""
