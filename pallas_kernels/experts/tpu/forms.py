"""How the weights of experts lie in HBM, and their products: what `ffn` does not know."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.experts.packed import scale_rows
from pallas_kernels.experts.tpu.unpack import SCALE_INPUTS, WEIGHT, WORD_INPUTS, unpack
from pallas_kernels.experts.weights import ExpertWeights, NativeMatrix, PackedExperts
from pallas_kernels.vmem import array_bytes

# Columns of the hidden layer unpacked at once.
_COLUMNS = 256


@runtime_checkable
class Form(Protocol):
    """Weights of one kind.

    Attributes:
      arrays: the stacks, as the kernel gets them.
      hidden, width: D and F.
    """

    arrays: tuple[jax.Array, ...]
    hidden: int
    width: int

    def widths(self) -> list[int]:
        """Widths a block can have, the best first."""

    def specs(self, width: int) -> list[pl.BlockSpec]:
        """Blocks of `width` columns of the hidden layer; index (tile, block) and the scalars of `ffn.Work`."""

    def scratch(self, width: int) -> list[Any]:
        """Vector memory it needs besides the blocks."""

    def vmem(self, width: int) -> int:
        """Bytes of blocks and scratch."""

    def parts(self, width: int) -> int:
        """Into how many parts a block falls that are done one after another."""

    def part(self, weights: Sequence[Any], scratch: Sequence[Any], part: Any) -> Any:
        """Weights of a part, for the products."""

    def gate_up(self, x: Float[Array, "n D"], found: Any) -> tuple[jax.Array, jax.Array]:
        """x gate^T and x up^T in fp32."""

    def down(self, hidden: Float[Array, "n F"], found: Any) -> jax.Array:
        """hidden down^T in fp32."""


def _block(shape: tuple[int, int], at: Callable[[Any], tuple[Any, Any]]) -> pl.BlockSpec:
    """Part of a stack [layers, E, ...]."""
    return pl.BlockSpec((None, None, *shape), lambda t, f, layer, used, expert: (layer[0], expert[t], *at(f)))


def _product(x: jax.Array, weight: jax.Array, inputs: int) -> jax.Array:
    """x times a weight whose axis `inputs` is summed over."""
    return lax.dot_general(x, weight, (((1,), (inputs,)), ((), ())), preferred_element_type=jnp.float32)


class Plain:
    """Plain weights [out, in], multiplied as they are."""

    def __init__(self, weights: ExpertWeights) -> None:
        self.arrays = tuple(weights)
        self.hidden, self.width = weights.hidden, weights.width

    def widths(self) -> list[int]:
        return [width for width in (512, 256, 128) if self.width % width == 0]

    def specs(self, width: int) -> list[pl.BlockSpec]:
        rows = _block((width, self.hidden), lambda f: (f, 0))
        columns = _block((self.hidden, width), lambda f: (0, f))
        return [rows, rows, columns]

    def scratch(self, width: int) -> list[Any]:
        return []

    def vmem(self, width: int) -> int:
        return 2 * 3 * array_bytes((width, self.hidden), jnp.bfloat16)

    def parts(self, width: int) -> int:
        return 1

    def part(self, weights: Sequence[Any], scratch: Sequence[Any], part: Any) -> Any:
        return weights

    def gate_up(self, x: jax.Array, found: Any) -> tuple[jax.Array, jax.Array]:
        gate, up, _ = found
        return _product(x, gate[...], 1), _product(x, up[...], 1)

    def down(self, hidden: jax.Array, found: Any) -> jax.Array:
        return _product(hidden, found[2][...], 1)


class Packed:
    """MXFP4, unpacked into vector memory part by part; columns of tokens come in the order of `packed.interleaved`."""

    def __init__(self, weights: PackedExperts) -> None:
        self.arrays = tuple(jax.tree.leaves(weights))
        self.hidden, self.width = weights.hidden, weights.width
        self.native = isinstance(weights.gate, NativeMatrix)

    def widths(self) -> list[int]:
        # A block of rows of scales is whole tiles: 8 of 128 inputs.
        return [1024] if self.width % 1024 == 0 else [self.width]

    def specs(self, width: int) -> list[pl.BlockSpec]:
        def across(rows: int) -> pl.BlockSpec:
            return _block((rows, width), lambda f: (0, f))

        d = self.hidden
        into = [across(d // WORD_INPUTS), across(scale_rows(d)), across(1)]
        down = [_block((rows, d), lambda f: (f, 0)) for rows in (width // WORD_INPUTS, scale_rows(width))]
        return [*into, *into, *down, _block((1, d), lambda f: (0, 0))]

    def _columns(self, width: int) -> int:
        return _COLUMNS if width % _COLUMNS == 0 else 128

    def _shapes(self, width: int) -> list[tuple[int, int]]:
        columns = self._columns(width)
        return [(self.hidden, columns), (self.hidden, columns), (columns, self.hidden)]

    def scratch(self, width: int) -> list[Any]:
        return [pltpu.VMEM(shape, WEIGHT) for shape in self._shapes(width)]

    def vmem(self, width: int) -> int:
        d = self.hidden
        one = [(d // WORD_INPUTS, width), (scale_rows(d), width), (1, width)]
        down = [(width // WORD_INPUTS, d), (scale_rows(width), d), (1, d)]
        blocks = sum(array_bytes(shape, jnp.int32) for shape in (*one, *one, *down))
        return 2 * blocks + sum(array_bytes(shape, WEIGHT) for shape in self._shapes(width))

    def parts(self, width: int) -> int:
        return width // self._columns(width)

    def part(self, weights: Sequence[Any], scratch: Sequence[Any], part: Any) -> Any:
        gate, up, down = (weights[i : i + 3] for i in (0, 3, 6))
        size = scratch[0].shape[1]
        at = pl.ds(pl.multiple_of(part * size, size), size)
        unpack(gate[0], gate[1], scratch[0], native=self.native, columns=at)
        unpack(up[0], up[1], scratch[1], native=self.native, columns=at)
        unpack(down[0], down[1], scratch[2], native=self.native, first=part * (size // SCALE_INPUTS))
        return scratch, (gate[2][:, at], up[2][:, at], down[2][...])

    def gate_up(self, x: jax.Array, found: Any) -> tuple[jax.Array, jax.Array]:
        (gate, up, _), factors = found
        return _product(x, gate[...], 0) * factors[0], _product(x, up[...], 0) * factors[1]

    def down(self, hidden: jax.Array, found: Any) -> jax.Array:
        weights, factors = found
        return _product(hidden, weights[2][...], 0) * factors[2]
