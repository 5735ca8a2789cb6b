"""Where a budget of M states a prompt serves most: positions chosen from the depths at which requests part.

A histogram counts admissions by overlap depth: how many tokens of the prompt others had had before. If every prompt
keeps states at positions p_1 < ... < p_M, one that overlaps by d tokens is served the deepest p_j <= d of them.
`choose` finds the positions that serve most,

    maximise  sum over depths d of weight(d) x max(p_j <= d, or 0),

by dynamic programming over bins, exactly up to the rounding of float32. All functions are pure, jit-able and vmap-able;
the bins are static. `Learner` is the host's side of it: it watches admissions and sets the positions of a running core.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import PLANNED, RUNNING, CacheState, layout, with_positions
from hybrid_kv.errors import UserError

# On the host or on a device.
Values = jax.Array | np.ndarray
# Bins are single hit units up to 2**FINE of them, from there on 2**(FINE - 1) bins for each doubling.
FINE = 7


@dataclasses.dataclass(frozen=True)
class Bins:
    """Depths in tokens, as bins of hit units: hashable, so it can be static.

    unit: tokens between two depths at which a hit can end. deepest: tokens. Bin 0 is what shares less than a unit.
    Every depth up to 128 units has a bin of its own; beyond, a bin is 1 / 64 of its depth wide at most, so contexts of
    1M tokens take 577 bins at units of 64. The first depth of a bin stands for all of it.
    """

    unit: int
    deepest: int

    def __post_init__(self) -> None:
        if self.unit < 1:
            raise UserError("unit", self.unit, "use the hit unit, at least 1 token")
        if not self.unit <= self.deepest < 1 << 30:
            raise UserError("deepest", self.deepest, f"use {self.unit} tokens, one unit, to 2**30 - 1")

    @functools.cached_property
    def count(self) -> int:
        return _bin(self.deepest // self.unit) + 1

    @functools.cached_property
    def floors(self) -> np.ndarray:
        """First depth of every bin in tokens: i32[count], multiples of `unit`, strictly ascending from 0."""
        bins, half = np.arange(self.count), 1 << (FINE - 1)
        shift = np.maximum(bins // half - 1, 0)
        return ((bins - shift * half << shift) * self.unit).astype(np.int32)

    def of(self, depth: Values | int) -> jax.Array:
        """Bin of depths in tokens (i32[...]); depths beyond `deepest` count as `deepest`."""
        depth = jnp.clip(jnp.asarray(depth, jnp.int32), 0, self.deepest)
        return jnp.searchsorted(jnp.asarray(self.floors), depth, side="right").astype(jnp.int32) - 1


def _bin(units: int) -> int:
    shift = max(units.bit_length() - FINE, 0)
    return (shift << (FINE - 1)) + (units >> shift)


def empty(bins: Bins, tenants: int = 1) -> jax.Array:
    """A histogram that has seen nothing: f32[tenants, bins.count]."""
    return jnp.zeros((tenants, bins.count), jnp.float32)


def observe(
    bins: Bins,
    histogram: jax.Array,
    depth: Values | int,
    tenant: jax.Array | int = 0,
    weight: jax.Array | float = 1.0,
) -> jax.Array:
    """Count an admission whose prompt overlaps earlier ones by `depth` tokens: f32[tenants, B]."""
    return histogram.at[tenant, bins.of(depth)].add(weight)


def decay(histogram: jax.Array, keep: jax.Array | float) -> jax.Array:
    """Let what was seen count for `keep` (0 to 1) of itself: f32[..., B]."""
    return histogram * keep


def served(bins: Bins, weights: Values, positions: Values) -> jax.Array:
    """What positions (tokens, i32[M], 0: none) serve: the weighted sum of tokens over a histogram f32[B]."""
    floors = jnp.asarray(bins.floors)
    deepest = jnp.where(positions[None, :] <= floors[:, None], positions[None, :], 0).max(1, initial=0)
    return (weights * deepest).sum()


def choose(bins: Bins, weights: Values, most: int) -> jax.Array:
    """The up to `most` positions that serve most of a histogram f32[B] (each 0 or more): i32[most] tokens, ascending,
    0 behind the last.

    Among equals: the fewest, then the shallowest.

    A position i behind the last one j adds (p_i - p_j) x (weight of all depths from p_i on), whatever stands before j;
    so best[m](i) = max over j < i of best[m - 1](j) + that. Bin 0, no position, is where every choice begins. Takes
    `most` x B x B operations.
    """
    units = jnp.asarray(bins.floors // bins.unit, jnp.float32)
    beyond = jnp.cumsum(jnp.asarray(weights, jnp.float32)[::-1])[::-1]
    gain = jnp.maximum(units[:, None] - units[None, :], 0.0) * beyond[:, None]  # [i, j]
    before = jnp.arange(bins.count)[None, :] < jnp.arange(bins.count)[:, None]
    none = jnp.full((bins.count,), -jnp.inf).at[0].set(0.0)

    def one_more(best, _):
        total = jnp.where(before, best[None, :] + gain, -jnp.inf)
        return total.max(1).at[0].set(0.0), jnp.argmax(total, 1).at[0].set(0)

    best, previous = jax.lax.scan(one_more, none, length=most)

    def back(last, previous):
        return previous[last], last

    _, chosen = jax.lax.scan(back, jnp.argmax(best), previous, reverse=True)
    chosen = jnp.asarray(bins.floors)[chosen]
    return jnp.sort(jnp.where(chosen > 0, chosen, jnp.iinfo(jnp.int32).max)) % jnp.iinfo(jnp.int32).max


def overlaps(config: CacheConfig, state: CacheState) -> np.ndarray:
    """Overlap depths of the requests that the step planned last has admitted for the first time, by request slot:
    i32[R] tokens, -1 for all others. Runs on the host, between planning a step and committing it."""
    fields, rows, planned = layout(config), np.asarray(state.requests), int(state.counters[PLANNED])
    fresh = (rows[fields.STATUS] == RUNNING) & (rows[fields.ADMITTED] == planned) & (planned > 0)
    fresh &= rows[fields.PREEMPTIONS] == 0  # one that resumes overlaps with itself
    return np.where(fresh, np.maximum(rows[fields.HIT], rows[fields.JUNCTION]), -1)


class Learner:
    """Watches the admissions of a core and chooses the positions that would have served most of them.

    every: admissions from one choice to the next. keep: what those before a choice count for after it, 0 to 1. tenants:
    histograms; in a choice every tenant's admissions weigh the same in all if `fair`, else every admission does. The
    configuration's placement says how many positions there is room for. Raises UserError for values out of range.
    """

    def __init__(
        self, config: CacheConfig, every: int = 32, keep: float = 0.9, tenants: int = 1, fair: bool = False
    ) -> None:
        if not config.placement.positions:
            raise UserError("placement.positions", (), "make room for as many as shall be chosen: (0,) * M")
        for field, value in (("every", every), ("tenants", tenants)):
            if value < 1:
                raise UserError(field, value, "use at least 1")
        if not 0 <= keep <= 1:
            raise UserError("keep", keep, "use a share, from 0 to 1")
        self.config, self.every, self.keep, self.fair = config, every, keep, fair
        self.bins = Bins(config.geometry.hit_unit, max(config.max_context, config.geometry.hit_unit))
        self.histogram = empty(self.bins, tenants)
        self.positions: tuple[int, ...] = ()
        self._seen = 0

    def watch(self, state: CacheState, tenants: np.ndarray | None = None) -> CacheState:
        """Look at a state between planning a step and committing it; the state, with other positions if it was time.

        tenants: i32[R] of the request in every slot; None where there is one.
        """
        depths = overlaps(self.config, state)
        for slot in np.flatnonzero(depths >= 0).tolist():
            if self.admitted(int(depths[slot]), 0 if tenants is None else int(tenants[slot])):
                chosen = np.zeros(len(self.config.placement.positions), np.int32)
                chosen[: len(self.positions)] = self.positions
                state = state._replace(policy=with_positions(self.config, state.policy, chosen))
        return state

    def admitted(self, depth: int, tenant: int = 0) -> bool:
        """Count one admission that overlaps by `depth` tokens; whether `positions` were chosen anew."""
        self.histogram = _observe(self.bins, self.histogram, np.int32(depth), np.int32(tenant))
        self._seen += 1
        if self._seen % self.every:
            return False
        weights = self.histogram
        if self.fair:
            weights = weights / jnp.maximum(weights.sum(1, keepdims=True), 1e-30)
        chosen = _choose(self.bins, weights.sum(0), len(self.config.placement.positions))
        self.positions = tuple(position for position in np.asarray(chosen).tolist() if position)
        self.histogram = decay(self.histogram, self.keep)
        return True


_observe = jax.jit(observe, static_argnums=0)
_choose = jax.jit(choose, static_argnums=(0, 2))
