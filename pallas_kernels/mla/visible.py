"""Which keys a query sees, and how its scores are bent."""

from typing import NamedTuple

import jax.numpy as jnp
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

    def capped(self, score: Float[Array, "..."]) -> Float[Array, "..."]:
        """Scores after the cap."""
        return score if self.soft_cap is None else self.soft_cap * jnp.tanh(score / self.soft_cap)


def visible(causal: bool, window: int | None, soft_cap: float | None) -> Visible:
    """The rules, checked.

    Raises:
      ValueError: a window without positions or a cap that is no positive number.
    """
    if window is not None and window < 1:
        raise ValueError(f"window: got {window}; it counts positions up to the token's own, so it is at least 1")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"soft_cap: got {soft_cap}; it must be positive and finite, or None")
    return Visible(causal, window, soft_cap)
