"""Routed experts: signature and contract."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.dispatch import Implementations, choose
from pallas_kernels.experts import reference
from pallas_kernels.experts.activation import Activation
from pallas_kernels.experts.weights import ExpertWeights, PackedExperts


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
    product: reference.Product = reference.product,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """Weighted sum over the experts of this rank that each token chose: a partial sum over ranks.

        sum_e weight_e down_e act(gate_e x, up_e x)        first <= e < first + E

    Sums are fp32 inside and rounded once to the dtype of x, before ranks are added. In a prefill the TPU kernel also
    rounds the hidden layer and the output of each expert to bf16, and takes values of x that are no finite numbers for
    zeros; in the reference all is in the dtype of x.

    Args:
      x: tokens. Those that are nobody's (slack) may hold anything; their rows mean nothing.
      ids: experts of each token, numbered over all ranks, none twice; others than this rank's are passed over.
      weights: of those experts.
      experts: weights of all layers and of the experts of this rank, E of them.
      layer: which layer of the stacks, may be traced.
      first: number of this rank's first expert, may be traced.
      total: experts of all ranks, for the sizes of tiles in a prefill; None assumes that a token chooses one in 32.
      product: how the reference multiplies tokens with a weight [out, in]; kernels have their own products.
      implementation: see `dispatch.choose`.

    Raises:
      ValueError: the TPU kernel is named and does not take these types or sizes.
    """

    def fits(form: str) -> bool:
        if form != "tpu":
            return True
        from pallas_kernels.experts.tpu import tiles

        return tiles.refusal(x, experts) is None

    forms: Implementations = {
        "reference": partial(reference.expert_ffn, product=product),
        "tpu": "pallas_kernels.experts.tpu.driver:expert_ffn",
    }
    run = choose("expert_ffn", implementation, forms, fits)
    if 0 in (*ids.shape, experts.local):
        return jnp.zeros_like(x)
    return run(x, ids, weights, experts, layer, first, activation=activation, total=total)
