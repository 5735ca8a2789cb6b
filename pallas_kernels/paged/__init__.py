"""Whole-block operations on a pool."""

from pallas_kernels.paged.api import copy_blocks, gather_blocks, scatter_blocks, zero_blocks

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks", "zero_blocks"]
