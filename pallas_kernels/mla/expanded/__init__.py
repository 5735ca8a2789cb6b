"""Multi-head latent attention in expanded form, for prefill."""

from pallas_kernels.mla.expanded.break_even import expansion_pays
from pallas_kernels.mla.expanded.driver import mla_expanded

__all__ = ["expansion_pays", "mla_expanded"]
