"""Transitions as single kernels: the same results, all of the arrays in place, and room made by another program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.cache import transitions
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import PREEMPTED, initial_state
from hybrid_kv.cache.transitions import Outcome
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.plan import plan_step
from hybrid_kv.schedule import pieces, rounds
from hybrid_kv.schedule.programs import compiled
from hybrid_kv.schedule.stepper import Stepper
from tests.cache.content_model import assert_same

SPECS = [GroupSpec("mla", "mla", 8), GroupSpec("kda", "recurrent", 8)]
# Requests, tables and pools of sizes that nothing else has.
CONFIG = CacheConfig(resolve(SPECS), (347, 213), (0, 1), max_requests=5, max_context=1_016, token_budget=77)
OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
NO_OUTCOME = Outcome(np.zeros(5, np.int32), np.zeros(5, bool), np.zeros((5, 1, 4), np.uint32))


def jitted(step, consumes, splits=False):
    function = pieces.in_pieces(step) if splits else pieces.in_one_piece(step, consumes)
    return jax.jit(function, compiler_options=OPTIONS)


def test_this_compiler_makes_single_kernels():
    assert pieces.work(*OPTIONS.items())


@pytest.mark.parametrize("consumes", [False, True])
def test_a_kernel_does_with_arrays_without_elements_and_arguments_that_nothing_depends_on(consumes):
    def step(state, unused, flags):
        values, empty, counts = state
        rounds = jax.lax.fori_loop(0, counts[0], lambda n, v: v.at[v[n] % 8].add(n), values)
        return (rounds, empty, counts + flags.any()), empty[:, :1], flags

    state = jnp.arange(8, dtype=jnp.int32), jnp.zeros((0, 3), jnp.uint32), jnp.array([5], jnp.int32)
    given = state, jnp.ones((4,), jnp.float32), jnp.array([True, False])
    got, wanted = jitted(step, consumes)(*given), step(*given)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_pieces_of_a_program_do_what_their_functions_do():
    @pieces.piece
    def add(config, state, amount):
        return state._replace(counters=state.counters + amount), state.counters[0] > config

    @pieces.reading_piece
    def read(config, state):
        return {"sum": state.counters.sum() + config}

    def step(state, amount):
        found = read(2, state)
        state, large = add(3, state, found["sum"] + amount)
        return state, large

    state = initial_state(CONFIG)
    got, wanted = jitted(step, True, splits=True)(state, jnp.int32(4)), step(state, jnp.int32(4))
    assert_same(got[0], wanted[0])
    assert bool(got[1]) == bool(wanted[1])
    text = jitted(step, True, splits=True).lower(state, jnp.int32(4)).compile().as_text()
    assert text.count('xla_cpu_small_call="true"') >= 2


@pytest.mark.parametrize("name", ["plan", "schedule_steady", "commit_steady", "commit_rows", "end_rows"])
def test_no_program_of_a_step_copies_an_array_of_the_state(name):
    state = initial_state(CONFIG)
    calls = dict(zip(NAMES, Stepper(CONFIG).calls(state, NO_OUTCOME), strict=True))
    program, given = calls[name]
    text = program.lower(*given).compile().as_text()
    large = {part.shape for name, part in state._asdict().items() if name not in ("pools", "counters", "policy", "log")}
    copies = [tuple(map(int, shape.split(","))) for shape in re.findall(r" = \w+\[([\d,]+)\]\S* copy\(", text)]
    assert not [shape for shape in copies if shape in large]


NAMES = ("plan", "end_rows", "withdraw", "clear", "commit_rows", "schedule_steady", "commit_steady")


def test_rounds_plan_what_the_whole_transition_plans_also_where_somebody_is_preempted():
    config = CacheConfig(
        resolve(SPECS), (16, 16), (0, 1), max_requests=3, max_context=96, token_budget=24, whole_prompts=False
    )
    stepper = Stepper(config, consumes=False)
    plan = compiled(plan_step, config, consumes=False, kernels="many")
    arrive = compiled(transitions.arrive, config, consumes=False)
    ours = theirs = initial_state(config)
    rng, cleared = np.random.default_rng(3), []
    clear = stepper._clear
    stepper._clear = lambda *given: cleared.append(1) or clear(*given)
    for length in (40, 44, 36):
        keys = rng.integers(1, 1 << 32, (config.units, 4), dtype=np.uint32)
        ours, theirs = (arrive(state, np.int32(length), np.int32(0), keys)[0] for state in (ours, theirs))
    for _ in range(60):
        ours, planned = stepper.schedule(ours)
        theirs, spelled = plan(theirs)
        assert_same(ours, theirs)
        assert planned == bool((spelled.length > 0).any())
        keys = rng.integers(1, 1 << 32, (3, 1, 4), dtype=np.uint32)
        outcome = Outcome(np.ones(3, np.int32), np.zeros(3, bool), keys)
        ours = theirs = stepper.commit(ours, outcome)
    assert cleared and int(theirs.counters[PREEMPTED]) > 0


def test_the_note_between_rounds_holds_all_of_a_turn():
    rng = np.random.default_rng(0)
    turns = rounds._read(CONFIG, jnp.asarray(rng.integers(0, 2, rounds.blank(CONFIG).shape), jnp.int32))
    turns = turns._replace(cached=jnp.asarray(rng.random(5), jnp.float32), rows=jnp.int32(7))
    again = rounds._read(CONFIG, rounds._write(jnp.zeros((5,), jnp.int32), turns))
    for one, other in zip(turns, again, strict=True):
        np.testing.assert_array_equal(one, other)
