"""Whole model steps, compiled for the devices of a pod that is not there.

What is compiled is the step that the engine runs (`runtime.device.compiled_step`) with its pools, plan inputs and
weights as shapes: nothing is allocated.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hybrid_kv.cache.state import initial_state
from hybrid_kv.chipless.pods import Pod
from hybrid_kv.errors import UserError
from hybrid_kv.models.batch import Caches
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.execution import Execution
from hybrid_kv.models.parameters import check_mesh, inventory
from hybrid_kv.plan import spell_out
from hybrid_kv.planning import CacheOptions, CachePlan, plan_cache
from hybrid_kv.runtime import device, metadata
from hybrid_kv.runtime.describe import cache_shape
from hybrid_kv.sharding import AXES, MeshSpec

KINDS = ("decode", "prefill", "verify")


@dataclass(frozen=True)
class Setting:
    """What is compiled.

    Attributes:
      model, mesh: of all devices of the pod.
      rows: requests of a replica in a step.
      context: most tokens of a request.
      tokens: of a prefill step of a replica.
      drafts: to be verified behind each row's last token.
      rows_per_rank: MLA rows of a block on one rank.
      slots: recurrent states of a replica besides the null one.
      blocks: MLA blocks of a replica besides the null one; None for every row filled to the context.
      workspace, exchange, residual: see `models.execution.Execution`.
    """

    model: KimiLinearConfig
    mesh: MeshSpec
    rows: int = 64
    context: int = 131_072
    tokens: int = 8192
    drafts: int = 3
    rows_per_rank: int = 64
    slots: int = 256
    blocks: int | None = None
    dtype: str = "bfloat16"
    workspace: int = 8192
    exchange: str = "reduce_scatter"
    residual: str = "replicated"

    def split(self, tokens: int) -> bool:
        """Whether a step of so many tokens runs with the residual stream split by tokens, see `Execution.suited`."""
        return self.execution().suited(tokens, self.mesh.tensor).residual == "sequence"

    def execution(self, kernels: str | None = None) -> Execution:
        """How its steps run. Raises UserError for an exchange or a residual that there is not."""
        return Execution(kernels, self.workspace, self.exchange, self.residual)

    def plan(self, kernels: str) -> CachePlan:
        """The cache of a replica on this mesh.

        Raises:
          UserError: what cannot work, naming the field.
        """
        check_mesh(self.model, {axis: getattr(self.mesh, axis) for axis in AXES})
        how = self.execution(kernels)
        if kernels == "tpu" and self.dtype != "bfloat16":
            raise UserError("dtype", self.dtype, "kernels of a TPU take bfloat16")
        if self.tokens % how.token_multiple(self.mesh.tensor):
            raise UserError("tokens", self.tokens, f"use a multiple of model * dcp = {self.mesh.tensor} devices")
        options = CacheOptions(
            max_requests=self.rows, max_context=self.context, token_budget=max(self.tokens, self.rows),
            rows_per_rank=self.rows_per_rank, hash_unit=self.rows_per_rank, state_slots=self.slots,
            attention_blocks=self.blocks,
        )  # fmt: skip
        plan = plan_cache(cache_shape(self.model, self.dtype), options, self.mesh, kernels)
        if not plan.forms.planes:
            fix = (
                "kernels take pages of a multiple of 16 rows, of a latent in multiples of 128 and a position key of 64"
            )
            raise UserError("rows_per_rank", self.rows_per_rank, fix)
        if not plan.forms.columns:
            raise UserError("mesh", str(self.mesh), "kernels take convolutions of a multiple of 128 channels a device")
        return plan


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step and what the compiler told of it; bytes are of one device.

    Attributes:
      text: optimised HLO.
      seconds: lowering and compilation.
      arguments, outputs, aliased, temporary: memory by purpose; aliased outputs live in donated arguments.
    """

    text: str
    seconds: float
    arguments: int
    outputs: int
    aliased: int
    temporary: int

    @property
    def peak(self) -> int:
        """Device memory that running it takes."""
        return self.arguments + self.outputs - self.aliased + self.temporary


