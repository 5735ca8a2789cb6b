"""Answers of prefill, decode and verify do not depend on how KDA and the residual stream lie on the devices."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hybrid_kv.errors import UserError
from hybrid_kv.models.axes import DATA, TENSOR
from hybrid_kv.models.checkpoint_io import load, load_config
from hybrid_kv.models.config import experts_over, kda_over
from hybrid_kv.models.execution import Execution
from hybrid_kv.models.kimi_linear import KimiLinear
from hybrid_kv.models.make_tiny import make_tiny
from hybrid_kv.models.parameters import check_mesh, partition_specs
from tests.kernels import golden
from tests.models.harness import QUICK, Runner, cache_specs, mesh_of

ROWS, CONTEXT, MOST = 4, (21, 5, 16, 0), 3  # the last row is absent
PRESENT = [1, 1, 1, 0]
LINEAR, K3 = "tiny-kimi-linear", "tiny-k3"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name) for name in (LINEAR, K3)}
    for name, folder in made.items():
        make_tiny(folder, name, seed=7)
    return made


@cache
def served(folder, sizes=(1, 1, 1), kda="tensor", residual="replicated", experts="tensor", steps=3):
    """A runner on the mesh (model, dcp, data), and its compiled (params, batches, caches) -> logits of all tokens of
    the first `steps` of a prefill, a decode and a verify step. Batches of the replicas lie one behind the other."""
    config = dataclasses.replace(load_config(folder), kda_axes=kda_over(kda), expert_axes=experts_over(experts))
    mesh = mesh_of(*sizes)
    check_mesh(config, mesh.shape)
    specs, pools = dict(partition_specs(config).parameters), cache_specs(config)

    @partial(jax.jit, compiler_options=QUICK)
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, P(DATA), pools), out_specs=(P(DATA, TENSOR),) * steps,
        check_vma=False,
    )  # fmt: skip
    def run(params, batches, caches):
        prefill, decode, verify = jax.tree.map(lambda x: x[0], batches)
        model = KimiLinear(config, params, Execution(residual=residual))
        first, caches = model(prefill, caches, decode_only=False)
        second, caches = model(decode, caches, decode_only=True)
        third, _, _ = model.verify(verify, caches, most=MOST)
        return (first, second, third)[:steps]  # what is not returned is not compiled

    return Runner(config, load(folder, config, mesh, jnp.float32), mesh, rows=ROWS, capacity=64), run


def texts(replica):
    return np.random.default_rng(replica).integers(0, 500, (ROWS, max(CONTEXT) + 1 + MOST))


def inputs(runner, replicas):
    """Batches of the three steps for replicas with a text each."""

    def batches(text):
        def step(begin, lengths, pad_to):
            pieces = [row[at : at + n] for row, at, n in zip(text, begin, lengths, strict=True)]
            return runner.batch(pieces, begin, pad_to=pad_to)

        after = [n + one for n, one in zip(CONTEXT, PRESENT, strict=True)]
        return step([0] * ROWS, CONTEXT, 48), step(CONTEXT, PRESENT, ROWS), step(after, (3, 1, 2, 0), 8)

    return jax.tree.map(lambda *x: jnp.stack(x), *(batches(texts(i)) for i in replicas))


def answers(folder, replicas, *spread):
    """Logits of the steps, of each replica's own text; their slack is cut off."""
    runner, run = served(folder, *spread)
    logits = run(runner.params, inputs(runner, replicas), runner.caches)
    sizes = sum(CONTEXT), sum(PRESENT), 6
    return [np.asarray(x).reshape(len(replicas), -1, x.shape[-1])[:, :n] for x, n in zip(logits, sizes, strict=False)]


def assert_same(folder, replicas, *spread):
    got = answers(folder, replicas, *spread)
    want = [np.concatenate(parts) for parts in zip(*(answers(folder, [i]) for i in replicas), strict=True)]
    for step, one, other in zip(("prefill", "decode", "verify"), got, want, strict=False):
        np.testing.assert_array_equal(one.argmax(-1), other.argmax(-1), err_msg=step)
        assert golden.rel_rmse(one, other) <= 1e-4, step


