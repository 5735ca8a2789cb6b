"""The recurrence of KDA with the state in registers: one program for a head of a row, on Hopper.

A program is one warpgroup of 128 threads. Thread v holds column v of the state [K, V], one register a row, so

    S   = diag(exp g_t) S       K products with a number that all threads share
    S^T k_t                     K products and sums inside a thread
    S   = S + k_t u_t^T, S^T q  the same

and nothing is exchanged between threads: exp g, k and q of a token come from shared memory, v from the thread's own
load, which is one token ahead. The state is read once and written once, each of its rows by 128 threads side by side.
Any number of tokens goes through the same loop: decode, verify and commit are rows of few tokens, prefill rows of
many, and a state is saved wherever one is asked for, at the price of the store.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.kda.inputs import Inputs

# Columns of the state, one a thread of the warpgroup.
WIDTH = 128
# Sums over K that go on side by side: one alone would wait for each of its additions.
_SUMS = 4


class Replayed(NamedTuple):
    """Recorded tokens that are put into the state first.

    tokens: [R] of them. decay, k, u: [R, Q, H, ...]. emit_after: [R] tokens after which the state is saved as well.
    emit_slot: [R] where, 0 for nowhere. write: [R] slot of the state after all of them, 0 for none.
    """

    tokens: Int32[Array, "R"]
    decay: Float[Array, "R Q H K"]
    k: Float[Array, "R Q H K"]
    u: Float[Array, "R Q H V"]
    emit_after: Int32[Array, "R"]
    emit_slot: Int32[Array, "R"]
    write: Int32[Array, "R"]


class Run(NamedTuple):
    """Tokens that are run then.

    offset, length: [R] on the packed axis. inputs: of `prepare`, but g is the decay itself. write: [R] slot of the
    state after all of them, 0 for none. emit_after: [R, E] tokens after which it is saved as well. emit_slot: [R, E]
    where.
    """

    offset: Int32[Array, "R"]
    length: Int32[Array, "R"]
    inputs: Inputs
    write: Int32[Array, "R"]
    emit_after: Int32[Array, "R E"]
    emit_slot: Int32[Array, "R E"]


def sweep(
    states: Float[Array, "layers S H K V"],
    layer: Int32[Array, ""] | int,
    read: Int32[Array, "R"],
    replayed: Replayed | None,
    run: Run | None,
    out: Float[Array, "T H V"],
    record: int = 0,
    writes: bool = True,
    interpret: object = None,
) -> tuple[Float[Array, "layers S H K V"], Float[Array, "T H V"], Float[Array, "R Q H V"]]:
    """Take the states of `read` (0: zeros) through recorded tokens, then through new ones.

    out: what outputs of tokens are written into, without elements if there are no tokens. record: Q, to return the
    corrections u of so many tokens a row. writes: whether any state is written; else the pool is left alone whatever
    slots are named.

    Returns:
      The pool, `out` and the corrections.
    """
    rows, heads, depth = read.shape[0], states.shape[2], states.shape[3]
    run = run if out.size else None  # no tokens at all
    here = jnp.zeros((rows,), bool)
    if replayed is not None:
        here |= (replayed.tokens > 0) | (replayed.write != 0)
    if run is not None:
        here |= run.length > 0
    numbers = [jnp.full((rows,), layer, jnp.int32), read, here.astype(jnp.int32)]
    inputs: list[jax.Array] = []
    if replayed is not None:
        numbers += [replayed.tokens, replayed.emit_after, replayed.emit_slot, replayed.write]
        inputs += [replayed.decay, replayed.k, replayed.u]
    emissions = 0
    if run is not None:
        emissions = run.emit_slot.shape[1]
        numbers += [run.offset, run.length, run.write]
        numbers += [*run.emit_after.T, *run.emit_slot.T]
        inputs += [run.inputs.g, run.inputs.k, run.inputs.q, run.inputs.v, run.inputs.beta]
    # What the kernel writes into. A pool that it only reads is no such thing: XLA would copy it first.
    blank = jnp.zeros((rows, record, heads, WIDTH), jnp.float32)
    written = ({"pool": states} if writes else {}) | {"out": out, "corrections": blank}
    refs = {name: jax.new_ref(each, memory_space=plgpu.GMEM) for name, each in written.items() if each.size}

    def kernel(numbers, pool, *each):
        given, own, vectors = each[: len(inputs)], dict(zip(refs, each[len(inputs) : -1], strict=True)), each[-1]
        pool = own.get("pool", pool)
        row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        mine = iter(range(numbers.shape[0]))

        def number() -> jax.Array:
            return numbers[next(mine), row]

        where, start, here = number(), number(), number()

        def columns(ref, *at):
            return ref[at].astype(jnp.float32)

        def save(slot, wanted, state):
            if not writes:
                return

            @pl.when(wanted & (slot != 0))
            def _():
                for k in range(depth):
                    pool[where, slot, head, k] = state[k].astype(pool.dtype)

        def share(place, *each):
            """Lay vectors [K] of a token out where all threads can read them."""
            for nth, vector in enumerate(each):
                vectors[place, nth] = vector
            plgpu.commit_smem()

        def replay(state, at):
            count, after, slot, write = number(), number(), number(), number()
            decay, k, u = at

            def one(t, state):
                share(t % 2, columns(decay, row, t, head), columns(k, row, t, head))
                new = columns(u, row, t, head)
                state = tuple(
                    vectors[t % 2, 0, nth] * each + vectors[t % 2, 1, nth] * new for nth, each in enumerate(state)
                )
                save(slot, t + 1 == after, state)
                return state

            state = jax.lax.fori_loop(0, count, one, state)
            plgpu.commit_smem()  # the vectors have been used; whatever comes begins with the first place again
            save(write, (count > 0) | (write != start), state)
            # What follows starts from what a later step would read.
            return tuple(each.astype(pool.dtype).astype(jnp.float32) for each in state)

        def go_on(state, at):
            offset, count, write = number(), number(), number()
            after = [number() for _ in range(emissions)]
            slots = [number() for _ in range(emissions)]
            *vectors_of, v, beta = at

            def load(t):
                # A row without tokens may have any offset.
                t = jnp.where(count > 0, jnp.minimum(t, offset + count - 1), 0)
                return *(columns(each, t, head) for each in vectors_of), columns(v, t, head), beta[t, head]

            def one(t, carry):
                state, (decay, k, q, v, beta) = carry
                share(t % 2, decay, k, q)
                ahead = load(offset + t + 1)
                decayed, seen = [], [jnp.zeros_like(v)] * _SUMS
                for nth, each in enumerate(state):
                    decayed.append(vectors[t % 2, 0, nth] * each)
                    seen[nth % _SUMS] += vectors[t % 2, 1, nth] * decayed[-1]
                u = beta * (v - sum(seen[1:], seen[0]))
                state, o = [], [jnp.zeros_like(v)] * _SUMS
                for nth, each in enumerate(decayed):
                    state.append(each + vectors[t % 2, 1, nth] * u)
                    o[nth % _SUMS] += vectors[t % 2, 2, nth] * state[-1]
                own["out"][offset + t, head] = sum(o[1:], o[0]).astype(out.dtype)
                if record:
                    own["corrections"][row, t, head] = u
                for position, slot in zip(after, slots, strict=True):
                    save(slot, t + 1 == position, state)
                return tuple(state), ahead

            state, _ = jax.lax.fori_loop(0, count, one, (state, load(offset)))
            save(write, True, state)
            return state

        def take() -> tuple[jax.Array, ...]:
            held = (columns(pool, where, start, head, k) for k in range(depth))
            return tuple(jnp.where(start == 0, jnp.zeros_like(each), each) for each in held)

        @pl.when(here != 0)
        def _():
            state, rest = take(), given
            if replayed is not None:
                state, rest = replay(state, rest[:3]), rest[3:]
            if run is not None:
                go_on(state, rest)

    run_kernel = pl.kernel(
        kernel,
        out_type=(),
        mesh=plgpu.Mesh(grid=(rows, heads), grid_names=("row", "head")),
        scratch_types=[plgpu.SMEM((2, 3, depth), jnp.float32)],
        # `share` has the one barrier there has to be: threads meet only in the vectors of a token, which have two
        # places, and whoever writes to one has passed the barrier of the other, after the last use of this one.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret or False,
    )
    # The name under which the call is found in a compiled module.
    with jax.named_scope("kda_sweep"):
        read_only = jnp.zeros((), states.dtype) if writes else states
        run_kernel(jnp.stack(numbers), read_only, *inputs, *refs.values())
    ends = {name: jax.freeze(ref) for name, ref in refs.items()}
    return ends.get("pool", states), ends.get("out", out), ends.get("corrections", blank)
