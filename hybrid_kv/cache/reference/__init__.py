"""The cache and scheduler as a slow, obvious model: plain Python, one object a block, content for keys."""

from hybrid_kv.cache.reference.external import External, Load, Offer
from hybrid_kv.cache.reference.lookup import Hit, lookup
from hybrid_kv.cache.reference.model import Model
from hybrid_kv.cache.reference.plan import Row, Step
from hybrid_kv.cache.reference.rules import Draft, Rules

__all__ = ["Draft", "External", "Hit", "Load", "Model", "Offer", "Row", "Rules", "Step", "lookup"]
