"""The least that one device has to read, multiply and send for a step: arithmetic, nothing compiled.

Bytes of HBM: every weight it holds once (of routed experts those that some token is expected to choose), states of its
rows read and written, cached rows of its stripe read. Bytes on the wire: as a ring sends them, the least for any
topology. Rows are all taken to be filled to the context.
"""

import math
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hybrid_kv.chipless.steps import Setting
from hybrid_kv.models.axes import DATA
from hybrid_kv.models.parameters import inventory
from hybrid_kv.planning import CachePlan
from hybrid_kv.runtime.describe import cache_shape, weight_sharding
from hybrid_kv.sharding import MeshSpec


@dataclass(frozen=True)
class Work:
    """Of one device and step.

    Attributes:
      weights, states, rows: bytes of HBM.
      macs: multiply-adds.
      wire: bytes sent for one layer of each kind ("kda", "mla", "dense", "moe") and once a step ("model").
      layers: how many layers of each kind there are, and "model" once.
    """

    weights: float
    states: float
    rows: float
    macs: float
    wire: dict[str, float] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)

    @property
    def hbm(self) -> float:
        return self.weights + self.states + self.rows

    @property
    def sent(self) -> float:
        """Bytes on the wire of the whole step."""
        return sum(size * self.layers[kind] for kind, size in self.wire.items())


def ring(size: float, devices: int) -> float:
    """Bytes a device sends to gather or scatter `size` bytes, of the whole, over a ring; to sum for all takes twice."""
    return size * (devices - 1) / devices


def work_of(setting: Setting, kind: str, plan: CachePlan) -> Work:
    """The least work of a device in a step of `kind`."""
    model, mesh = setting.model, setting.mesh
    tokens = {"decode": setting.rows, "verify": setting.rows * (1 + setting.drafts), "prefill": setting.tokens}[kind]
    layers = {
        "kda": len(model.kda_layers), "mla": len(model.mla_layers), "dense": len(model.dense_layers),
        "moe": len(model.moe_layers), "model": 1,
    }  # fmt: skip
    itemsize = jnp.dtype(setting.dtype).itemsize
    shape = cache_shape(model, setting.dtype)
    # A prefill computes prompts from nothing; its rows in the cache are its own.
    active = setting.rows if kind != "prefill" else 1
    passes = 2 if kind != "prefill" else 1  # states are read and written; from nothing only written
    state = shape.heads * shape.key * shape.value * shape.state_itemsize * layers["kda"] / mesh.over(model.kda_axes)
    row = model.cache_width * itemsize * layers["mla"] / mesh.dcp
    cached = setting.rows * setting.context if kind != "prefill" else tokens
    return Work(
        weights=_weight_bytes(setting, plan, tokens),
        states=passes * active * state,
        rows=cached * row,
        macs=_macs(setting, kind, tokens),
        wire=_wire(setting, kind, tokens, itemsize, cached),
        layers=layers,
    )


def _chosen(setting: Setting, tokens: int) -> float:
    """Expected share of routed experts that some token chooses, if all are as likely."""
    model, together = setting.model, setting.mesh.data if DATA in setting.model.expert_axes else 1
    return 1 - (1 - model.experts_per_token / model.experts) ** (tokens * together)


def _weight_bytes(setting: Setting, plan: CachePlan, tokens: int) -> float:
    weights = weight_sharding(setting.model, plan, setting.dtype)
    total = 0.0
    for array in weights.arrays:
        size = float(array.local_bytes(setting.mesh))
        if array.name == "embed":
            size = min(size, tokens * setting.model.hidden_size * array.itemsize)
        elif array.name.startswith("moe.expert_"):
            size *= _chosen(setting, tokens)
        total += size
    return total


def _wanted(setting: Setting, kind: str, tokens: int) -> int:
    """Tokens whose logits are wanted."""
    return min(tokens, setting.rows) if kind == "prefill" else tokens


