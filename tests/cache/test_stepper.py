"""The stepper takes the small programs where it can, and nothing comes out differently for it."""

import numpy as np

from hybrid_kv.cache import transitions
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import PLANNED, initial_state
from hybrid_kv.cache.transitions import Outcome
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.schedule.programs import compiled
from hybrid_kv.schedule.step import schedule
from hybrid_kv.schedule.stepper import Stepper
from tests.cache.content_model import assert_same

SPECS = [GroupSpec("mla", "mla", 8), GroupSpec("kda", "recurrent", 8), GroupSpec("kda2", "recurrent", 8)]
CONFIG = CacheConfig(resolve(SPECS), (60, 30, 30), (0, 1, 2), max_requests=4, max_context=96, token_budget=32)


def test_every_step_comes_out_as_by_the_whole_programs_and_decodes_take_the_small_ones(monkeypatch):
    steady = []
    stepper = Stepper(CONFIG)
    small = stepper._commit_steady
    monkeypatch.setattr(stepper, "_commit_steady", lambda *given: steady.append(1) or small(*given))
    plan, commit, withdraw = (
        compiled(step, CONFIG, consumes=False) for step in (schedule, transitions.commit, transitions.withdraw)
    )
    arrive, abort = (compiled(step, CONFIG, consumes=False) for step in (transitions.arrive, transitions.abort))
    ours = theirs = initial_state(CONFIG)
    rng = np.random.default_rng(0)
    for nth in range(30):
        if nth in (0, 1, 9):
            keys = rng.integers(1, 1 << 32, (CONFIG.units, 4), dtype=np.uint32)
            ours, theirs = (arrive(state, np.int32(20 + nth), np.int32(0), keys)[0] for state in (ours, theirs))
        if nth == 20:
            ours, theirs = stepper.abort(ours, 0), abort(theirs, np.int32(0))
        before = int(theirs.counters[PLANNED])
        ours, planned = stepper.schedule(ours)
        theirs = plan(theirs)
        assert_same(ours, theirs)
        assert planned == (int(theirs.counters[PLANNED]) > before)
        if nth in (5, 14):
            ours, theirs = stepper.withdraw(ours), withdraw(theirs)
            continue
        keys = rng.integers(1, 1 << 32, (4, 1, 4), dtype=np.uint32)
        outcome = Outcome(np.ones(4, np.int32), np.array([False, nth == 17, False, False]), keys)
        ours, theirs = stepper.commit(ours, outcome), commit(theirs, outcome)
        assert_same(ours, theirs)
    assert len(steady) >= 10