@pytest.mark.parametrize(("model", "sizes", "kda", "residual", "steps"), [
    (LINEAR, (2, 2), "model", "sequence", 3), (LINEAR, (1, 4), "replicated", "sequence", 3),
    (LINEAR, (2, 2), "replicated", "replicated", 1), (K3, (4, 1), "tensor", "sequence", 1),
    (K3, (2, 2), "model", "replicated", 2),
])  # fmt: skip
def test_every_spread_answers_as_one_device(folders, model, sizes, kda, residual, steps):
    assert_same(folders[model], [0], (*sizes, 1), kda, residual, "tensor", steps)


def test_replicas_that_share_their_experts_answer_as_one_device_with_both(folders):
    assert_same(folders[K3], [0, 1], (2, 2, 2), "replicated", "sequence", "mesh")


def test_split_by_tokens_no_device_has_more_of_the_residual_than_its_part(folders):
    """Of 48 tokens and a bank of four blocks, on four devices."""
    text = {}
    for residual in ("replicated", "sequence"):
        runner, run = served(folders[K3], (4, 1, 1), "tensor", residual, "tensor", 1)
        text[residual] = run.lower(runner.params, inputs(runner, [0]), runner.caches).as_text()
    assert "tensor<4x48x64xf32>" in text["replicated"]
    assert "tensor<4x12x64xf32>" in text["sequence"] and "tensor<4x48x64xf32>" not in text["sequence"]


@pytest.mark.parametrize(("kda", "heads"), [("tensor", 2), ("model", 4), ("replicated", 8)])
def test_every_device_is_given_the_heads_that_are_its_own(folders, kda, heads):
    """As many of every weight, and those of its place; devices that share no axis of the split hold the same."""
    whole, params = served(folders[K3])[0].params, served(folders[K3], (2, 2, 1), kda)[0].params
    for name in ("kda.qkv", "kda.conv", "kda.a_log", "kda.beta", "kda.g", "kda.out"):
        axis = 2 if name == "kda.out" else 1
        width = whole[name].shape[axis] // 8 * heads
        for place, shard in enumerate(sorted(params[name].addressable_shards, key=lambda shard: shard.device.id)):
            first = {"tensor": place, "model": place // 2, "replicated": 0}[kda] * width
            np.testing.assert_array_equal(shard.data, jnp.take(whole[name], first + np.arange(width), axis), name)


def test_heads_have_to_divide_over_the_axes_that_split_them_and_no_others(folders):
    config = load_config(folders[K3])
    six = dataclasses.replace(config, kda_heads=6)
    with pytest.raises(UserError, match=r"num_heads: got 6; must be a multiple of model \* dcp = 4; .*or spread KDA"):
        check_mesh(six, mesh_of(2, 2).shape)
    with pytest.raises(UserError, match="num_heads: got 6; must be a multiple of model = 4"):
        check_mesh(dataclasses.replace(six, kda_axes=("model",)), mesh_of(4, 2).shape)
    check_mesh(dataclasses.replace(six, kda_axes=("model",)), mesh_of(2, 4).shape)
    check_mesh(dataclasses.replace(six, kda_axes=()), mesh_of(2, 2).shape)


def test_other_axes_and_names_are_refused(folders):
    with pytest.raises(UserError, match="residual: got 'tokens'; use one of replicated, sequence"):
        Execution(residual="tokens")
    with pytest.raises(UserError, match="exchange: got 'ring'; use one of reduce_scatter, all_to_all"):
        Execution(exchange="ring")
    with pytest.raises(UserError, match="kda: got 'dcp'; use one of tensor, model, replicated"):
        kda_over("dcp")
    with pytest.raises(UserError, match=r"kda_axes: got \('dcp',\); use one of"):
        dataclasses.replace(load_config(folders[K3]), kda_axes=("dcp",))
