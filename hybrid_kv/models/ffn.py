"""Feed-forward layers: gated, dense and mixture of experts, split over the tensor group."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_kv.models.activation import activation
from hybrid_kv.models.axes import DATA, TENSOR, tensor_rank, tensor_sum
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.linear import project
from hybrid_kv.models.norms import rms_norm
from hybrid_kv.models.routing import combine_matrix, route, selection_margin
from hybrid_kv.typing import Array, Float, Int32


def gated(
    x: Float[Array, "T D"], gate: Array, up: Array, down: Array, act: Callable[[Array, Array], Array]
) -> Float[Array, "T D"]:
    """down act(gate x, up x) for the local part of the width: a partial sum over ranks."""
    return project(act(project(x, gate), project(x, up)), down)


class DenseFfn(nnx.Module):
    """Gated feed-forward; weights [F, D], [F, D], [D, F] with F split over the tensor group."""

    def __init__(self, config: KimiLinearConfig, params: dict[str, Array]) -> None:
        self.config = config
        self.gate = nnx.Param(params["gate"])
        self.up = nnx.Param(params["up"])
        self.down = nnx.Param(params["down"])

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return tensor_sum(gated(x, self.gate[...], self.up[...], self.down[...], activation(self.config)))


class MoeFfn(nnx.Module):
    """Routed experts plus the shared ones, which are one feed-forward of their widths together.

    Each rank runs all of its experts on all tokens and weighs the results, zero for experts a token
    did not choose: weights are read once anyway, and shapes stay fixed. The router is replicated
    and runs in fp32 at full precision.

    With `routed_width` experts work in a narrower latent space. Both projections around it are split over the tensor
    group: the latent is gathered on the way in, and summed over all experts before the norm on the way out.

    With the data axis among `expert_axes` the tokens of all replicas meet before the experts and part after them;
    every replica must then have as many.
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
        if config.routed_width:
            self.latent_down = nnx.Param(params["latent_down"])
            self.latent_up = nnx.Param(params["latent_up"])
            if config.latent_norm:
                self.latent_norm = nnx.Param(params["latent_norm"])

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
        margin = selection_margin(
            logits, self.bias[...], top_k=config.experts_per_token, groups=config.expert_groups,
            groups_kept=config.expert_groups_kept,
        )  # fmt: skip
        shared = gated(x, self.shared_gate[...], self.shared_up[...], self.shared_down[...], activation(config))
        if not config.routed_width:
            return tensor_sum(self._routed(x, ids, weights) + shared), margin
        latent = jax.lax.all_gather(project(x, self.latent_down[...]), TENSOR, axis=1, tiled=True)
        return tensor_sum(self._lifted(tensor_sum(self._routed(latent, ids, weights))) + shared), margin

    def _routed(
        self, x: Float[Array, "T E"], ids: Int32[Array, "T k"], weights: Float[Array, "T k"]
    ) -> Float[Array, "T E"]:
        """Weighted sum over the experts of this rank: a partial sum over the tensor group."""
        spread = DATA in self.config.expert_axes
        if spread:
            x, ids, weights = (jax.lax.all_gather(part, DATA, axis=0, tiled=True) for part in (x, ids, weights))
        local = self.expert_gate[...].shape[0]
        share = combine_matrix(ids, weights, self.config.experts)
        rank = jax.lax.axis_index(self.config.expert_axes)
        share = jax.lax.dynamic_slice_in_dim(share, rank * local, local, axis=1).astype(x.dtype)
        act = activation(self.config)

        def add_expert(e, routed):
            gate, up, down = (w[...][e] for w in (self.expert_gate, self.expert_up, self.expert_down))
            return routed + share[:, e, None] * gated(x, gate, up, down, act)

        routed = jax.lax.fori_loop(0, local, add_expert, jnp.zeros_like(x))
        return jax.lax.psum_scatter(routed, DATA, scatter_dimension=0, tiled=True) if spread else routed

    def _lifted(self, latent: Float[Array, "T E"]) -> Float[Array, "T D"]:
        """The summed latent, normed, through this rank's columns of the projection up: a partial sum."""
        if self.config.latent_norm:
            latent = rms_norm(latent, self.latent_norm[...], self.config.rms_norm_eps)
        up = self.latent_up[...]
        mine = jax.lax.dynamic_slice_in_dim(latent, tensor_rank() * up.shape[1], up.shape[1], axis=1)
        return project(mine, up)
