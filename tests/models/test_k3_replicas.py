"""Two replicas of K3 that share their experts over all eight devices answer as one device does, each its own text."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hybrid_kv.models.axes import DATA, TENSOR
from hybrid_kv.models.batch import Caches
from hybrid_kv.models.checkpoint_io import load, load_config
from hybrid_kv.models.kimi_linear import KimiLinear
from hybrid_kv.models.make_tiny import make_tiny
from hybrid_kv.models.parameters import partition_specs
from tests.kernels import golden
from tests.models.harness import CACHE_SPECS, Runner, mesh_of

TOKENS, CUT, PAD = 60, 40, 64


def test_replicas_that_share_their_experts_answer_as_one_device_does(tmp_path):
    make_tiny(tmp_path, "tiny-k3", seed=5)
    config = load_config(tmp_path)
    prompts = np.random.default_rng(3).integers(0, 500, (2, TOKENS))
    alone = Runner(config, load(tmp_path, config, mesh_of(), jnp.float32), mesh_of())
    want = [alone.run(alone.batch([prompt], [0], pad_to=PAD))[:TOKENS] for prompt in prompts]

    spread = dataclasses.replace(config, expert_axes=(DATA, *TENSOR))
    mesh, specs = mesh_of(2, 2, data=2), dict(partition_specs(spread).parameters)
    params = load(tmp_path, spread, mesh, jnp.float32)
    assert params["moe.expert_up"].addressable_shards[0].data.shape[1] == 2
    one = Runner(spread, params, mesh_of(2, 2))  # for the batches and pools of a replica
    pools = Caches(*(P(None, DATA, *spec[2:]) for spec in CACHE_SPECS))
    caches = Caches(
        *(jax.device_put(np.concatenate([x, x], axis=1), NamedSharding(mesh, spec))
          for x, spec in zip(one.caches, pools, strict=True))
    )  # fmt: skip

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, P(DATA), pools), out_specs=(P(DATA, TENSOR), pools), check_vma=False
    )
    def step(params, batches, caches):
        batch = jax.tree.map(lambda x: x[0], batches)
        return KimiLinear(spread, params)(batch, caches, decode_only=False)

    for begin, end in ((0, CUT), (CUT, TOKENS)):
        batches = [one.batch([prompt[begin:end]], [begin], pad_to=PAD) for prompt in prompts]
        logits, caches = step(params, jax.tree.map(lambda *x: jnp.stack(x), *batches), caches)
        got = np.asarray(logits).reshape(2, PAD, -1)[:, : end - begin]
        for replica in range(2):
            # As far from one device as the same mesh without replicas is: sums are formed in another order.
            assert golden.rel_rmse(got[replica], want[replica][begin:end]) <= 1e-4
            np.testing.assert_array_equal(got[replica].argmax(-1), want[replica][begin:end].argmax(-1))
