"""Weights of the experts of a rank, all layers in one stack."""

from typing import NamedTuple

from jaxtyping import Array, Float32, Int32, Shaped


class ExpertWeights(NamedTuple):
    """Plain weights, [out, in] as in the checkpoint.

    Attributes:
      gate, up: [layers, E, F, D].
      down: [layers, E, D, F].
    """

    gate: Shaped[Array, "layers E F D"]
    up: Shaped[Array, "layers E F D"]
    down: Shaped[Array, "layers E D F"]

    @property
    def local(self) -> int:
        """Experts of this rank."""
        return self.gate.shape[1]

    @property
    def hidden(self) -> int:
        """Width of the tokens, D."""
        return self.gate.shape[3]

    @property
    def width(self) -> int:
        """Width of an expert, F."""
        return self.gate.shape[2]


class PackedMatrix(NamedTuple):
    """One MXFP4 matrix [out, in] of every expert, 4.25 bits a weight, for any TPU; `packed` says what the words hold.

    Attributes:
      codes: [layers, E, in / 8, out] eight codes a word.
      scales: [layers, E, in / 128, out] the exponents of four blocks of 32 inputs a word; rows up to a multiple of 8.
      factors: [layers, E, 1, out] what the products of an output are multiplied by.
    """

    codes: Int32[Array, "layers E in8 out"]
    scales: Int32[Array, "layers E in128 out"]
    factors: Float32[Array, "layers E 1 out"]


class NativeMatrix(NamedTuple):
    """The same for tpu7x, which converts codes itself: other words, one type of its own to tell them apart."""

    codes: Int32[Array, "layers E in8 out"]
    scales: Int32[Array, "layers E in128 out"]
    factors: Float32[Array, "layers E 1 out"]


class PackedExperts(NamedTuple):
    """MXFP4 weights in a form that the TPU kernel takes, all matrices of one type."""

    gate: PackedMatrix | NativeMatrix
    up: PackedMatrix | NativeMatrix
    down: PackedMatrix | NativeMatrix

    @property
    def local(self) -> int:
        """Experts of this rank."""
        return self.gate.codes.shape[1]

    @property
    def hidden(self) -> int:
        """Width of the tokens, D."""
        return self.down.codes.shape[3]

    @property
    def width(self) -> int:
        """Width of an expert, F."""
        return self.gate.codes.shape[3]
