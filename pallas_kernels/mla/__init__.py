"""Multi-head latent attention over a paged, optionally striped latent cache."""

from pallas_kernels.mla.api import merge_lse, mla_attention, mla_write

__all__ = ["merge_lse", "mla_attention", "mla_write"]
