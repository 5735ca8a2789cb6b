"""What a user may say about the cache, and the cache that an engine is built with.

One pool per row shape: MLA rows and recurrent states never share pages, so a state does not pad an
attention block and a block does not pad a state.
"""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec as P

from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.cache.eviction import COVERAGE, JOINT, LRU, TIED
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupKind, SystemGeometry, resolve
from hybrid_kv.planning.forms import LANES, PLAIN, PoolForms, forms_for
from hybrid_kv.planning.groups import block_rows, group_layers
from hybrid_kv.planning.layers import LayerSpec, delta_state_bytes, latent_row_bytes
from hybrid_kv.sharding import TENSOR, ArraySharding, MeshSpec, ShardingMap, ownership_rule

_DEFAULT_CONTEXT = 8192
_DEFAULT_LADDER = (512, 2048, 8192)
_JUNCTIONS = 5
_EVICTIONS = {"joint": JOINT, "tied": TIED, "coverage": COVERAGE, "lru": LRU}


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """What a user may say about cache and scheduler; None lets the planner choose.

    prefix_caching: reuse prefixes. hash_unit: tokens prefixes are matched in. rows_per_rank: MLA rows
    of a block that one dcp rank holds (None: a block is one hash unit if dcp and interleave divide
    it, else one unit per rank). interleave: neighbouring tokens on one rank. attention_blocks,
    state_slots: sizes of the two pools without their null entry (None: every request slot filled to
    max_context; eight states a request slot). max_requests: request slots. max_context: tokens of a
    prompt and its answer (None: the model's, at most 8192). token_budget: tokens of a step.
    chunk_limit: tokens of a prefill chunk (None: the budget). token_buckets: step sizes compiled
    besides the decode step (None: budget / 4 and the budget).
    admission: "prompt" admits a request once its whole prompt fits into the pools, "chunk" when its first chunk
    does: fuller pools, and more preemptions.
    eviction: the order in which what nobody holds is given up, "joint", "tied", "coverage" or "lru", see
    `cache.eviction`; joint needs no tuning.
    tail, turn_end, junction, ladder: where recurrent states are kept, see `Placement` (ladder None: 512, 2048
    and 8192 tokens, rounded to hash units).
    """

    prefix_caching: bool = True
    hash_unit: int = 64
    rows_per_rank: int | None = None
    interleave: int = 1
    attention_blocks: int | None = None
    state_slots: int | None = None
    max_requests: int = 16
    max_context: int | None = None
    token_budget: int = 1024
    chunk_limit: int | None = None
    token_buckets: tuple[int, ...] | None = None
    admission: str = "prompt"
    eviction: str = "joint"
    tail: bool = True
    turn_end: bool = True
    junction: bool = True
    ladder: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise UserError(field.name, value, "use at least 1")
        if self.admission not in ("prompt", "chunk"):
            raise UserError("admission", self.admission, "use prompt or chunk")
        if self.eviction not in _EVICTIONS:
            raise UserError("eviction", self.eviction, f"use one of {', '.join(_EVICTIONS)}")
        for bucket in self.token_buckets or ():
            if bucket < 1:
                raise UserError("token_buckets", bucket, "use at least 1 token")


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """What the planner has to know of a model's cache.

    mla_layers, recurrent_layers: indices. latent, position: widths of an MLA row. heads, key, value:
    of a recurrent state. taps: convolution width. Item sizes in bytes. state_axes: mesh axes that split
    the heads of states and histories; none for whole ones on every device.
    """

    mla_layers: tuple[int, ...]
    recurrent_layers: tuple[int, ...]
    latent: int
    position: int
    heads: int
    key: int
    value: int
    taps: int
    max_context: int
    row_itemsize: int
    conv_itemsize: int
    state_itemsize: int = 4
    state_axes: tuple[str, ...] = TENSOR

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.heads * (2 * self.key + self.value)

    def layers(self) -> tuple[LayerSpec, ...]:
        """Its cache layers, MLA before recurrent."""
        row = latent_row_bytes(self.latent, self.position, self.row_itemsize)
        sizes = {"state_itemsize": self.state_itemsize, "conv_itemsize": self.conv_itemsize}
        state = delta_state_bytes(self.heads, self.key, self.value, self.taps, **sizes)
        return tuple(
            [LayerSpec("mla", index, GroupKind.MLA, row) for index in self.mla_layers]
            + [
                LayerSpec("kda", index, GroupKind.RECURRENT, state, heads=self.heads, state_axes=self.state_axes)
                for index in self.recurrent_layers
            ]
        )


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """A cache that fits together: static configuration, sharding map, step sizes, forms of the pools."""

    config: CacheConfig
    mesh: MeshSpec
    sharding: ShardingMap
    buckets: tuple[int, ...]
    forms: PoolForms = PLAIN

    def report(self) -> str:
        """Geometry, sharding map and pool sizes as text."""
        geometry = self.config.geometry
        each = " for each replica" if self.mesh.data > 1 else ""
        pools = [
            f"pool of {group.name}: {self.config.pool_blocks[self.config.group_pool[i]] - 1} "
            + ("states" if i in geometry.recurrent else f"blocks of {group.block} tokens")
            + each
            for i, group in enumerate(geometry.groups)
        ]
        steps = f"steps of {self.config.max_requests} (decode), {', '.join(map(str, self.buckets))} tokens{each}"
        total = f"caches take {self.sharding.local_bytes / 2**20:.2f} MiB per device"
        return "\n".join([geometry.table(), "", self.sharding.table(), "", *pools, steps, total])


