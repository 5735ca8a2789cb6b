"""Experts one after the other, each on all tokens: what the kernels are held to.

The order of operations is fixed and every product goes through `product`, so that with products whose bits do not
depend on the number of rows neither do those of the result.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from pallas_kernels.experts.activation import Activation
from pallas_kernels.experts.plan import shares
from pallas_kernels.experts.weights import ExpertWeights, NativeMatrix, PackedExperts, PackedMatrix

Product = Callable[[Float[Array, "T in"], Float[Array, "out in"]], Float[Array, "T out"]]


def product(x: Float[Array, "T in"], weight: Float[Array, "out in"]) -> Float[Array, "T out"]:
    """weight x of every token, in the dtype of x."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def expert_ffn(
    x: Float[Array, "T D"],
    ids: Int32[Array, "T k"],
    weights: Float32[Array, "T k"],
    experts: ExpertWeights | PackedExperts,
    layer: Int32[Array, ""] | int,
    first: Int32[Array, ""] | int,
    *,
    activation: Activation,
    total: int | None = None,
    product: Product = product,
) -> Float[Array, "T D"]:
    """See `experts.api.expert_ffn`; everything is rounded to the dtype of x, the sum after each expert too."""
    _, weight = shares(ids, weights, first, experts.local)
    share = weight.T.astype(x.dtype)

    def add_expert(e: Int32[Array, ""], routed: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate, up, down = _matrices(experts, layer, e)
        hidden = activation.plain(product(x, gate), product(x, up))
        return routed + share[:, e, None] * product(hidden, down)

    return lax.fori_loop(0, experts.local, add_expert, jnp.zeros_like(x))


def _matrices(
    experts: ExpertWeights | PackedExperts, layer: Int32[Array, ""] | int, e: Int32[Array, ""]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if isinstance(experts, ExpertWeights):
        return experts.gate[layer, e], experts.up[layer, e], experts.down[layer, e]

    def one(matrix: PackedMatrix | NativeMatrix) -> PackedMatrix | NativeMatrix:
        return type(matrix)(*(part[layer, e] for part in matrix))

    gate, up = (_in_order(unpacked(one(matrix))) for matrix in (experts.gate, experts.up))
    return gate, up, unpacked(one(experts.down))


def unpacked(matrix: PackedMatrix | NativeMatrix) -> BFloat16[Array, "out in"]:
    """Values of a packed matrix of one expert, exactly; outputs in the order they are packed in."""
    words = matrix.codes.reshape(-1, 16, matrix.codes.shape[-1])  # [groups of 128 inputs, 16, out]
    octets = (words[..., None] >> jnp.arange(0, 32, 8)) & 255  # [groups, 16, out, q]
    if isinstance(matrix, NativeMatrix):
        # Row 8 u + r and nibble 4 z + q are input 32 q + 16 u + 2 r + z.
        nibbles = ((words[..., None] >> jnp.arange(0, 32, 4)) & 15).reshape(*words.shape, 2, 4)
        # to [groups, q, 8 u + r, z, out]
        codes = jnp.moveaxis(nibbles, (4, 1, 3), (1, 2, 3))
        sign, magnitude = codes >> 3, jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)[codes & 7]
        least = 14
    else:
        # Row 8 u + r, byte q and half h are input 32 q + 16 u + 8 h + r.
        code = jnp.stack([(octets >> 1) & 7, (octets >> 4) & 7], axis=-1)  # [groups, 8 u + r, out, q, h]
        signs = jnp.stack([octets >> 7, octets & 1], axis=-1)
        code, sign = (
            jnp.moveaxis(a.reshape(a.shape[0], 2, 8, *a.shape[2:]), (4, 1, 5, 2), (1, 2, 3, 4)) for a in (code, signs)
        )
        magnitude = jnp.array([0.5, 0, 1, 1.5, 2, 3, 4, 6], jnp.float32)[code]
        least = 0
    values = jnp.where(sign > 0, -magnitude, magnitude).reshape(-1, 4, 32, words.shape[-1])
    exponents = ((matrix.scales[: len(words), :, None] >> jnp.arange(0, 32, 8)) & 255) >> 2  # [groups, out, q]
    # A weight is its e5m2 number, of bias 15 and with 0.5 at exponent S, times the factor.
    scale = jnp.exp2((exponents + (least - 14)).astype(jnp.float32))
    values = values * jnp.moveaxis(scale, 2, 1)[:, :, None, :] * matrix.factors
    return values.reshape(-1, words.shape[-1]).T.astype(jnp.bfloat16)


def _in_order(weight: Float[Array, "out in"]) -> Float[Array, "out in"]:
    """Undoes `packed.interleaved`."""
    rows, inputs = weight.shape
    return weight.reshape(rows // 128, 32, 4, inputs).swapaxes(1, 2).reshape(rows, inputs)
