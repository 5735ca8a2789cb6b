"""The event log inside the state: a ring of what was filed and what was lost, for `cache.events` to read.

A state without room for it (`CacheConfig.events` 0) has no log, and programs of it contain nothing of this module:
callers ask `is_kept` while a program is traced.

What a step in flight has announced is not told: its content is not written yet. A commit tells of it, before
anything else is filed; a withdrawal takes the keys back in silence. So at any moment a key has been told if and only if
it is not `index.pending`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_kv.cache.ranks import ranks
from hybrid_kv.cache.state import TOLD, CacheState
from hybrid_kv.hashing import KEY_WORDS

STORED, REMOVED, CLEARED = 1, 2, 3
# Columns of `CacheState.log`. No parent: zeros.
KIND, OF, BLOCK, UNIT, KEY, PARENT = 0, 1, 2, 3, 4, 4 + KEY_WORDS


def is_kept(state: CacheState) -> bool:
    """Whether there is a log; known when a program is traced."""
    return state.log.shape[0] > 0


def stored(
    state: CacheState, group: jax.Array | int, key: jax.Array, parent: jax.Array, block: jax.Array, unit: jax.Array,
    ok: jax.Array,
) -> CacheState:  # fmt: skip
    """Blocks are found under keys from now on, the unit-th of each, if `ok`.

    key, parent: u32[..., 4]; block, unit, ok: [...].
    """
    return _append(state, STORED, group, block, unit, key, parent, ok)


def removed(
    state: CacheState, group: jax.Array, key: jax.Array, block: jax.Array, unit: jax.Array, ok: jax.Array
) -> CacheState:
    """Blocks are found under keys no more, the unit-th of each, if `ok`. key: u32[..., 4]; the others [...]."""
    return _append(state, REMOVED, group, block, unit, key, jnp.zeros((KEY_WORDS,), jnp.uint32), ok)


def cleared(state: CacheState) -> CacheState:
    """Everything was forgotten."""
    zero, none = jnp.zeros((), jnp.uint32), jnp.zeros((KEY_WORDS,), jnp.uint32)
    return _append(state, CLEARED, zero, zero, zero, none, none, jnp.ones((), bool))


def _append(state: CacheState, kind: int, group, block, unit, key, parent, ok: jax.Array) -> CacheState:
    def spread(part: jax.Array | int, *more: int) -> jax.Array:
        part = jnp.asarray(part).astype(jnp.uint32)
        return jnp.broadcast_to(part, (*ok.shape, *more)).reshape(-1, *(more or (1,)))

    def write(_, carry):
        log, told = carry
        head = [spread(kind), spread(group), spread(block), spread(unit)]
        rows = jnp.concatenate([*head, spread(key, KEY_WORDS), spread(parent, KEY_WORDS)], -1)
        # The number of entries is a power of two, so the ring goes on where the counter wraps.
        at = (told + ranks(new)) & (log.shape[0] - 1)
        log = log.at[jnp.where(new, at, log.shape[0])].set(rows, mode="drop")
        return log, told + new.sum(dtype=jnp.int32)

    # Mostly there is nothing to tell of many rows, and writing none takes as long as writing all.
    new = ok.reshape(-1)
    log, told = jax.lax.fori_loop(0, new.any().astype(jnp.int32), write, (state.log, state.counters[TOLD]))
    return state._replace(log=log, counters=state.counters.at[TOLD].set(told))
