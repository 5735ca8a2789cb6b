"""Full-size models compile for pods that are not there, fit, use their kernels, and move no more than they must.

Two of the steps of `scripts/pod_table.py`, which compiles them all.
"""

import dataclasses
import time

import pytest

from hybrid_kv.chipless import module, pod_report
from hybrid_kv.chipless.pods import pod
from hybrid_kv.chipless.slices import Slice, read_slice
from hybrid_kv.chipless.steps import compile_step, mesh_on
from hybrid_kv.chipless.targets import compiler_installed
from hybrid_kv.errors import UserError
from hybrid_kv.sharding import MeshSpec

KERNELS = {"causal_conv1d", "kda_decode", "mla_write", "mla_attention", "experts_ffn", "copy_blocks"}
# What is sent or made anew in a step is made of tokens; caches, states and expert weights are far above.
LARGE = 50e6

pytestmark = [pytest.mark.aot, pytest.mark.skipif(not compiler_installed(), reason="needs the extra [aot]")]


@pytest.fixture(scope="module", params=["kimi-linear-48b-v6e-8", "kimi-k3-tpu7x-64"])
def compiled(request):
    chosen = Slice(**read_slice(request.param))
    slice_, setting = pod(chosen.topology), chosen.setting()
    began = time.process_time()
    step = compile_step(setting, slice_, "decode")
    # Beside other work a compilation takes longer than it computes.
    return setting, slice_, dataclasses.replace(step, seconds=min(step.seconds, time.process_time() - began))


def test_it_fits_with_caches_in_place(compiled):
    setting, slice_, step = compiled
    caches = setting.plan("tpu").sharding.local_bytes
    assert step.aliased >= caches
    assert step.temporary < 0.3e9
    assert step.peak < slice_.device.hbm
    assert step.seconds < 120


def test_the_kernels_are_in_the_module(compiled):
    assert module.kernels(module.operations(compiled[2].text)).keys() >= KERNELS


def test_no_cache_state_or_expert_is_copied_or_sent(compiled):
    found = module.operations(compiled[2].text)
    assert [(op.kind, op.arrays) for op in module.collectives(found) if op.bytes > LARGE] == []
    # What is prefetched into vector memory is named a copy as well: the head, in pieces.
    made = [op for op in module.made(found, LARGE) if op.name.split(".")[0] not in ("copy-start", "copy-done")]
    assert [(op.kind, op.arrays) for op in made] == []


def test_a_layer_sends_what_it_has_to(compiled, monkeypatch):
    setting, slice_, step = compiled
    monkeypatch.setattr(pod_report, "compile_step", lambda *_: step)
    report = pod_report.step_report(setting, slice_, "decode", setting.plan("tpu"))
    for kind in pod_report.LAYERS:
        if report.work.layers[kind]:
            assert report.wire[kind] == pytest.approx(report.work.wire[kind], rel=0.05)


def test_an_axis_may_be_a_part_of_an_axis_of_the_torus():
    mesh = mesh_on(pod("v6e:4x8"), MeshSpec(data=2, dcp=16))
    assert dict(mesh.shape) == {"data": 2, "model": 1, "dcp": 16}
    assert len(set(mesh.devices.flat)) == 32


def test_a_mesh_of_another_size_is_refused():
    setting = Slice(**read_slice("kimi-linear-48b-v6e-8")).setting()
    with pytest.raises(UserError, match="v6e:4x4 has 16 devices, the axes multiply to 8"):
        mesh_on(pod("v6e:4x4"), dataclasses.replace(setting, mesh=MeshSpec(dcp=8)).mesh)
