"""The scheduler's side of an engine: the cache state and its compiled transitions on the host CPU.

Every transition consumes the state it is given and keeps the one it returns, so nothing is copied.
"""

from __future__ import annotations

import jax
import numpy as np

from hybrid_kv.cache import transitions
from hybrid_kv.cache.check import check
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import FREE_BLOCKS, PLACES, REF, WAITING, initial_state, layout
from hybrid_kv.cache.transitions import Outcome
from hybrid_kv.hashing import KEY_WORDS
from hybrid_kv.plan import StepPlan, spell_out
from hybrid_kv.schedule.programs import compiled
from hybrid_kv.schedule.stepper import Stepper

_TRANSITIONS = ("arrive", "reset", "preempt_running")


class Controller:
    """Holds the state of one cache; methods are the transitions of `cache.transitions`."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.device = jax.local_devices(backend="cpu")[0]
        self.state = jax.device_put(initial_state(config), self.device)
        self._stepper = Stepper(config)
        self._jit = {
            name: compiled(getattr(transitions, name), config, seldom=name != "arrive") for name in _TRANSITIONS
        }
        self._spell_out = compiled(spell_out, config, consumes=False, kernels="many")

    def arrive(self, prompt_length: int, flags: int, keys: np.ndarray) -> None:
        """Queue a request in the lowest free slot; the caller knows that one is free."""
        self.state, _ = self._jit["arrive"](self.state, np.int32(prompt_length), np.int32(flags), keys)

    def plan(self) -> StepPlan:
        """Schedule a step; the plan is on the host."""
        self.state, fresh = self._stepper.schedule(self.state)
        return jax.device_get(self._spell_out(self.state, np.bool_(fresh)))

    def commit(self, outcome: Outcome) -> None:
        self.state = self._stepper.commit(self.state, outcome)

    def withdraw(self) -> None:
        self.state = self._stepper.withdraw(self.state)

    def abort(self, slot: int) -> None:
        self.state = self._stepper.abort(self.state, slot)

    @property
    def running(self) -> bool:
        """Whether a request holds blocks, so that a `reset` is refused."""
        return bool((np.asarray(self.state.requests)[layout(self.config).STATUS] > WAITING).any())

    def reset(self, preempt_running: bool = False) -> bool:
        """Forget all cached content; False, and nothing forgotten, while requests run, unless they are to wait again.

        Preempting them is compiled when it is first asked for.
        """
        if preempt_running:
            self.state = self._jit["preempt_running"](self.state)
        self.state, done = self._jit["reset"](self.state)
        return bool(done)

    def no_outcome(self) -> Outcome:
        """An outcome in which nothing was produced and nobody finished."""
        slots = self.config.max_requests
        keys = np.zeros((slots, transitions.keys_per_append(self.config), KEY_WORDS), np.uint32)
        return Outcome(np.zeros(slots, np.int32), np.zeros(slots, bool), keys)

    def warm_up(self) -> StepPlan:
        """Compile every transition but `preempt_running` on a spare state; returns an empty plan."""
        spare = Controller(self.config)
        spare.state = spare._stepper.warm_up(spare.state, spare.no_outcome())
        plan = spare.plan()
        spare.arrive(1, 0, np.zeros((self.config.units, KEY_WORDS), np.uint32))
        spare.abort(0)
        spare.reset()
        return plan

    def pools(self) -> dict[str, tuple[int, int, int, int]]:
        """Per pool: blocks in use, cached, free without content, in all (null block left out)."""
        blocks, pools = np.asarray(self.state.blocks), np.asarray(self.state.pools)
        counts = {}
        for pool, (first, count) in enumerate(zip(self.config.pool_offset, self.config.pool_blocks, strict=True)):
            rows = blocks[first + 1 : first + count]
            cached = int(((rows[:, REF] == 0) & (rows[:, PLACES:] > 0).any(1)).sum())
            free = int(pools[pool, FREE_BLOCKS])
            counts[self.config.pool_name(pool)] = (count - 1 - free, cached, free - cached, count - 1)
        return counts

    def check(self) -> list[str]:
        return check(self.config, self.state)
