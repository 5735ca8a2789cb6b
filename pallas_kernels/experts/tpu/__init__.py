"""Expert kernels for TPU (Pallas, Mosaic)."""
