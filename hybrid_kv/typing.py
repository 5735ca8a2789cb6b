"""Axis letters and array aliases used in every public signature.

T packed tokens of one step      R request slots (rows of a step)
H KDA heads                      N attention (MLA) heads
K key width of a KDA head        V value width of a KDA head
L latent width of an MLA row     P position ("rope") width of an MLA row
D hidden width                   W convolution width
B blocks of a pool               C columns of a block table
G groups                         U hash units of a request
E emissions of a row             S slots of a recurrent pool
"""

from jaxtyping import Array, Bool, Float, Int32, UInt32

__all__ = ["Array", "Bool", "Float", "Int32", "UInt32"]
