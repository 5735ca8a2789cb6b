"""Feed-forward layers: gated, dense and mixture of experts, split over the tensor group."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from hybrid_kv.models.axes import DATA, TENSOR, tensor_columns
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.execution import PLAIN, Execution
from hybrid_kv.models.linear import project
from hybrid_kv.models.norms import rms_norm_of_part
from hybrid_kv.models.routing import route, selection_margin
from hybrid_kv.typing import Array, Float, Int32
from pallas_kernels.experts import Activation, ExpertWeights, NativeMatrix, PackedExperts, PackedMatrix, expert_ffn


def activation_of(config: KimiLinearConfig) -> Activation:
    """SiLU, or SiTU with the bounds of a configuration."""
    return Activation(config.situ_beta, config.situ_linear_beta)


def gated(x: Float[Array, "T D"], gate: Array, up: Array, down: Array, act: Activation) -> Float[Array, "T D"]:
    """down act(gate x, up x) for the local part of the width: a partial sum over ranks."""
    return project(act.plain(project(x, gate), project(x, up)), down)


class DenseFfn(nnx.Module):
    """Gated feed-forward; weights [F, D], [F, D], [D, F] with F split over the tensor group."""

    def __init__(self, config: KimiLinearConfig, params: dict[str, Array], how: Execution = PLAIN) -> None:
        self.config, self.stream = config, how.stream
        self.gate = nnx.Param(params["gate"])
        self.up = nnx.Param(params["up"])
        self.down = nnx.Param(params["down"])

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        x = self.stream.gather(x)
        return self.stream.reduce(gated(x, self.gate[...], self.up[...], self.down[...], activation_of(self.config)))


def expert_weights(config: KimiLinearConfig, params: Mapping[str, Array]) -> ExpertWeights | PackedExperts:
    """Routed experts of all layers, in the form in which they lie on the device.

    They stay whole, and kernels take the layer as an index: a slice of a stack would be a copy of it.
    """
    if config.expert_form == "plain":
        return ExpertWeights(*(params[f"expert_{name}"] for name in ExpertWeights._fields))
    matrix = NativeMatrix if config.expert_form == "native" else PackedMatrix
    return PackedExperts(
        *(matrix(*(params[f"expert_{name}_{part}"] for part in matrix._fields)) for name in PackedExperts._fields)
    )


class MoeFfn(nnx.Module):
    """Routed experts plus the shared ones, which are one feed-forward of their widths together.

    The router is replicated and runs in fp32 at full precision. Each rank runs its own experts (`expert_ffn`).

    With `routed_width` experts work in a narrower latent space. Both projections around it are split over the tensor
    group: the latent is gathered on the way in, and summed over all experts before the norm on the way out.

    With the data axis among `expert_axes` the tokens of all replicas meet before the experts and part after them;
    every replica must then have as many.
    """

    def __init__(self, config: KimiLinearConfig, params: dict[str, Array], how: Execution = PLAIN) -> None:
        self.config, self.how, self.stream = config, how, how.stream
        self.router = nnx.Param(params["router"])
        self.bias = nnx.Param(params["bias"])
        self.shared_gate = nnx.Param(params["shared_gate"])
        self.shared_up = nnx.Param(params["shared_up"])
        self.shared_down = nnx.Param(params["shared_down"])
        if config.routed_width:
            self.latent_down = nnx.Param(params["latent_down"])
            self.latent_up = nnx.Param(params["latent_up"])
            if config.latent_norm:
                self.latent_norm = nnx.Param(params["latent_norm"])

    def __call__(
        self, x: Float[Array, "held D"], experts: ExpertWeights | PackedExperts, layer: Int32[Array, ""]
    ) -> tuple[Float[Array, "held D"], Float[Array, "T"]]:
        """Output, and how far each token of the step was from choosing another expert (`selection_margin`).

        experts: of all layers; layer: of them.
        """
        config, x = self.config, self.stream.gather(x)
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
        shared = gated(x, self.shared_gate[...], self.shared_up[...], self.shared_down[...], activation_of(config))
        if not config.routed_width:
            return self.stream.reduce(self._routed(x, ids, weights, experts, layer) + shared), margin
        latent = jax.lax.all_gather(project(x, self.latent_down[...]), TENSOR, axis=1, tiled=True)
        routed = self._routed(latent, ids, weights, experts, layer)
        return self.stream.reduce(self._lifted(routed) + shared), margin

    def _routed(
        self,
        x: Float[Array, "T E"],
        ids: Int32[Array, "T k"],
        weights: Float[Array, "T k"],
        experts: ExpertWeights | PackedExperts,
        layer: Int32[Array, ""],
    ) -> Float[Array, "T E"]:
        """Weighted sum over the experts of this rank: a partial sum over the tensor group."""
        config = self.config
        spread = DATA in config.expert_axes
        if spread:
            x, ids, weights = (jax.lax.all_gather(part, DATA, axis=0, tiled=True) for part in (x, ids, weights))
        first = jax.lax.axis_index(config.expert_axes) * experts.local
        routed = expert_ffn(
            x, ids, weights, experts, layer, first, activation=activation_of(config),
            total=config.experts, product=project, implementation="tpu" if self.how.kernels == "tpu" else None,
        )  # fmt: skip
        return jax.lax.psum_scatter(routed, DATA, scatter_dimension=0, tiled=True) if spread else routed

    def _lifted(self, latent: Float[Array, "T E"]) -> Float[Array, "T D"]:
        """The latent of all experts, normed, through this rank's columns of the projection up: a partial sum.

        latent: a partial sum over the tensor group. Its columns are summed where they are needed; the norm takes one
        more number a token.
        """
        mine = tensor_columns(latent, apart=self.how.on_tpu)
        if self.config.latent_norm:
            mine = rms_norm_of_part(mine, self.latent_norm[...], self.config.rms_norm_eps, TENSOR)
        return project(mine, self.latent_up[...])
