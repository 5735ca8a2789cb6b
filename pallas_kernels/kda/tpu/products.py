"""Products of fp32 rows with a state on the MXU, by exact splitting into bf16 parts.

A state enters the MXU as weights, and pushing weights is what costs; rows are nearly free. So each part of a state is
pushed once and meets all parts of the rows in one product.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda.tpu.token_inputs import Token


def split(x: jax.Array, parts: int) -> list[jax.Array]:
    """fp32 as a sum of `parts` bf16 arrays, each with the leading bits of what is left; three are exact."""
    pieces = []
    for _ in range(parts - 1):
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        piece = lax.bitcast_convert_type(bits, jnp.float32)
        pieces.append(piece)
        x = x - piece
    return [*pieces, x]


def row_parts(rows: list[jax.Array], parts: int) -> jax.Array:
    """Left operand of `times_state`: part after part, in each all of `rows` [8, K], one under another; bf16."""
    pieces = [split(x, parts) for x in rows]
    return jnp.concatenate([piece[i] for i in range(parts) for piece in pieces], axis=0).astype(jnp.bfloat16)


def times_state(left: jax.Array, state: jax.Array, rows: int, parts: int) -> jax.Array:
    """Product [rows, V] in fp32 of rows given by `row_parts` with a state [K, V], fp32 or bf16.

    Of an fp32 state the products of parts that together lie behind the last bit kept are left out.
    """
    pieces = [state] if state.dtype == jnp.bfloat16 else split(state, parts)
    total = jnp.zeros((rows, state.shape[1]), jnp.float32)
    for i, piece in enumerate(pieces):
        used = rows * (parts - i)
        product = jnp.dot(left[:used], piece.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        # Smallest first, so that nothing is lost that the sum could hold.
        folded = [product[rows * j : rows * (j + 1)] for j in reversed(range(parts - i))]
        part = folded[0]
        for x in folded[1:]:
            part = part + x
        total = part if i == 0 else total + part
    return total


class ReadProducts:
    """S^T (d k) and S^T (d q) of the heads of a program, one head at a time.

    Rows of eight heads, one tile, go through the MXU against the state of each of them, and the row of that head is
    kept: seven in eight are wasted, but taking single rows apart would cost more than the MXU time, which pushes hide.
    """

    def __init__(self, x: Token, parts: int) -> None:
        self.parts = parts
        self.heads = x.k.shape[0]
        self.left = []
        for first in range(0, self.heads, 8):
            tile = [a[first : first + 8] for a in (x.decay * x.k, x.decay * x.q)]
            spare = 8 - tile[0].shape[0]
            if spare:
                tile = [jnp.concatenate([a, jnp.zeros((spare, a.shape[1]), a.dtype)], axis=0) for a in tile]
            self.left.append(row_parts(tile, parts))
        zero = jnp.zeros((8, x.k.shape[1]), jnp.float32)
        self.sums = [[zero, zero] for _ in self.left]

    def visit(self, h: int, state: jax.Array) -> None:
        """Takes the products of head h, whose state is [K, V]."""
        tile, place = divmod(h, 8)
        both = times_state(self.left[tile], state, 16, self.parts)
        mine = lax.broadcasted_iota(jnp.int32, (8, state.shape[1]), 0) == place
        self.sums[tile] = [jnp.where(mine, both[8 * i : 8 * i + 8], self.sums[tile][i]) for i in range(2)]

    def results(self) -> tuple[jax.Array, jax.Array]:
        """Both products, [H, V] fp32, after all heads were visited."""
        p, r = (jnp.concatenate(list(a), axis=0)[: self.heads] for a in zip(*self.sums, strict=True))
        return p, r
