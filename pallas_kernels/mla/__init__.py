"""Multi-head latent attention over a paged, optionally striped latent cache."""

from pallas_kernels.mla.api import merge_lse, mla_attention, mla_write
from pallas_kernels.mla.exchange import context_parallel

__all__ = ["context_parallel", "merge_lse", "mla_attention", "mla_write"]
