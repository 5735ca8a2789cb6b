"""Feed-forward layers: gated SiLU, dense and mixture of experts, split over the tensor group."""

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_kv.models.axes import tensor_rank, tensor_sum
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.linear import project
from hybrid_kv.models.routing import combine_matrix, route, selection_margin
from hybrid_kv.typing import Array, Float


def gated(x: Float[Array, "T D"], gate: Array, up: Array, down: Array) -> Float[Array, "T D"]:
    """down (SiLU(gate x) * up x) for the local part of the width: a partial sum over ranks."""
    return project(jax.nn.silu(project(x, gate)) * project(x, up), down)


class DenseFfn(nnx.Module):
    """Gated feed-forward; weights [F, D], [F, D], [D, F] with F split over the tensor group."""

    def __init__(self, params: dict[str, Array]) -> None:
        self.gate = nnx.Param(params["gate"])
        self.up = nnx.Param(params["up"])
        self.down = nnx.Param(params["down"])

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return tensor_sum(gated(x, self.gate[...], self.up[...], self.down[...]))


class MoeFfn(nnx.Module):
    """Routed experts plus the shared one.

    Each rank runs all of its experts on all tokens and weighs the results, zero for experts a token
    did not choose: weights are read once anyway, and shapes stay fixed. The router is replicated
    and runs in fp32 at full precision.
    """

    def __init__(self, config: KimiLinearConfig, params: dict[str, Array]) -> None:
        self.config = config
        self.router = nnx.Param(params["router"])
        self.bias = nnx.Param(params["bias"])
        self.expert_gate = nnx.Param(params["expert_gate"])
        self.expert_up = nnx.Param(params["expert_up"])
        self.expert_down = nnx.Param(params["expert_down"])
        self.shared_gate = nnx.Param(params["shared_gate"])
        self.shared_up = nnx.Param(params["shared_up"])
        self.shared_down = nnx.Param(params["shared_down"])

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Float[Array, "T D"], Float[Array, "T"]]:
        """Output, and how far each token was from choosing another expert (`selection_margin`)."""
        config = self.config
        router = self.router[...].astype(jnp.float32)
        logits = project(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
        ids, weights = route(
            logits, self.bias[...], top_k=config.experts_per_token, scaling=config.routed_scaling_factor,
            renormalize=config.renormalize, groups=config.expert_groups, groups_kept=config.expert_groups_kept,
            biased_weights=config.biased_expert_weights,
        )  # fmt: skip
        local = self.expert_gate[...].shape[0]
        share = combine_matrix(ids, weights, config.experts)
        share = jax.lax.dynamic_slice_in_dim(share, tensor_rank() * local, local, axis=1)
        share = share.astype(x.dtype)

        def add_expert(e, routed):
            gate, up, down = (w[...][e] for w in (self.expert_gate, self.expert_up, self.expert_down))
            return routed + share[:, e, None] * gated(x, gate, up, down)

        routed = jax.lax.fori_loop(0, local, add_expert, jnp.zeros_like(x))
        margin = selection_margin(
            logits, self.bias[...], top_k=config.experts_per_token, groups=config.expert_groups,
            groups_kept=config.expert_groups_kept,
        )  # fmt: skip
        shared = gated(x, self.shared_gate[...], self.shared_up[...], self.shared_down[...])
        return tensor_sum(routed + shared), margin
