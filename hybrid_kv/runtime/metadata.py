"""From a plan to the arrays of one device step: packing, no decision of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.models.batch import AttentionInputs, ModelBatch, RecurrentInputs
from hybrid_kv.plan import StepPlan
from hybrid_kv.runtime.requests import Request
from hybrid_kv.runtime.sampler import SamplingInputs
from pallas_kernels.rows import RaggedRows


class StepInputs(NamedTuple):
    """Everything a device step reads besides weights and caches. copies: i32[R, 2] (source, target)."""

    batch: ModelBatch
    copies: np.ndarray
    sampling: SamplingInputs


def bucket_of(plan: StepPlan, buckets: Sequence[int]) -> tuple[int, bool]:
    """(packed tokens, decode only) of the smallest compiled step that holds the plan."""
    if int(plan.decodes) == int(plan.rows):
        return len(plan.slot), True
    return next(bucket for bucket in buckets if bucket >= int(plan.tokens)), False


def build(config: CacheConfig, plan: StepPlan, requests: Sequence[Request | None], tokens: int, all_logits: bool):
    """The inputs of a step of `tokens` packed tokens.

    plan: on the host. requests: by request slot. all_logits: every packed token wants logits, not
    only the last of each row.
    """
    rows = len(plan.slot)
    length = plan.length.astype(np.int32)
    # Rows of a decode step lie at their own index; all rows have length 1 first, then 0.
    offset = (np.cumsum(length) - length).astype(np.int32)
    packed = np.zeros(tokens, np.int32)
    sampling = SamplingInputs(
        np.zeros(rows, np.float32),
        np.zeros(rows, np.int32),
        np.ones(rows, np.float32),
        np.zeros(rows, np.int32),
        np.zeros(rows, np.int32),
    )
    for row in range(int(plan.rows)):
        request = requests[plan.slot[row]]
        assert request is not None
        start, count = int(plan.start[row]), int(length[row])
        packed[offset[row] : offset[row] + count] = request.tokens[start : start + count]
        params = request.sampling
        sampling.temperature[row], sampling.top_k[row] = params.temperature, params.top_k
        sampling.top_p[row], sampling.seed[row] = params.top_p, params.seed
        sampling.position[row] = start + count
    last = np.maximum(offset + length - 1, 0).astype(np.int32)
    recurrent = (
        RecurrentInputs(plan.read[0], plan.write[0], plan.emit_position, plan.emit_slot[0])
        if config.geometry.recurrent
        else RecurrentInputs(*(np.zeros(rows, np.int32),) * 2, *(np.zeros((rows, 1), np.int32),) * 2)
    )
    striped = bool(config.geometry.attention)
    batch = ModelBatch(
        tokens=packed,
        rows=RaggedRows(offset, length, np.where(length > 0, plan.start, 0).astype(np.int32)),
        attention=AttentionInputs(plan.tables[0] if striped else np.zeros((rows, 1), np.int32)),
        recurrent=recurrent,
        logits_index=np.arange(tokens, dtype=np.int32) if all_logits else last,
    )
    return StepInputs(batch, plan.copies[0] if striped else np.zeros((rows, 2), np.int32), sampling), last


def null_plan(config: CacheConfig, like: StepPlan) -> StepPlan:
    """A plan of the same shapes that runs nothing."""
    return StepPlan(*(_zeros(field) for field in like))


def _zeros(field):
    if isinstance(field, tuple):
        return tuple(np.zeros_like(part) for part in field)
    return np.zeros_like(field)
