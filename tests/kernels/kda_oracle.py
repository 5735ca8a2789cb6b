"""Token-by-token KDA in float64 NumPy, written from the recurrence, and a caller for ragged rows."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import kda_prefill
from pallas_kernels.rows import RaggedRows

prefill = jax.jit(kda_prefill, static_argnames=("lower_bound", "chunk", "implementation"))


def recurrence(x: dict, state: np.ndarray, lower_bound: float | None):
    """Outputs [T, H, V] and the state after every token [T + 1, H, K, V]."""
    q, k, v, raw_g, raw_beta = (np.asarray(x[n], np.float64) for n in ("q", "k", "v", "raw_g", "raw_beta"))
    z = raw_g + np.asarray(x["dt_bias"], np.float64)
    a = np.exp(np.asarray(x["A_log"], np.float64))[:, None]
    if lower_bound is None:
        g = -a * np.logaddexp(z, 0)
    else:
        g = lower_bound / (1 + np.exp(np.minimum(-a * z, 700.0)))
    beta = 1 / (1 + np.exp(-raw_beta))
    q = q / np.sqrt(np.sum(q * q, -1, keepdims=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k / np.sqrt(np.sum(k * k, -1, keepdims=True) + 1e-6)
    state = np.asarray(state, np.float64)
    outs, states = [], [state]
    for t in range(q.shape[0]):
        state = np.exp(g[t])[..., None] * state
        u = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * u[:, None, :]
        outs.append(np.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    return np.array(outs).reshape(v.shape), np.array(states)


def random_inputs(seed: int, tokens: int, heads: int = 2, key: int = 32, value: int = 32) -> dict:
    """Raw inputs of `tokens` packed tokens with a mix of weak and strong gates."""
    rng = np.random.default_rng(seed)
    f = np.float32
    return {
        "q": rng.normal(size=(tokens, heads, key)).astype(f),
        "k": rng.normal(size=(tokens, heads, key)).astype(f),
        "v": rng.normal(size=(tokens, heads, value)).astype(f),
        "raw_g": (2 * rng.normal(size=(tokens, heads, key))).astype(f),
        "raw_beta": rng.normal(size=(tokens, heads)).astype(f),
        "A_log": rng.normal(size=heads).astype(f),
        "dt_bias": rng.normal(size=(heads, key)).astype(f),
    }


def rows_of(offset, length, start) -> RaggedRows:
    return RaggedRows(*(jnp.asarray(a, jnp.int32) for a in (offset, length, start)))


def run_prefill(x: dict, states, rows: RaggedRows, read, write, emit=None, *, lower_bound, form, layer=0):
    """`kda_prefill` on a dict of inputs; emit = (positions [R, E], slots [R, E]).

    Everything is padded to one size (256 tokens, 8 rows, 12 emissions, 2 layers, 40 slots; padding is NaN)
    so that few programs are compiled.
    """
    count, layers, slots = x["q"].shape[0], states.shape[0], states.shape[1]

    def grow(a, *sizes, fill=0):
        return np.pad(a, [(0, n - m) for n, m in zip(sizes, np.shape(a), strict=False)]
                      + [(0, 0)] * (np.ndim(a) - len(sizes)), constant_values=fill)  # fmt: skip

    def i32(a, *sizes):
        return jnp.asarray(grow(np.asarray(a), *sizes), jnp.int32)

    emit = np.zeros((2, len(read), 0)) if emit is None else emit
    o, states = prefill(
        *(jnp.asarray(grow(x[n], 256, fill=np.nan)) for n in ("q", "k", "v", "raw_g", "raw_beta")),
        jnp.asarray(x["A_log"]), jnp.asarray(x["dt_bias"]),
        jnp.asarray(grow(states, 2, 40, fill=np.nan)), jnp.int32(layer), RaggedRows(*(i32(a, 8) for a in rows)),
        i32(read, 8), i32(write, 8), i32(emit[0], 8, 12), i32(emit[1], 8, 12), lower_bound=lower_bound,
        implementation=form,
    )  # fmt: skip
    return o[:count], states[:layers, :slots]
