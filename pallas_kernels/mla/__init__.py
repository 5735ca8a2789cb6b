"""Multi-head latent attention over a paged, optionally striped latent cache."""

from pallas_kernels.mla.api import merge_lse, mla_attention, mla_write
from pallas_kernels.mla.exchange import context_parallel
from pallas_kernels.mla.expanded import expansion_pays, mla_expanded

__all__ = ["context_parallel", "expansion_pays", "merge_lse", "mla_attention", "mla_expanded", "mla_write"]
