"""Which keys a query sees, and how its scores are bent."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class Visible(NamedTuple):
    """Static rules of an attention; made by `visible`.

    Attributes:
      causal: a token sees itself and what lies before it, else every position of its row (a block of drafts).
      window: and of those only positions p > own - window; None for all.
      soft_cap: c of s -> c tanh(s / c); None leaves scores as they are.
    """

    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None

    def capped(self, score: Float[Array, "..."], unit: float = 1.0) -> Float[Array, "..."]:
        """Scores after the cap; `unit` is that of the scores, such as log2 e for exponents of base 2."""
        if self.soft_cap is None:
            return score
        cap = self.soft_cap * unit
        return cap * jnp.tanh(score / cap)


def visible(causal: bool, window: int | None, soft_cap: float | None) -> Visible:
    """The rules, checked.

    Raises:
      ValueError: a window without positions or a cap that is no positive number.
    """
    if window is not None and not (isinstance(window, int | np.integer) and 1 <= window < 1 << 31):
        raise ValueError(
            f"window: got {window}; it is a static whole number of positions up to the token's own, at least 1"
        )
    if soft_cap is not None and not (isinstance(soft_cap, int | float | np.floating) and 0 < soft_cap < float("inf")):
        raise ValueError(f"soft_cap: got {soft_cap}; it must be a static number, positive and finite, or None")
    return Visible(causal, window, soft_cap)
