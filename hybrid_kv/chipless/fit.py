"""Meshes of a slice for a model, ranked: which fit, how many tokens they hold, how fast a decode step could be."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_kv.chipless.pod_report import Capacity, capacity, least_times
from hybrid_kv.chipless.pods import Device
from hybrid_kv.chipless.steps import Setting
from hybrid_kv.chipless.work import work_of
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import format_table
from hybrid_kv.models.axes import DATA
from hybrid_kv.models.config import KimiLinearConfig, experts_over
from hybrid_kv.runtime.describe import weight_sharding
from hybrid_kv.sharding import MeshSpec


@dataclass(frozen=True)
class Candidate:
    """A mesh and what it would give; arithmetic, nothing compiled.

    Attributes:
      setting: with the rows of one replica.
      held: bytes of a device: weights and pools.
      over: bytes that are missing.
      seconds: least time of a decode step, by what limits it.
      limit: "HBM", "MXU" or "links".
      tokens: cached tokens that fit on all replicas together beside the weights and the states asked for.
    """

    setting: Setting
    held: float
    over: float
    seconds: float
    limit: str
    tokens: int
    capacity: Capacity

    @property
    def rate(self) -> float:
        """Tokens a second of all replicas, at best."""
        return self.setting.rows * self.setting.mesh.data / self.seconds


def meshes(devices: int) -> Iterator[MeshSpec]:
    """All ways to lay three axes over so many devices."""
    for data in _divisors(devices):
        for model in _divisors(devices // data):
            yield MeshSpec(data, model, devices // data // model)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def _placements(model: KimiLinearConfig, mesh: MeshSpec) -> Iterator[KimiLinearConfig]:
    """Experts over the tensor group, and over the whole mesh where that is larger."""
    yield dataclasses.replace(model, expert_axes=experts_over("tensor"))
    if mesh.data > 1:
        yield dataclasses.replace(model, expert_axes=experts_over("mesh"))


def fit(setting: Setting, device: Device, devices: int) -> list[Candidate]:
    """Candidates for `devices` devices, those that fit first, the fastest first among them.

    Args:
      setting: `rows` and `slots` are of all replicas together, its mesh is not looked at.

    Raises:
      UserError: no mesh of so many devices divides the model.
    """
    found, refusals = [], []
    for mesh in meshes(devices):
        if setting.rows % mesh.data:
            continue
        for model in _placements(setting.model, mesh):
            one = dataclasses.replace(
                setting, model=model, mesh=mesh, rows=setting.rows // mesh.data, slots=-(-setting.slots // mesh.data)
            )
            try:
                found.append(_candidate(one, device))
            except UserError as error:
                refusals.append(error)
    if not found:
        raise refusals[0] if refusals else UserError("batch", setting.rows, "no replica count divides it")
    return sorted(found, key=lambda c: (c.over > 0, c.over, -c.rate, -c.tokens))


def _candidate(setting: Setting, device: Device) -> Candidate:
    plan = setting.plan(device.kernels)
    weights = weight_sharding(setting.model, plan, setting.dtype).local_bytes
    held = float(weights + plan.sharding.local_bytes)
    work = work_of(setting, "decode", plan)
    times = least_times(device, work, work.sent)
    limit = max(times, key=lambda unit: times[unit])
    room = capacity(setting, plan, device.hbm)
    return Candidate(
        setting=setting,
        held=held,
        over=max(held - 0.98 * device.hbm, 0.0),
        seconds=times[limit],
        limit=limit,
        tokens=room.context * setting.rows * setting.mesh.data,
        capacity=room,
    )


def fit_table(found: list[Candidate]) -> str:
    """One candidate a line."""
    head = ("mesh", "experts over", "rows", "GB a device", "fits", "decode ms", "limit", "tokens/s", "cached tokens")
    rows = []
    for c in found:
        fits = "yes" if not c.over else f"{c.over / 1e9:.1f} GB over"
        experts = "whole mesh" if DATA in c.setting.model.expert_axes else "tensor group"
        rows.append(
            (
                str(c.setting.mesh), experts, str(c.setting.rows), f"{c.held / 1e9:.2f}", fits,
                f"{1e3 * c.seconds:.2f}", c.limit, f"{c.rate:.0f}", str(c.tokens),
            )
        )  # fmt: skip
    return format_table(head, rows)