def plan_cache(
    shape: CacheShape, options: CacheOptions, mesh: MeshSpec, kernels: str | None = None, token_multiple: int = 1
) -> CachePlan:
    """Derive groups, pools and the sharding map; refuses what cannot work, naming the field.

    kernels: "tpu" or "gpu" for pools in the form that those kernels take; see `forms`. Sizes are of one replica; the
    pools of the replicas on a mesh lie one behind the other on the axis of blocks and slots. token_multiple: of which
    step sizes besides the decode step have to be multiples; those that were not given are rounded up to one.
    """
    geometry = _geometry(shape, options, mesh.dcp)
    context = options.max_context or min(shape.max_context, _DEFAULT_CONTEXT)
    if context > shape.max_context:
        raise UserError("max_context", context, f"the model reaches {shape.max_context} tokens")
    blocks, pools = [], []
    for index, group in enumerate(geometry.groups):
        if index in geometry.attention:
            blocks.append(1 + (options.attention_blocks or options.max_requests * group.columns(context)))
        else:
            blocks.append(1 + (options.state_slots or options.max_requests * 8))
        pools.append(index)
    budget = options.token_budget
    config = CacheConfig(
        geometry=geometry,
        pool_blocks=tuple(blocks),
        group_pool=tuple(pools),
        max_requests=options.max_requests,
        max_context=context,
        token_budget=budget,
        chunk_limit=min(options.chunk_limit or budget, budget),
        max_prefills=options.max_requests,
        whole_prompts=options.admission == "prompt",
        eviction=_EVICTIONS[options.eviction],
        placement=Placement(
            tail=options.tail,
            turn_end=options.turn_end,
            junctions=_JUNCTIONS * options.junction,
            ladder=tuple(grid for grid in _ladder(options) if grid <= context),
        ),
        prefix_caching=options.prefix_caching,
    )
    buckets = _buckets(options, token_multiple)
    forms = forms_for(
        kernels, latent=shape.latent, position=shape.position, channels=shape.channels,
        parts=mesh.over(shape.state_axes),
        rows_per_rank=geometry.groups[geometry.attention[0]].block // mesh.dcp if geometry.attention else 0,
    )  # fmt: skip
    return CachePlan(config, mesh, _sharding(shape, config, mesh, forms), buckets, forms)


