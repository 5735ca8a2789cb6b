"""A model step on a pod that is not there: does it compile, does it fit, what does it move, how fast could it be."""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from hybrid_kv.chipless import module
from hybrid_kv.chipless.compile import refusal
from hybrid_kv.chipless.pods import Device, Pod
from hybrid_kv.chipless.steps import Setting, compile_step
from hybrid_kv.chipless.work import Work, work_of
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import format_table
from hybrid_kv.planning import CachePlan
from hybrid_kv.runtime.describe import weight_sharding

LAYERS = ("kda", "mla", "dense", "moe")
UNITS = ("HBM", "MXU", "links")
_PARTS = ("weights", "mla", "kda", "conv", "padding", "temporary")
GB = 1e9


@dataclass(frozen=True)
class Capacity:
    """How much more fits, from the sizes of the pools: nothing is compiled for it.

    Attributes:
      request: bytes of one request filled to the context, its running state included.
      batch: most requests of a replica at the setting's context; states beyond one a request given up.
      context: most tokens of each of the setting's rows, with its states kept.
    """

    request: float
    batch: int
    context: int


@dataclass(frozen=True)
class StepReport:
    """Of one step; bytes and seconds are of one device.

    Attributes:
      kind: "decode", "prefill" or "verify".
      refused: why the compiler refused it; "" if it compiled.
      over: bytes that are missing on the device; at least those of the arguments alone if the compiler does not say.
      seconds: of compilation.
      memory: arguments by what they are, temporaries.
      work: the least that has to be done.
      wire: bytes sent for one layer of each kind, and once a step ("model"), as compiled.
      collectives: (kind of layer, kind of collective, bytes sent) of each one that is written.
      kernels: names of Pallas kernels in the module.
      times: seconds that HBM, matrix units and links need at least.
    """

    kind: str
    refused: str
    over: float
    seconds: float
    memory: dict[str, float]
    work: Work
    wire: dict[str, float]
    collectives: list[tuple[str, str, float]]
    kernels: dict[str, int]
    times: dict[str, float]

    @property
    def roofline(self) -> float:
        """Seconds below which no implementation can be, if all units work at once."""
        return max(self.times.values())


@dataclass(frozen=True)
class PodReport:
    """Steps of a setting on a pod."""

    topology: str
    setting: Setting
    capacity: Capacity
    hbm: float
    steps: tuple[StepReport, ...]

    @property
    def fits(self) -> bool:
        return not any(step.over or step.refused for step in self.steps)


def report(setting: Setting, pod: Pod, kinds: Sequence[str]) -> PodReport:
    """Compile the steps and read what came out.

    Raises:
      UserError: a setting that cannot work.
    """
    plan = setting.plan(pod.device.kernels)
    return PodReport(
        topology=pod.topology,
        setting=setting,
        capacity=capacity(setting, plan, pod.device.hbm),
        hbm=pod.device.hbm,
        steps=tuple(step_report(setting, pod, kind, plan) for kind in kinds),
    )


def step_report(setting: Setting, pod: Pod, kind: str, plan: CachePlan) -> StepReport:
    """Compile one step and read it. A program too large for the device is a report, not an error."""
    work = work_of(setting, kind, plan)
    weights = weight_sharding(setting.model, plan, setting.dtype).local_bytes
    memory = {"weights": float(weights)} | {a.name: float(a.local_bytes(plan.mesh)) for a in plan.sharding.arrays}
    times = least_times(pod.device, work, work.sent)
    try:
        step = compile_step(setting, pod, kind)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        over = max(beyond(str(error)), sum(memory.values()) - pod.device.hbm, 0.0)
        return StepReport(kind, refusal(error), over, 0.0, memory, work, {}, [], {}, times)
    found = module.operations(step.text)
    scopes = module.scopes_of(found, (*LAYERS, "sample"))
    sent = [
        (
            scopes.get(op.computation, "sample" if op.within("sample") else "model"),
            op.kind,
            module.wire_bytes(op) * _repeats(op, setting.tokens),
        )
        for op in module.collectives(found)
        if not _elsewhere(op)
    ]
    wire = {kind: sum(size for of, _, size in sent if of == kind) for kind in (*LAYERS, "model")}
    total = sum(size * work.layers[kind] for kind, size in wire.items())
    memory |= {"padding": max(step.arguments - sum(memory.values()), 0.0), "temporary": float(step.temporary)}
    return StepReport(
        kind, "", max(step.peak - pod.device.hbm, 0.0), step.seconds, memory, work, wire, sent, module.kernels(found),
        least_times(pod.device, work, total),
    )  # fmt: skip


