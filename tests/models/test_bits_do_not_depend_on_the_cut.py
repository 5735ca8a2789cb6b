"""A token's logits are the same to the bit however its sequence is cut into steps and whoever shares them.

This is what makes a reused prefix exact: cold or resumed, prefilled or decoded, alone or in a full batch.
"""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.models.checkpoint_io import load, load_config
from hybrid_kv.models.make_tiny import make_tiny
from tests.models.harness import CHECKPOINT, Runner, mesh_of

LENGTH = 330  # more than one group of keys of the attention reference
MESHES = [(1, 1), (2, 4), (1, 8), (8, 1)]


@cache
def loaded(model: int, dcp: int):
    config, mesh = load_config(CHECKPOINT), mesh_of(model, dcp)
    return config, load(CHECKPOINT, config, mesh, jnp.float32), mesh


def runner(mesh: tuple[int, int], rows: int = 4) -> Runner:
    return Runner(*loaded(*mesh), rows=rows, capacity=512)


@cache
def prompts() -> list[list[int]]:
    return np.random.default_rng(1).integers(10, 500, (4, LENGTH)).tolist()


@cache
def alone(mesh: tuple[int, int], row: int) -> np.ndarray:
    run = runner(mesh)
    mine = [p if i == row else [] for i, p in enumerate(prompts())]
    return run.run(run.batch(mine, [0] * 4, pad_to=512))[:LENGTH]


@pytest.mark.parametrize("mesh", MESHES)
def test_pieces_of_any_size_in_any_step_size(mesh):
    for cut, step in ((64, 64), (48, 512), (17, 64)):
        run = runner(mesh)
        for begin in range(0, LENGTH, cut):
            piece = prompts()[1][begin : begin + cut]
            logits = run.run(run.batch([[], piece, [], []], [0, begin, 0, 0], pad_to=step))
            np.testing.assert_array_equal(logits[: len(piece)], alone(mesh, 1)[begin : begin + cut])


@pytest.mark.parametrize("mesh", MESHES)
def test_decode_in_company_and_prefill_alone(mesh):
    run = runner(mesh)
    for begin in range(0, 303, 101):
        # Row i is i tokens ahead of row 0, so each is cut somewhere else.
        start = [begin + i if begin else 0 for i in range(4)]
        pieces = [p[start[i] : begin + 101 + i] for i, p in enumerate(prompts())]
        run.run(run.batch(pieces, start, pad_to=512))
    for at in range(303, LENGTH - 3):
        batch = run.batch([[p[at + i]] for i, p in enumerate(prompts())], [at + i for i in range(4)], pad_to=4)
        logits = run.run(batch, decode_only=True)
        for i in range(4):
            np.testing.assert_array_equal(logits[i], alone(mesh, i)[at + i])


@pytest.mark.parametrize("rows", [1, 33])
def test_decode_at_other_batch_sizes(rows):
    run = runner((1, 1), rows)
    tokens = [prompts()[i % 4] for i in range(rows)]
    for begin in range(0, 320, 5):
        run.run(run.batch([t[begin : begin + 5] for t in tokens], [begin] * rows, pad_to=512))
    for at in range(320, LENGTH):
        logits = run.run(run.batch([[t[at]] for t in tokens], [at] * rows, pad_to=rows), decode_only=True)
        for i in range(rows):
            np.testing.assert_array_equal(logits[i], alone((1, 1), i % 4)[at])


@pytest.mark.parametrize("mesh", [(1, 1), (2, 4)])
def test_resuming_from_a_saved_state_at_any_offset(mesh):
    run = runner(mesh)
    mine = [[], [], [], prompts()[3]]
    run.run(run.batch(mine, [0] * 4, pad_to=512, emit=[(3, 0, 192), (3, 1, 101)]))
    slot = int(run.batch(mine, [0] * 4, pad_to=512).recurrent.write[3])
    for saved, at in ((slot + 1, 192), (slot + 2, 101)):
        rest = [prompts()[0][:5], [], [], prompts()[3][at:]]
        logits = run.run(run.batch(rest, [0, 0, 0, at], pad_to=512, fresh=[0, 0, 0, saved]))
        np.testing.assert_array_equal(logits[5 : 5 + LENGTH - at], alone(mesh, 3)[at:])


def test_k3_in_pieces_in_company_and_decoded(tmp_path):
    make_tiny(tmp_path, "tiny-k3", seed=0)
    config, mesh = load_config(tmp_path), mesh_of(2, 2)
    run = Runner(config, load(tmp_path, config, mesh, jnp.float32), mesh, rows=4)
    texts = [prompt[:90] for prompt in prompts()]
    whole = [run.run(run.batch([p if i == row else [] for i, p in enumerate(texts)], [0] * 4, pad_to=128))[:90]
             for row in range(4)]  # fmt: skip
    for begin in range(0, 80, 20):
        # Row i is i tokens ahead of row 0, so each is cut somewhere else.
        start = [begin + i if begin else 0 for i in range(4)]
        pieces = [p[start[i] : begin + 20 + i] for i, p in enumerate(texts)]
        logits = run.run(run.batch(pieces, start, pad_to=128))
        ends = np.cumsum([len(piece) for piece in pieces])
        for i, end in enumerate(ends):
            np.testing.assert_array_equal(
                logits[end - len(pieces[i]) : end], whole[i][start[i] : start[i] + len(pieces[i])]
            )
    for at in range(80, 87):
        batch = run.batch([[p[at + i]] for i, p in enumerate(texts)], [at + i for i in range(4)], pad_to=4)
        logits = run.run(batch, decode_only=True)
        for i in range(4):
            np.testing.assert_array_equal(logits[i], whole[i][at + i])
