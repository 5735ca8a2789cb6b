"""Gather after reduce is the sum for everyone, and rows are picked from whoever holds them, however the stream lies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hybrid_kv.errors import UserError
from hybrid_kv.models.axes import DCP, MODEL, TENSOR
from hybrid_kv.models.execution import Execution
from hybrid_kv.models.stream import BySequence, Replicated
from tests.models.harness import mesh_of

TOKENS, WIDTH = 12, 3  # 4 ranks hold 3 tokens each
FEW, ALL = (7, 0, 9, 9, 4), tuple(range(TOKENS))
LAYOUTS = {"whole": Replicated(), "split": BySequence(), "split by all-to-all": BySequence("all_to_all")}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("axes", [TENSOR, (MODEL,), (DCP,), ()], ids=lambda axes: "+".join(axes) or "none")
def test_every_rank_ends_with_the_same_sums_and_rows(name, axes):
    """Partial results differ along the axes that are summed and are equal along the others."""
    parts = np.random.default_rng(0).integers(-9, 9, (2, 2, TOKENS, WIDTH)).astype(np.float32)
    for place, axis in enumerate(TENSOR):
        if axis not in axes:
            parts = np.broadcast_to(parts.take([0], place), parts.shape)
    summed = parts.sum(tuple(place for place, axis in enumerate(TENSOR) if axis in axes), keepdims=True)[0, 0]
    layout = LAYOUTS[name]

    @jax.jit
    @partial(jax.shard_map, mesh=mesh_of(2, 2), in_specs=(P(*TENSOR), P()), out_specs=P(TENSOR), check_vma=False)
    def run(parts, whole):
        held = layout.reduce(parts[0, 0], axes)
        picked = [layout.pick(lambda at: held[at], jnp.asarray(wanted), held.shape[0]) for wanted in (FEW, ALL)]
        own = layout.own(whole[:, None])[:, 0]
        return jax.tree.map(lambda x: x[None], (held, layout.gather(held), picked, own))

    held, gathered, picked, own = run(jnp.asarray(parts), jnp.asarray(summed))
    assert held.shape[1] == (TOKENS if name == "whole" else 3)
    for rank in range(4):
        np.testing.assert_array_equal(gathered[rank], summed)
        for wanted, rows in zip((FEW, ALL), picked, strict=True):
            np.testing.assert_array_equal(rows[rank], summed[list(wanted)])
        np.testing.assert_array_equal(own[rank], held[rank])


def test_tokens_that_do_not_divide_are_refused_by_the_stream_and_stay_whole_in_a_step():
    split = Execution(residual="sequence")
    place = jax.shard_map(split.stream.reduce, mesh=mesh_of(2, 2), in_specs=P(), out_specs=P(TENSOR), check_vma=False)
    with pytest.raises(UserError, match=r"tokens: got 10; .* a multiple of the 4 devices of a tensor group"):
        place(jnp.zeros((10, WIDTH)))
    assert split.suited(10, 4) == Execution() and split.suited(12, 4) == split
