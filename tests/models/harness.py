"""Runs a model on a mesh with trivial tables: row r owns its own blocks and its own slots."""

from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hybrid_kv.models.axes import DCP, MODEL, TENSOR
from hybrid_kv.models.batch import AttentionInputs, Caches, ModelBatch, RecurrentInputs
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.execution import PLAIN, Execution
from hybrid_kv.models.kimi_linear import KimiLinear
from hybrid_kv.models.parameters import partition_specs
from pallas_kernels.rows import RaggedRows

CHECKPOINT = Path(__file__).parents[1] / "data" / "tiny-kimi-linear"
CACHE_SPECS = Caches(P(None, None, DCP), P(None, None, TENSOR), P(None, None, None, TENSOR))

# Two thirds of the time to compile, and other bits: for tests that compare within a tolerance.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def cache_specs(config: KimiLinearConfig) -> Caches:
    """How the mesh splits the pools of a model in their plain form; `CACHE_SPECS` by default."""
    heads = config.kda_axes or None
    return CACHE_SPECS._replace(kda=P(None, None, heads), conv=P(None, None, None, heads))


def mesh_of(model: int = 1, dcp: int = 1, data: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: data * model * dcp]).reshape(data, model, dcp)
    return Mesh(devices, ("data", MODEL, DCP))


@cache
def compiled_step(
    config: KimiLinearConfig,
    mesh: Mesh,
    interleave: int,
    decode_only: bool,
    how: Execution = PLAIN,
    quick: bool = False,
):
    specs, pools = dict(partition_specs(config).parameters), cache_specs(config)

    @partial(jax.jit, donate_argnums=2, compiler_options=QUICK if quick else None)
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, P(), pools),
        out_specs=(P(None, TENSOR), pools),
        check_vma=False,
    )
    def step(params, batch, caches):
        return KimiLinear(config, params, how)(batch, caches, decode_only=decode_only, interleave=interleave)

    return step


@dataclass
class Runner:
    """One model with `rows` request rows; pools start as NaN, so nothing unwritten may be used."""

    config: KimiLinearConfig
    params: dict
    mesh: Mesh
    rows: int = 1
    capacity: int = 256
    rows_per_rank: int = 16
    interleave: int = 1
    emissions: int = 2
    how: Execution = PLAIN
    quick: bool = False  # compiled with `QUICK`
    caches: Caches = field(init=False)

    def __post_init__(self) -> None:
        c, block = self.config, self.rows_per_rank * self.mesh.shape[DCP]
        self.columns = -(-self.capacity // block)
        slots = 1 + self.rows * (1 + self.emissions)
        shapes = Caches(
            (len(c.mla_layers), 1 + self.rows * self.columns, block, c.cache_width),
            (len(c.kda_layers), slots, c.kda_heads, c.kda_head_dim, c.kda_head_dim),
            (len(c.kda_layers), slots, c.conv_width - 1, c.conv_channels),
        )
        self.caches = Caches(
            *(jax.device_put(jnp.full(s, jnp.nan, jnp.float32), NamedSharding(self.mesh, p))
              for s, p in zip(shapes, cache_specs(c), strict=True))
        )  # fmt: skip
        # Blocks handed out in a shuffled order: ids must not matter.
        ids = np.random.default_rng(0).permutation(self.rows * self.columns) + 1
        self.table = jnp.asarray(ids.reshape(self.rows, self.columns), jnp.int32)

    def step(self, decode_only: bool):
        """The compiled step, shared by runners of one configuration and mesh."""
        return compiled_step(self.config, self.mesh, self.interleave, decode_only, self.how, self.quick)

    def batch(self, prompts, start, *, pad_to: int, fresh=None, emit=()) -> ModelBatch:
        """Batch of one token list per row (empty: absent), packed in order, slack filled with id -1.

        emit: (row, emission index, absolute position) of further saves.
        """
        length = np.array([len(p) for p in prompts])
        offset = np.cumsum(length) - length
        tokens = np.full(pad_to, -1)
        tokens[: length.sum()] = np.concatenate([np.asarray(p, int) for p in prompts])
        slot = 1 + np.arange(self.rows) * (1 + self.emissions)
        position = np.zeros((self.rows, self.emissions), int)
        save = np.zeros((self.rows, self.emissions), int)
        for row, e, at in emit:
            position[row, e], save[row, e] = at, slot[row] + 1 + e
        read = np.where(np.asarray(start) == 0, 0, slot) if fresh is None else fresh
        i32 = partial(jnp.asarray, dtype=jnp.int32)
        return ModelBatch(
            i32(tokens), RaggedRows(i32(offset), i32(length), i32(start)), AttentionInputs(self.table),
            RecurrentInputs(i32(read), i32(slot), i32(position), i32(save)),
            jnp.arange(pad_to, dtype=jnp.int32),
        )  # fmt: skip

    def run(self, batch: ModelBatch, *, decode_only: bool = False) -> np.ndarray:
        logits, self.caches = self.step(decode_only)(self.params, batch, self.caches)
        return np.asarray(logits)
