"""What an implementation of the attention offers to the driver, and what passes between them."""

from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.mla.expanded.plan import Plan, Tiling
from pallas_kernels.mla.visible import Visible


class Context(NamedTuple):
    """Expanded keys and values of W workspace rows.

    Attributes:
      nope: [W, N D] keys, heads side by side; rope: [W, P] position key, shared by the heads. Both are scaled so that
        their product with a query is the exponent of a weight, to base 2.
      value: [N V, W], a column for each row: as the product of weights and values wants it.
      at: [W] positions, UNSEEN for rows that nothing sees.
    """

    nope: Float[Array, "W ND"]
    rope: Float[Array, "W P"]
    value: Float[Array, "NV W"]
    at: Int32[Array, "W"]


class Filled(NamedTuple):
    """Gathered rows of the workspace.

    Attributes:
      rows: [W, L + P].
      used: how many are filled; what comes behind them means nothing.
      chunk: rows to expand at a time where that is not up to a kernel; divides W.
    """

    rows: Float[Array, "W LP"]
    used: Int32[Array, ""]
    chunk: int


class Attention(Protocol):
    """A module with these functions.

    Attributes:
      QUICK: whether steps may keep a reference that scores might outgrow; `overflowed` then tells and the driver begins
        again.
      HEADS: it takes multiples of so many; the driver adds heads of zeros.
    """

    QUICK: bool
    HEADS: int

    def tiling(self, tokens: int) -> Tiling: ...

    def queries(self, nope: Any, rope: Any, tiling: Tiling) -> Any: ...

    def empty(self, query: Any, value: int) -> Any: ...

    def expand(
        self, filled: Filled, w_uk: Any, w_uv: Any, key_factor: Any, value_factor: Any
    ) -> tuple[Float[Array, "W ND"], Float[Array, "W P"], Float[Array, "NV W"]]: ...

    def attend(self, state: Any, query: Any, context: Context, plan: Plan, tiling: Tiling, sees: Visible) -> Any: ...

    def overflowed(self, state: Any, valid: Bool[Array, "T"]) -> Bool[Array, ""]: ...

    def finish(self, state: Any, count: int) -> tuple[Float[Array, "T NV"], Float[Array, "T N"]]: ...
