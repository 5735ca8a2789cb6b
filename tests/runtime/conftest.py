"""Engines of the tiny checkpoint, kept for a module: compiling their steps is what costs."""

import functools

import numpy as np
import pytest

from hybrid_kv.runtime.engine import CacheOptions, Engine

OPTIONS = CacheOptions(max_context=512, max_requests=4, token_budget=256, token_buckets=(256,))


@pytest.fixture(scope="session")
def reference(tiny_checkpoint):
    """Prompts, logits and greedy tokens computed by another implementation."""
    return dict(np.load(tiny_checkpoint / "reference_outputs.npz"))


@pytest.fixture(scope="module")
def make_engine(tiny_checkpoint):
    """Engine of a mesh and options, made once; its cache is emptied before it is handed out again."""

    @functools.cache
    def make(mesh: str, options: CacheOptions) -> Engine:
        return Engine.from_checkpoint(tiny_checkpoint, mesh=mesh, cache=options)

    def fresh(mesh: str = "1x1", options: CacheOptions = OPTIONS) -> Engine:
        engine = make(mesh, options)
        assert engine.reset_prefix_cache()
        return engine

    return fresh
