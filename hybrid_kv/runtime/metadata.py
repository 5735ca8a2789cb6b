"""From a plan to the arrays of one device step: packing, no decision of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.models.batch import AttentionInputs, ModelBatch, RecurrentInputs
from hybrid_kv.plan import StepPlan
from hybrid_kv.runtime.requests import Request
from hybrid_kv.runtime.sampler import SamplingInputs
from hybrid_kv.typing import Array, Int32
from pallas_kernels.rows import RaggedRows


class StepInputs(NamedTuple):
    """Everything a device step reads besides weights and caches. copies: (source, target) block of every row."""

    batch: ModelBatch
    copies: Int32[Array, "R 2"]
    sampling: SamplingInputs


def bucket_of(plans: Sequence[StepPlan], buckets: Sequence[int]) -> tuple[int, bool]:
    """(packed tokens of a replica, decode only) of the smallest compiled step that holds the plans of all replicas."""
    if all(int(plan.decodes) == int(plan.rows) for plan in plans):
        return len(plans[0].slot), True
    most = max(int(plan.tokens) for plan in plans)
    return next(bucket for bucket in buckets if bucket >= most), False


def build(
    config: CacheConfig, plan: StepPlan, requests: Sequence[Request | None], tokens: int, all_logits: bool
) -> tuple[StepInputs, np.ndarray]:
    """The inputs of a step of `tokens` packed tokens, and the packed index of every row's last token.

    plan: on the host. requests: by request slot. all_logits: every packed token wants logits, not
    only the last of each row. Rows lie in plan order, those of one token first, so that the rows of
    a decode step lie at their own index.
    """
    rows = len(plan.slot)
    length: Any = plan.length
    start_of_row: Any = np.where(length > 0, plan.start, 0)
    offset: Any = (np.cumsum(length) - length).astype(np.int32)
    last: Any = np.maximum(offset + length - 1, 0).astype(np.int32)
    every_token: Any = np.arange(tokens, dtype=np.int32)
    packed, params = _int32(tokens), SamplingInputs(_float32(rows), _int32(rows), _float32(rows), *_int32(2, rows))
    for row in range(int(plan.rows)):
        request = requests[int(plan.slot[row])]
        assert request is not None
        start, count = int(plan.start[row]), int(length[row])
        packed[offset[row] : offset[row] + count] = request.tokens[start : start + count]
        chosen = request.sampling
        values = (chosen.temperature, chosen.top_k, chosen.top_p, chosen.seed, start + count)
        for field, value in zip(params, values, strict=True):
            field[row] = value
    batch = ModelBatch(
        tokens=packed,
        rows=RaggedRows(offset, length, start_of_row),
        attention=AttentionInputs(plan.tables[0] if config.geometry.attention else _int32(rows, 1)),
        recurrent=RecurrentInputs(plan.read[0], plan.write[0], plan.emit_position, plan.emit_slot[0])
        if config.geometry.recurrent
        else RecurrentInputs(*_int32(2, rows), *_int32(2, rows, 1)),
        logits_index=every_token if all_logits else last,
    )
    return StepInputs(batch, plan.copies[0] if config.geometry.attention else _int32(rows, 2), params), last


def null_plan(like: StepPlan) -> StepPlan:
    """A plan of the same shapes that runs nothing."""
    return jax.tree.map(np.zeros_like, like)


# Host arrays stand in for the device arrays of the tuples above; the step puts them on the devices.


def _int32(*shape: int) -> Any:
    return np.zeros(shape, np.int32)


def _float32(*shape: int) -> Any:
    return np.zeros(shape, np.float32)