def _buckets(options: CacheOptions, multiple: int) -> tuple[int, ...]:
    """Step sizes besides the decode step; the last one holds the budget."""
    budget = options.token_budget
    for bucket in options.token_buckets or ():
        if bucket < budget and bucket % multiple:
            fix = f'with this mesh and residual="sequence" it must be a multiple of {multiple}'
            raise UserError("token_buckets", bucket, fix)
    chosen = options.token_buckets or (max(budget // 4, 1),)
    return tuple(sorted({-(-size // multiple) * multiple for size in (*chosen, budget) if size <= budget}))


def _ladder(options: CacheOptions) -> tuple[int, ...]:
    if options.ladder is not None:
        return options.ladder
    return default_ladder(options.hash_unit)


def default_ladder(unit: int) -> tuple[int, ...]:
    """512, 2048 and 8192 tokens, rounded to whole hash units of `unit` tokens."""
    return tuple(sorted({max(grid // unit, 1) * unit for grid in _DEFAULT_LADDER}))


def _geometry(shape: CacheShape, options: CacheOptions, dcp: int) -> SystemGeometry:
    sizes = {"hash_unit": options.hash_unit, "interleave": options.interleave, "dcp": dcp}
    specs = [
        group.declare(block_rows(group, rows_per_rank=options.rows_per_rank, **sizes))
        for group in group_layers(shape.layers())
    ]
    geometry = resolve(specs, dcp=dcp, interleave=options.interleave, hash_unit=options.hash_unit)
    if max(group.block for group in geometry.groups) >= 1 << 30:
        field = "hash_unit" if options.rows_per_rank is None else "rows_per_rank"
        raise UserError(field, getattr(options, field), "use blocks of fewer than 2**30 tokens")
    return geometry


def _sharding(shape: CacheShape, config: CacheConfig, mesh: MeshSpec, forms: PoolForms) -> ShardingMap:
    """The pools as device arrays. A model without layers of a kind keeps a null pool of one block."""
    geometry = config.geometry
    mla = geometry.attention[0] if geometry.attention else None
    kda = geometry.recurrent[0] if geometry.recurrent else None
    if kda is not None and shape.heads % mesh.over(shape.state_axes):
        raise UserError("mesh", str(mesh), f"{' x '.join(shape.state_axes)} must divide the {shape.heads} heads")
    blocks = config.pool_blocks[config.group_pool[mla]] if mla is not None else 1
    rows = geometry.groups[mla].block if mla is not None else mesh.dcp
    slots = config.pool_blocks[config.group_pool[kda]] if kda is not None else 1
    states = (len(shape.recurrent_layers), mesh.data * slots)
    return ShardingMap(
        mesh,
        (
            _latent_pool(
                shape, mesh.data * blocks, rows, forms, ownership_rule(geometry, mla) if mla is not None else ""
            ),
            ArraySharding(
                name="kda",
                shape=(*states, shape.heads, shape.key, shape.value),
                axes=("layer", "slot", "head", "key", "value"),
                spec=P(None, "data", shape.state_axes or None, None, None),
                itemsize=shape.state_itemsize,
                rule=ownership_rule(geometry, kda, shape.state_axes) if kda is not None else "",
            ),
            _history_pool(shape, states, forms),
        ),
    )


def _latent_pool(shape: CacheShape, blocks: int, rows: int, forms: PoolForms, rule: str) -> ArraySharding:
    """rows: of a block on all ranks. Pages of the ranks lie one behind the other on the axis that is split."""
    width = shape.latent + shape.position
    page, axes = ((rows, width), ("row", "latent+position"))
    if forms.planes:
        page, axes = (rows * width // LANES, LANES), ("plane row", "lane")
    return ArraySharding(
        name="mla",
        shape=(len(shape.mla_layers), blocks, *page),
        axes=("layer", "block", *axes),
        spec=P(None, "data", "dcp", None),
        itemsize=shape.row_itemsize,
        rule=rule,
    )


def _history_pool(shape: CacheShape, states: tuple[int, int], forms: PoolForms) -> ArraySharding:
    """Channels are ordered by head, so a part of them belongs to the heads of one device."""
    channels: tuple[int, ...] = (shape.channels,)
    axes: tuple[str, ...] = ("head*qkv",)
    spec = P(None, "data", None, shape.state_axes or None)
    if forms.columns:
        channels, axes = (shape.channels // LANES, LANES), ("head*qkv / 128", "lane")
        spec = P(*spec, None)
    return ArraySharding(
        name="conv",
        shape=(*states, shape.taps - 1, *channels),
        axes=("layer", "slot", "tap", *axes),
        spec=spec,
        itemsize=shape.conv_itemsize,
        rule="last inputs before the convolution",
    )
