"""Step by step, in one scan, or many policies at once: the transitions decide the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv import hashing
from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.cache.state import initial_state, policy_of
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.schedule import pieces
from hybrid_kv.simulate import closed_loop


def config(**more) -> CacheConfig:
    groups = [GroupSpec("mla", "mla", 8), GroupSpec("kda", "recurrent", 8)]
    sizes = {"pool_blocks": (24, 8), "group_pool": (0, 1), "max_requests": 3, "max_context": 64, "token_budget": 24}
    return CacheConfig(resolve(groups, hash_unit=4), **(sizes | more))


def workload(config: CacheConfig, requests: int) -> closed_loop.Workload:
    """Prompts with shared beginnings, some of them continuing an earlier one's answer."""
    rng = np.random.default_rng(0)
    texts: list[np.ndarray] = [rng.integers(0, 3, 40) for _ in range(3)]
    prompts, totals, keys = [], [], np.zeros((requests, config.units, 4), np.uint32)
    for number in range(requests):
        stem = texts[rng.integers(len(texts))]
        tokens = np.concatenate([stem[: rng.integers(0, 45)], rng.integers(0, 3, rng.integers(2, 12))])
        totals.append(len(tokens))
        prompts.append(int(rng.integers(max(1, len(tokens) // 3), len(tokens))))
        texts.append(tokens)
        chain = hashing.chain(tokens.astype(np.int32), config.unit, hashing.seed())
        keys[number, : len(chain)] = chain
    return closed_loop.Workload(jnp.array(prompts, jnp.int32), jnp.array(totals, jnp.int32), jnp.asarray(keys))


def compiled(function, **options):
    """Small states are bound by the number of operations, so the machine code need not be optimised."""
    quick = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    return jax.jit(pieces.in_one_piece(function, consumes=False), compiler_options=quick, **options)


def assert_same(one, other) -> None:
    for field, a, b in zip(one._fields, one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=field)


def test_ten_thousand_steps_in_one_scan_are_those_taken_one_by_one():
    cache = config(pool_blocks=(15, 8), whole_prompts=False, placement=Placement(positions=(12, 28)))
    load = workload(cache, 4_000)
    step = compiled(functools.partial(closed_loop.step, cache), donate_argnums=1)
    progress, decided = closed_loop.begin(cache, initial_state(cache)), []
    for _ in range(10_000):
        progress, decisions = step(load, progress)
        decided.append(decisions)
    taken = jax.tree.map(lambda *parts: np.stack([np.asarray(part) for part in parts]), *decided)
    serve = compiled(functools.partial(closed_loop.serve, cache, steps=10_000))
    _, scanned = serve(load, closed_loop.begin(cache, initial_state(cache)))
    assert_same(scanned, taken)
    hits = np.asarray(scanned.hit)
    assert int(np.asarray(scanned.preempted)[-1]) > 0 and (hits > 0).sum() > 100 and (hits == 0).sum() > 50


def test_sixty_four_policies_side_by_side_decide_as_each_alone():
    cache = config(placement=Placement(ladder=(8, 16), junctions=4, retention=16, positions=(0, 0)))
    load = workload(cache, 60)
    positions = ((), (12,), (20, 40), (44, 8))
    policies = [
        Placement(
            bool(n & 1), bool(n & 2), 4 * (n >> 2 & 1), (8, 16) if n & 8 else (), (0, 16, 32, 48)[n >> 4],
            positions[(n + (n >> 2)) % 4],
        )
        for n in range(64)
    ]  # fmt: skip
    data = jnp.asarray(np.stack([policy_of(cache, policy) for policy in policies]))

    def run(policy):
        state = initial_state(cache)._replace(policy=policy)
        return closed_loop.serve(cache, load, closed_loop.begin(cache, state), 200)[1]

    together = jax.jit(jax.vmap(run), compiler_options={"xla_backend_optimization_level": 0})(data)
    alone = compiled(run)
    hits = []
    for number in range(64):
        mine = jax.tree.map(lambda part, number=number: part[number], together)
        assert_same(mine, alone(data[number]))
        hits.append(int(np.maximum(np.asarray(mine.hit), 0).sum()))
    assert len(set(hits)) > 5