def least_times(device: Device, work: Work, sent: float) -> dict[str, float]:
    """Seconds that each of `UNITS` needs at least for work and for the bytes that a device sends."""
    return {"HBM": work.hbm / device.bandwidth, "MXU": 2 * work.macs / device.flops, "links": sent / device.link}


def _elsewhere(operation: module.Operation) -> bool:
    """Whether it belongs to a branch that a step of this kind does not take: queries that travel in a prefill of rows
    that all expand, see `models.mla`."""
    scope = operation.scope.split("/")
    return "mla" in scope and "cond" in scope[scope.index("mla") :]


def _repeats(operation: module.Operation, tokens: int) -> int:
    """How often a layer runs it: context of `tokens` new tokens is gathered some rows at a time, in a loop."""
    scope = operation.scope.split("/")
    if operation.kind != "all-gather" or "mla" not in scope or "while" not in scope[scope.index("mla") :]:
        return 1
    return -(-tokens // math.prod(operation.arrays[0][1][:-1]))


def beyond(message: str) -> float:
    """Bytes by which a program exceeds the device, from the compiler's refusal; 0 if it does not say."""
    size = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"Exceeded hbm capacity by {size}", message)
    if found:
        return _bytes(found[1], found[2])
    found = re.search(rf"\({size}\) exceeds available HBM \({size}\)", message)
    return _bytes(found[1], found[2]) - _bytes(found[3], found[4]) if found else 0.0


def _bytes(number: str, unit: str) -> float:
    return float(number.rstrip(".")) * 1024 ** " KMGT".index(unit or " ")


