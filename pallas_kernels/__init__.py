"""Kernels of hybrid models, each behind one `api` with a readable reference.

This package stands alone: it imports nothing from the cache library. Every op takes
`implementation`; None chooses by platform and a named one never falls back (`dispatch`).
Tokens of a step lie packed on one axis and are described by `rows.RaggedRows`.
"""

from pallas_kernels.dispatch import ImplementationError
from pallas_kernels.rows import RaggedRows

__all__ = ["ImplementationError", "RaggedRows"]
