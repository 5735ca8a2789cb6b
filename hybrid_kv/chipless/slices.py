"""Named slices with a model each: what the table of docs/18-pods.md is made of.

Names are those under which slices are rented: v5p-8 is 8 cores, 4 chips and as many devices of JAX; tpu7x-8 is 8 chips
and 16 devices. 64 requests of 131,072 tokens and 256 states in all, spread over the replicas.
"""

import dataclasses
from dataclasses import dataclass

from hybrid_kv.chipless.pods import pod
from hybrid_kv.chipless.steps import Setting
from hybrid_kv.models.config import KimiLinearConfig, experts_over
from hybrid_kv.models.published import named
from hybrid_kv.sharding import MeshSpec

ROWS, STATES = 64, 256


@dataclass(frozen=True)
class Slice:
    """A model on a slice.

    Attributes:
      topology: as `pods.pod` takes it.
      mesh: as `MeshSpec.parse` takes it.
      spread: experts lie over the whole mesh instead of the tensor group.
      exchange: of partial attentions, see `models.execution.Execution`. On slices of v5 without a ring XLA makes a sum
        for all of a reduce-scatter, which sends twice as much; all-to-all stays what it is.
    """

    model: str
    topology: str
    mesh: str
    spread: bool = False
    exchange: str = "reduce_scatter"

    def setting(self) -> Setting:
        """Of one of its replicas."""
        mesh = MeshSpec.parse(self.mesh)
        model = KimiLinearConfig.from_dict(named(self.model))
        model = dataclasses.replace(
            model,
            expert_axes=experts_over("mesh" if self.spread else "tensor"),
            expert_form=expert_form(model, pod(self.topology).chip),
        )
        return Setting(model, mesh, rows=ROWS // mesh.data, slots=STATES // mesh.data, exchange=self.exchange)


def expert_form(model: KimiLinearConfig, chip: str) -> str:
    """As experts are stored, where the chip has a kernel for it."""
    if not model.packed_experts or chip == "h100":
        return "plain"
    return "native" if chip == "tpu7x" else "packed"


SLICES = {
    "kimi-linear-48b on v5e-16": Slice("kimi-linear-48b", "v5e:4x4", "dcp=16", exchange="all_to_all"),
    "kimi-linear-48b on v6e-8": Slice("kimi-linear-48b", "v6e:2x4", "dcp=8"),
    "kimi-linear-48b on v6e-16": Slice("kimi-linear-48b", "v6e:4x4", "model=4,dcp=4"),
    "kimi-linear-48b on v6e-32": Slice("kimi-linear-48b", "v6e:4x8", "data=2,dcp=16"),
    "kimi-linear-48b on v5p-8": Slice("kimi-linear-48b", "v5p:2x2x1", "dcp=4", exchange="all_to_all"),
    "kimi-linear-48b on v5p-64": Slice("kimi-linear-48b", "v5p:4x4x2", "data=4,dcp=8"),
    "kimi-linear-48b on tpu7x-8": Slice("kimi-linear-48b", "tpu7x:2x2x2", "dcp=16"),
    "kimi-linear-48b on H100x8": Slice("kimi-linear-48b", "h100:8", "dcp=8"),
    "kimi-k3 on tpu7x-64": Slice("kimi-k3", "tpu7x:4x4x4", "data=4,model=8,dcp=4", spread=True),
    "kimi-k3 on tpu7x-128": Slice("kimi-k3", "tpu7x:4x4x8", "data=8,model=8,dcp=4"),
    "kimi-k3 on v5p-256": Slice("kimi-k3", "v5p:4x4x8", "data=4,model=8,dcp=4", spread=True),
}
