"""A budget of states: the choice is the best there is, and the core keeps what was chosen."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv.cache import budgeted
from hybrid_kv.cache.budgeted import Bins, Learner
from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.cache.state import LADDER, policy_of
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.content_model import Serving

SMALL = Bins(4, 28)
choose = jax.jit(budgeted.choose, static_argnums=(0, 2))


def best(bins: Bins, weights, most: int) -> tuple[int, ...]:
    """By trying all: the most served, then the fewest, then the shallowest from the last one on."""
    floors = bins.floors.tolist()

    def worth(chosen: tuple[int, ...]):
        tokens = sum(w * max((p for p in chosen if p <= d), default=0) for w, d in zip(weights, floors, strict=True))
        return -tokens, len(chosen), chosen[::-1]

    return min((c for n in range(most + 1) for c in itertools.combinations(floors[1:], n)), key=worth)


def chosen(bins: Bins, weights, most: int) -> tuple[int, ...]:
    positions = np.asarray(choose(bins, jnp.asarray(weights, jnp.float32), most)).tolist()
    assert len(positions) == most
    return tuple(position for position in positions if position)


def test_the_choice_is_the_best_of_all_for_every_small_histogram():
    for weights in itertools.product((0, 1, 3), repeat=6):
        for most in (1, 2, 3):
            assert chosen(SMALL, (5, *weights, 0), most) == best(SMALL, (5, *weights, 0), most), (weights, most)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=8, max_size=8), st.integers(1, 8))
def test_the_choice_is_the_best_of_all_for_random_histograms(weights, most):
    assert chosen(SMALL, weights, most) == best(SMALL, weights, most)


def test_what_is_served_is_the_deepest_position_within_each_overlap():
    weights = np.zeros(SMALL.count, np.float32)
    weights[[2, 5, 7]] = 3, 2, 1
    assert float(budgeted.served(SMALL, weights, jnp.array([8, 20, 0]))) == 3 * 8 + 2 * 20 + 20
    assert float(budgeted.served(SMALL, weights, jnp.zeros(2, jnp.int32))) == 0
    assert chosen(SMALL, weights, 2) == (8, 20) and chosen(SMALL, np.zeros(8), 3) == ()


def test_bins_are_exact_at_first_and_a_sixty_fourth_wide_beyond():
    bins = Bins(64, 1 << 20)
    assert bins.count == 577 and bins.floors[:129].tolist() == list(range(0, 129 * 64, 64))
    assert (np.diff(bins.floors) > 0).all() and (bins.floors % 64 == 0).all() and bins.floors[-1] == 1 << 20
    depths = np.random.default_rng(0).integers(64, 1 << 20, 2000)
    below = bins.floors[np.asarray(bins.of(depths))]
    assert (below <= depths).all() and (depths - depths // 64 * 64 <= 63).all()
    assert (depths // 64 * 64 - below <= depths / 64).all()
    assert int(bins.of(1 << 25)) == bins.count - 1 and int(bins.of(63)) == 0


def test_seeing_forgetting_and_choosing_are_functions_of_arrays():
    def run(depths, keep):
        histogram = budgeted.empty(SMALL, 2)
        histogram, _ = jax.lax.scan(lambda h, d: (budgeted.observe(SMALL, h, d, d % 2), None), histogram, depths)
        return budgeted.choose(SMALL, budgeted.decay(histogram, keep).sum(0), 2)

    depths = jnp.asarray(np.random.default_rng(0).integers(0, 29, (5, 40)))
    together = jax.jit(jax.vmap(run, (0, None)))(depths, 0.5)
    for mine, one in zip(together, depths, strict=True):
        assert mine.tolist() == run(one, 0.5).tolist()
        counts = np.bincount(np.asarray(one) // 4, minlength=8)
        assert tuple(mine.tolist()) == best(SMALL, counts, 2)


@functools.cache
def config(*positions: int) -> CacheConfig:
    return CacheConfig(
        resolve([GroupSpec("mla", "mla", 16), GroupSpec("kda", "recurrent", 16)], hash_unit=16),
        pool_blocks=(200, 60), group_pool=(0, 1), max_requests=4, max_context=256, token_budget=128,
        placement=Placement(positions=positions),
    )  # fmt: skip


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << 20, length).tolist()


def serve(serving: Serving, tokens) -> int:
    serving.add(tokens, 2)
    serving.run()
    return serving.hits[-1]


def test_every_longer_prompt_keeps_a_state_at_a_position():
    serving = Serving(config(96, 48))
    assert serve(serving, prompt(0, 200)) == 0
    assert serve(serving, prompt(0, 100) + prompt(1, 40)) == 96
    assert serve(serving, prompt(0, 90) + prompt(2, 40)) == 48
    assert serve(serving, prompt(3, 96)) == 0
    # A position at the end of a prompt is not inside it; its tail is kept as ever.
    assert serve(serving, prompt(3, 96) + prompt(4, 40)) == 96
    serving.assert_sound()


def test_positions_are_data_of_one_program():
    none, some = config(0, 0), config(96, 48)
    assert none.program == some.program != config(96).program
    assert policy_of(none, Placement(positions=(32,)))[LADDER:].tolist() == [32, 0]
    serving = Serving(none)
    assert serve(serving, prompt(0, 200)) == 0 and serve(serving, prompt(0, 100) + prompt(1, 40)) == 0
    serving = Serving(none)
    serving.state = serving.state._replace(policy=policy_of(none, some.placement))
    assert serve(serving, prompt(0, 200)) == 0 and serve(serving, prompt(0, 100) + prompt(1, 40)) == 96


def test_a_learner_keeps_states_where_requests_were_seen_to_part():
    serving = Serving(config(0, 0))
    learner = Learner(serving.config, every=6)

    def watched(tokens) -> int:
        serving.add(tokens, 2)
        while serving.live:
            plan = serving.plan()
            serving.state = learner.watch(serving.state)
            serving.execute(plan)
            serving.commit()
        return serving.hits[-1]

    for document in range(3):
        assert watched(prompt(document, 120)) == 0
        watched(prompt(document, 80) + prompt(50 + document, 30))
    assert learner.positions == (80,)
    # Nobody has parted from this document, and the first one to do so is served.
    assert watched(prompt(9, 120)) == 0 and watched(prompt(9, 80) + prompt(60, 30)) == 80


def test_a_tenant_with_few_requests_counts_as_much_where_it_is_fair():
    for fair, position in ((False, 64), (True, 160)):
        learner = Learner(config(0), every=9, tenants=2, fair=fair)
        told = [learner.admitted(64, 0) for _ in range(8)] + [learner.admitted(160, 1)]
        assert told == [False] * 8 + [True] and learner.positions == (position,)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: config(24), "placement.positions: got 24; hits end at multiples of 16"),
        (lambda: config(-16), "placement.positions: got -16"),
        (lambda: policy_of(config(0), Placement(positions=(16, 32))), "has room for 0 rungs, 1 positions"),
        (lambda: Learner(config()), r"placement.positions: got \(\); make room"),
        (lambda: Learner(config(0), every=0), "every: got 0"),
        (lambda: Learner(config(0), keep=1.5), "keep: got 1.5"),
        (lambda: Bins(0, 5), "unit: got 0"),
        (lambda: Bins(8, 5), "deepest: got 5"),
    ],
)
def test_positions_and_budgets_that_cannot_be_are_refused(make, named):
    with pytest.raises(UserError, match=named):
        make()
