"""Tokens and tiles of ragged rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import rows as ragged
from tests.kernels.kda_oracle import rows_of

tokens = jax.jit(ragged.tokens, static_argnums=1)
tiles = jax.jit(ragged.tiles, static_argnums=(1, 2, 3))


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 100)), min_size=6, max_size=6),
    tile=st.sampled_from([1, 16, 64]), anchored=st.booleans(),
)  # fmt: skip
def test_tiles_cover_every_token_once_inside_the_static_bound(parts, tile, anchored):
    length, start = (np.array(x) for x in zip(*parts, strict=True))
    total = 420
    rows = rows_of(np.where(length > 0, np.cumsum(length) - length, 0), length, start)
    most = ragged.max_tiles(total, len(parts), tile, anchored)
    grid = jax.tree.map(np.asarray, tiles(rows, tile, anchored, most))
    assert int(grid.used) <= most
    token = jax.tree.map(np.asarray, tokens(rows, total))
    seen = np.zeros(total, int)
    for m in range(most):
        inside = np.arange(int(grid.low[m]), int(grid.high[m]))
        at = int(grid.first[m]) + inside
        seen[at] += 1
        np.testing.assert_array_equal(token.row[at], grid.row[m])
        np.testing.assert_array_equal(token.position[at], int(grid.position[m]) + inside)
        if anchored and len(inside):
            assert int(grid.position[m]) % tile == 0
    np.testing.assert_array_equal(seen, np.asarray(token.valid, int))


@pytest.mark.parametrize("gap", [0, 1])
def test_slack_and_gaps_belong_to_no_row(gap):
    token = ragged.tokens(rows_of([0, 1, 2], [1, 1 - gap, 1], [4, 9, 6]), 5)
    np.testing.assert_array_equal(token.valid, [True, gap == 0, True, False, False])
    np.testing.assert_array_equal(token.position[jnp.array([0, 2])], [4, 6])