def mesh_on(pod: Pod, spec: MeshSpec) -> Mesh:
    """The mesh over all devices of a pod; the groups of the last axis are neighbours.

    Raises:
      UserError: the axes multiply to another number of devices.
    """
    if spec.devices != len(pod.devices):
        fix = f"{pod.topology} has {len(pod.devices)} devices, the axes multiply to {spec.devices}"
        raise UserError("mesh", str(spec), fix)
    return spec.build(pod.devices)


def compile_step(setting: Setting, pod: Pod, kind: str) -> CompiledStep:
    """Compile one step for a pod.

    Args:
      kind: "decode", "prefill" or "verify".

    Raises:
      UserError: a setting that cannot work.
      jax.errors.JaxRuntimeError: what the compiler refuses, such as programs beyond the device's memory.
    """
    if kind not in KINDS:
        raise UserError("step", kind, f"use one of {', '.join(KINDS)}")
    mesh = mesh_on(pod, setting.mesh)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with jax.set_mesh(mesh):
            try:
                lowered = lower_step(setting, mesh, pod.device.kernels, kind)
            except UserError:
                raise
            except ValueError as error:  # how kernels refuse types and sizes
                raise UserError("step", kind, f"choose other sizes: a kernel cannot run it ({error})") from error
            executable = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        seconds = time.perf_counter() - began
        text = _optimised(Path(folder))
    memory: Any = executable.memory_analysis()
    return CompiledStep(
        text, seconds, memory.argument_size_in_bytes, memory.output_size_in_bytes,
        memory.alias_size_in_bytes, memory.temp_size_in_bytes,
    )  # fmt: skip


def _optimised(folder: Path) -> str:
    """The module as it was turned into code. `executable.as_text()` fails on modules with asynchronous updates."""
    files = sorted(folder.glob("*after_codegen.txt")) or sorted(folder.glob("*after_optimizations.txt"))
    return max((file.read_text() for file in files), key=len)


def lower_step(setting: Setting, mesh: Mesh, kernels: str, kind: str) -> Any:
    """The step with shapes for arrays, ready to be compiled."""
    plan = setting.plan(kernels)
    dtype = jnp.dtype(setting.dtype)
    table = inventory(setting.model)
    dtypes = {"mla": dtype, "kda": jnp.dtype(jnp.float32), "conv": dtype}
    layout = device.StepLayout(
        model=setting.model,
        mesh=mesh,
        param_specs=tuple((name, entry.spec) for name, entry in table.items()),
        cache_specs=tuple(plan.sharding[name].spec for name in Caches._fields),
        interleave=plan.config.geometry.groups[plan.config.geometry.attention[0]].interleave,
        how=setting.execution(kernels),
    )
    params = {
        name: jax.ShapeDtypeStruct(entry.shape, entry.dtype or dtype, sharding=NamedSharding(mesh, entry.spec))
        for name, entry in table.items()
    }
    pools: Any = (
        jax.ShapeDtypeStruct(plan.sharding[name].shape, dtypes[name], sharding=form)
        for name, form in zip(Caches._fields, device.pool_formats(layout), strict=True)
    )
    length, packing = _inputs(setting, plan, kind)
    flat = jax.ShapeDtypeStruct((length * setting.mesh.data,), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    if kind == "verify":
        step = device.compiled_verify(layout, packing, 1 + setting.drafts)
    else:
        step = device.compiled_step(layout, packing, kind == "decode", False)
    return step.lower(params, Caches(*pools), flat)


def _inputs(setting: Setting, plan: CachePlan, kind: str) -> tuple[int, device.Packing]:
    """Length of a replica's packed inputs, and how they lie in it."""
    config = plan.config
    like = jax.eval_shape(lambda: spell_out(config, initial_state(config), jnp.bool_(False)))
    null = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    each = {"decode": 1, "verify": 1 + setting.drafts}
    tokens = setting.tokens if kind == "prefill" else setting.rows * each[kind]
    inputs, last = metadata.build(config, null, [None] * setting.rows, tokens, False)
    flat, packing = device.pack(inputs)
    return flat.size + (0 if kind == "verify" else last.size), packing