def capacity(setting: Setting, plan: CachePlan, hbm: float) -> Capacity:
    """What fits beside the weights; temporaries are not counted, 2 % of the device is left for them and for code."""
    mesh, sharding = plan.mesh, plan.sharding
    weights = weight_sharding(setting.model, plan, setting.dtype).local_bytes
    free = 0.98 * hbm - weights
    geometry = plan.config.geometry
    block_tokens = geometry.groups[geometry.attention[0]].block
    mla = sharding["mla"]
    block = mla.local_bytes(mesh) / (mla.shape[1] // mesh.data)
    states = (sharding["kda"], sharding["conv"])
    slot = sum(array.local_bytes(mesh) / (array.shape[1] // mesh.data) for array in states)
    request = -(-setting.context // block_tokens) * block + slot
    kept = free - setting.slots * slot
    return Capacity(
        request=request,
        batch=max(int(free // request), 0),
        context=max(int(kept / setting.rows // block) * block_tokens, 0),
    )


def as_json(result: PodReport) -> str:
    """The report as one JSON object."""
    setting = {f.name: getattr(result.setting, f.name) for f in dataclasses.fields(Setting) if f.name != "model"}
    setting |= {name: getattr(result.setting.model, name) for name in ("expert_axes", "kda_axes")}
    return json.dumps(
        {
            "topology": result.topology,
            "setting": setting | {"mesh": str(result.setting.mesh)},
            "hbm": result.hbm,
            "capacity": dataclasses.asdict(result.capacity),
            "steps": [
                dataclasses.asdict(step) | {"roofline": step.roofline, "least_wire": step.work.wire}
                for step in result.steps
            ],
        },
        indent=2,
    )


def table(result: PodReport) -> str:
    """The report as text."""
    setting, room = result.setting, result.capacity
    lines = [
        f"{result.topology}, mesh {setting.mesh}: {setting.rows} rows a replica at {setting.context} tokens, "
        f"{setting.slots} states, {setting.dtype}",
        f"a request takes {room.request / GB:.3f} GB a device; at most {room.batch} rows fit, or "
        f"{room.context} tokens for each of {setting.rows} rows",
        "",
        format_table(_HEAD, [_row(result, step) for step in result.steps]),
        "",
        "bytes that a device sends for a layer, compiled / least",
        format_table(("step", *LAYERS, "once a step"), [_wire_row(step) for step in result.steps if not step.refused]),
    ]
    for step in result.steps:
        lines.append(f"{step.kind}: " + (step.refused or "kernels " + ", ".join(sorted(step.kernels))))
    return "\n".join(lines)


_HEAD = (
    "step", "compiled", "GB", "weights", "mla", "kda", "conv", "padding", "temporary", "room", "HBM ms", "MXU ms",
    "links ms", "at least",
)  # fmt: skip


def _row(result: PodReport, step: StepReport) -> tuple[str, ...]:
    held = sum(step.memory.values())
    room = f"{(result.hbm - held) / GB:.2f}" if not step.over else f"-{step.over / GB:.2f}"
    sizes = [f"{step.memory.get(k, 0) / GB:.2f}" for k in _PARTS]
    times = [f"{1e3 * step.times[unit]:.2f}" for unit in UNITS]
    done = f"{step.seconds:.0f} s" if not step.refused else "refused"
    return (step.kind, done, f"{held / GB:.2f}", *sizes, room, *times, f"{1e3 * step.roofline:.2f} ms")


def _wire_row(step: StepReport) -> tuple[str, ...]:
    least = step.work.wire
    each = (f"{step.wire[k]:.0f} / {least[k]:.0f}" if step.work.layers[k] else "-" for k in (*LAYERS, "model"))
    return (step.kind, *each)


def check_chart(file: Path) -> None:
    """Refuse a file that `draw` could not write; compiling takes minutes.

    Raises:
      UserError: matplotlib (the `plot` extra) is not installed, no such folder, or a type that it does not write.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError("chart", str(file), "install the plot extra: pip install 'hybrid-kv[plot]'") from None
    if not file.parent.is_dir() or file.is_dir():
        raise UserError("chart", str(file), "give a file in a folder that is there")
    types = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in types:
        raise UserError("chart", str(file), f"end it in one of {', '.join(types)}")


def draw(result: PodReport, file: Path) -> None:
    """Chart of the memory and of the least times of every step, to a file (type by its ending).

    Raises:
      UserError: as `check_chart`.
    """
    check_chart(file)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    memory, times = figure.subplots(1, 2)
    kinds = [step.kind for step in result.steps]
    bottom = [0.0] * len(kinds)
    for part in _PARTS:
        sizes = [step.memory.get(part, 0) / GB for step in result.steps]
        memory.bar(kinds, sizes, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    memory.axhline(result.hbm / GB, color="black", linestyle="--", label="device")
    memory.set(title="Memory", ylabel="GB a device")
    memory.legend(fontsize="small")
    for i, unit in enumerate(UNITS):
        at = [x + 0.27 * (i - 1) for x in range(len(kinds))]
        times.bar(at, [1e3 * step.times[unit] for step in result.steps], width=0.25, label=unit)
    times.set_xticks(range(len(kinds)), kinds)
    times.set(title="Least time by unit", ylabel="ms a step")
    times.legend(fontsize="small")
    figure.suptitle(f"{result.topology}, mesh {result.setting.mesh}")
    figure.savefig(file, dpi=110)
