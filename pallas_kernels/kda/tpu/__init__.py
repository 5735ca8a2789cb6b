"""KDA kernels for TPU (Pallas, Mosaic)."""
