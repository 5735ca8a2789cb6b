"""When expanding the context is cheaper than absorbing the projections into the queries."""

from typing import Any


def expansion_pays(new: Any, context: Any, *, latent: int = 512, nope: int = 128, value: int = 128) -> Any:
    """Whether the expanded form needs fewer multiplications for a row of `new` tokens behind `context` cached ones.

    Both may be arrays, of rows; of floats where pairs exceed the integers.

    A head and context row take L (D + V) to expand, once for all queries that share it. A pair of query and key takes
    D + P + V expanded and 2 L + P absorbed; the absorbed form also takes L (D + V) a query for W_UK and W_UV:

        expanded  L (D + V) (context + new) + pairs (D + P + V)
        absorbed  L (D + V) new             + pairs (2 L + P)       pairs = new context + new (new + 1) / 2

    So it pays if pairs (2 L - D - V) > L (D + V) context: for L = 512, D = V = 128 if 768 pairs > 131,072 context. A
    long context meets that from 171 new tokens on, whatever the number of heads; one that is as long as the new tokens
    from 114; from nothing it always pays.

    Both forms are taken to run equally near their limits. On TPU they don't quite: see docs/14-mla-prefill.md.
    """
    pairs = new * context + new * (new + 1) // 2
    return pairs * (2 * latent - nope - value) > latent * (nope + value) * context