def _macs(setting: Setting, kind: str, tokens: int) -> float:
    """Of one device: products with weights it holds, and attention of its heads.

    Behind replicated heads of KDA it takes the tokens of the stream that it holds.
    """
    model, mesh = setting.model, setting.mesh
    heads, kda_heads = model.mla_heads / mesh.tensor, model.kda_heads / mesh.over(model.kda_axes)
    wanted = _wanted(setting, kind, tokens)
    total = 0.0
    for name, entry in inventory(model).items():
        size = math.prod(entry.shape) / _parts(mesh, entry.spec)
        if name == "embed" or name.startswith(("moe.expert_", "kda.conv")) or len(entry.shape) < 2:
            continue
        if name in _BEHIND_KDA and setting.split(tokens) and not model.kda_axes:
            size /= mesh.tensor
        total += size * (wanted if name == "head" else tokens)
    width = model.routed_width or model.hidden_size
    together = setting.mesh.data if DATA in model.expert_axes else 1
    total += (
        tokens * together * model.experts_per_token * 3 * width * model.expert_width * len(model.moe_layers)
        / mesh.over(model.expert_axes)
    )  # fmt: skip
    total += 7 * tokens * kda_heads * model.kda_head_dim**2 * len(model.kda_layers)
    if kind == "prefill":
        pairs = tokens * (tokens + 1) / 2
        attention = pairs * (model.nope_width + model.rope_width + model.value_width)
    else:
        attention = tokens * setting.context * (2 * model.latent_width + model.rope_width)
    return total + attention * heads * len(model.mla_layers)


# Output gate and projection of KDA.
_BEHIND_KDA = ("kda.g", "kda.g_a", "kda.g_b", "kda.out")


def _parts(mesh: MeshSpec, spec: PartitionSpec) -> int:
    """Into how many parts a spec splits an array."""
    names = [name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry)]
    return mesh.over(names)


def _kda_stream(setting: Setting, hidden: float, tokens: int) -> float:
    """Bytes a device sends for the input and output of a KDA layer, of `hidden` bytes; equal copies are not summed."""
    mesh, axes = setting.mesh, setting.model.kda_axes
    summing = mesh.over(axes)
    if not setting.split(tokens):
        return 2 * ring(hidden, summing)
    return ring(hidden, mesh.tensor) + ring(hidden * summing / mesh.tensor, summing)


def _wire(setting: Setting, kind: str, tokens: int, itemsize: int, cached: int) -> dict[str, float]:
    """Bytes a device sends for a layer of each kind. A prefill gathers the context, decoding the queries.

    With the stream replicated a layer sums its output for all. Split by tokens, its input is gathered and its output
    scattered, as many bytes; in the end the wanted rows are gathered.
    """
    model, mesh = setting.model, setting.mesh
    tensor, dcp, wanted = mesh.tensor, mesh.dcp, _wanted(setting, kind, tokens)
    hidden = tokens * model.hidden_size * itemsize
    stream = 2 * ring(hidden, tensor)
    heads = model.mla_heads / mesh.model
    queries = (
        ring(tokens * heads * model.cache_width * itemsize, dcp)
        + ring(dcp * tokens * heads * 4, dcp)
        + ring(tokens * heads * model.latent_width * itemsize, dcp)
    )
    context = ring(cached * model.cache_width * itemsize, dcp)
    wire = {
        "kda": _kda_stream(setting, hidden, tokens),
        "mla": stream + min(queries, context),
        "dense": stream,
        "moe": stream,
        "model": stream,
    }
    if setting.split(tokens):
        wire["model"] = ring(hidden, tensor) + ring(wanted * model.hidden_size * itemsize, tensor)
    if model.routed_width:
        # In: columns of the latent are gathered. Out: its sum over the experts is scattered, then lifted.
        wire["moe"] += 2 * ring(tokens * model.routed_width * itemsize, tensor)
    if DATA in model.expert_axes:
        width = model.routed_width or model.hidden_size
        wire["moe"] += 2 * ring(mesh.data * tokens * width * itemsize, mesh.data)
    return wire
