"""Models that run over the caches: Kimi Linear, its configuration and its checkpoints."""
