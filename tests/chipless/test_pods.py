"""What a step has to do at least, and which meshes of a slice a model fits."""

import dataclasses
import re

import pytest

from hybrid_kv.chipless import pod_report, steps
from hybrid_kv.chipless.fit import fit, fit_table
from hybrid_kv.chipless.pod_report import capacity
from hybrid_kv.chipless.pods import DEVICES, pod
from hybrid_kv.chipless.slices import model_of
from hybrid_kv.chipless.steps import KINDS, Setting
from hybrid_kv.chipless.work import ring, work_of
from hybrid_kv.cli import main
from hybrid_kv.errors import UserError
from hybrid_kv.models.axes import DATA, TENSOR
from hybrid_kv.models.config import kda_over
from hybrid_kv.sharding import MeshSpec

LINEAR, K3 = model_of("kimi-linear-48b"), model_of("kimi-k3")
V6E, TPU7X = DEVICES["v6e"], DEVICES["tpu7x"]


def _work(setting, kind="decode"):
    return work_of(setting, kind, setting.plan("tpu"))


def test_bytes_and_products_of_a_decode_step():
    """64 rows at 131,072 tokens on 16 devices: figures by hand, weights from the published count."""
    work = _work(Setting(LINEAR, MeshSpec(model=4, dcp=4)))
    assert work.rows == 64 * 131_072 * 7 * 1152 / 4
    assert work.states == 2 * 64 * 20 * 32 * 128 * 128 * 4 / 16
    # All of 49.12 B parameters but the table, over 16, and what is replicated; 13 % of the experts stay unchosen.
    assert 0.8 * 49.12e9 * 2 / 16 < work.weights < 1.05 * 49.12e9 * 2 / 16
    assert work.macs == pytest.approx(64 * (3.1e9 + 7 * 131_072 * 32 * 1088) / 16, rel=0.1)


def test_bytes_on_the_wire_of_a_decode_step():
    work = _work(Setting(LINEAR, MeshSpec(model=4, dcp=4)))
    stream = 2 * ring(64 * 2304 * 2, 16)
    assert work.wire["kda"] == work.wire["moe"] == stream
    queries = ring(64 * 8 * 576 * 2, 4) + ring(4 * 64 * 8 * 4, 4) + ring(64 * 8 * 512 * 2, 4)
    assert work.wire["mla"] == stream + queries
    assert work.sent == 20 * stream + 7 * (stream + queries) + stream + 26 * stream + stream


@pytest.mark.parametrize(("kda", "devices"), [("model", 4), ("replicated", 1)])
def test_kda_over_fewer_devices_sends_less_and_reads_and_holds_more(kda, devices):
    """States of all rows, weights of 20 layers; what is sent is the sum over the devices that split the heads."""
    whole = Setting(LINEAR, MeshSpec(model=4, dcp=4))
    some = dataclasses.replace(whole, model=dataclasses.replace(LINEAR, kda_axes=kda_over(kda)))
    work, usual = _work(some), _work(whole)
    assert work.wire == usual.wire | {"kda": 2 * ring(64 * 2304 * 2, devices)}
    assert work.states == usual.states * 16 / devices
    assert work.macs > usual.macs
    weights = 20 * (4 * 4096 * 2304 + 2 * 4096 * 128) * 2  # projections of q, k, v and output, second halves of gates
    assert work.weights - usual.weights == pytest.approx(weights * (1 / devices - 1 / 16), rel=0.01)
    rooms = (capacity(setting, setting.plan("tpu"), V6E.hbm) for setting in (some, whole))
    more = 131_072 * 7 * 1152 / 4, 20 * 2_170_880
    assert [room.request for room in rooms] == [more[0] + more[1] / devices, more[0] + more[1] / 16]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kda", "sent"), [("tensor", 30 / 16), ("model", (15 + 3) / 16), ("replicated", 15 / 16)])
def test_a_stream_split_by_tokens_sends_as_much_as_one_that_is_summed_for_all(kind, kda, sent):
    """Input gathered and output scattered; behind equal copies of KDA heads ranks keep their own tokens, unsent."""
    model = dataclasses.replace(LINEAR, kda_axes=kda_over(kda))
    summed = Setting(model, MeshSpec(model=4, dcp=4))
    split = dataclasses.replace(summed, residual="sequence")
    tokens = {"decode": 64, "verify": 256, "prefill": 8192}[kind]
    usual, work = _work(summed, kind), _work(split, kind)
    once = ring(tokens * 2304 * 2, 16) + ring((64 if kind == "prefill" else tokens) * 2304 * 2, 16)
    assert work.wire == usual.wire | {"kda": pytest.approx(sent * tokens * 2304 * 2), "model": once}
    behind = 20 * (4096 * 2304 + 4096 * 128 + 128 * 2304) if kda == "replicated" else 0
    assert usual.macs - work.macs == pytest.approx(tokens * behind * 15 / 16)
    assert (work.weights, work.states, work.rows) == (usual.weights, usual.states, usual.rows)


def test_a_decode_step_that_does_not_divide_over_the_group_is_summed_for_all():
    few = Setting(LINEAR, MeshSpec(model=4, dcp=4), rows=8)
    assert _work(dataclasses.replace(few, residual="sequence")) == _work(few)


def test_a_prefill_moves_the_context_and_not_the_queries():
    work = _work(Setting(LINEAR, MeshSpec(model=4, dcp=4), tokens=8192), "prefill")
    assert work.wire["mla"] == 2 * ring(8192 * 2304 * 2, 16) + ring(8192 * 576 * 2, 4)


def test_striped_rows_hold_eight_times_the_tokens_of_replicated_ones():
    """DCP 8 against the latent rows replicated over the same 8 devices."""
    striped, replicated = (
        capacity(s, s.plan("tpu"), TPU7X.hbm)
        for s in (Setting(LINEAR, MeshSpec(dcp=8), rows=32), Setting(LINEAR, MeshSpec(model=8), rows=32))
    )
    assert striped.context * 32 / (replicated.context * 32) >= 7.9


def test_the_fastest_mesh_that_fits_comes_first():
    found = fit(Setting(LINEAR, MeshSpec()), V6E, 16)
    assert found[0].setting.mesh == MeshSpec(dcp=16)
    fitting = [c for c in found if not c.over]
    assert found[: len(fitting)] == fitting
    assert [c.rate for c in fitting] == sorted((c.rate for c in fitting), reverse=True)
    assert all(c.held < V6E.hbm for c in fitting)
    assert "dcp=16" in fit_table(found).splitlines()[2]


def test_k3_needs_experts_over_the_whole_mesh_where_heads_do_not_divide_it():
    found = fit(Setting(K3, MeshSpec()), TPU7X, 128)
    fitting = {c.setting.model.expert_axes for c in found if not c.over}
    assert fitting == {(DATA, *TENSOR)}
    assert all(c.setting.mesh.tensor <= 32 for c in found)


@pytest.mark.parametrize(("change", "words"), [
    ({"mesh": MeshSpec(model=3)}, "multiple of model [*] dcp = 3"),
    ({"rows_per_rank": 65}, "rows_per_rank: got 65; kernels take pages of a multiple of 16 rows"),
    ({"rows_per_rank": 1 << 29}, "rows_per_rank: got 536870912; use blocks of fewer than 2[*][*]30 tokens"),
    ({"residual": "sequence", "tokens": 8190}, "tokens: got 8190; use a multiple of model [*] dcp = 8 devices"),
    ({"residual": "stream"}, "residual: got 'stream'; use one of replicated, sequence"),
    ({"dtype": "float32"}, "dtype: got 'float32'; kernels of a TPU take bfloat16"),
    ({"context": 2_000_000}, "max_context: got 2000000"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused_before_anything_is_compiled(change, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(Setting(LINEAR, MeshSpec(dcp=8)), **change).plan("tpu")


@pytest.mark.parametrize(("name", "words"), [
    ("chart.nope", "end it in one of .*png"), ("chart", "end it in one of"), ("no/chart.png", "a folder that is there"),
])  # fmt: skip
def test_a_chart_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, capsys, name, words):
    monkeypatch.setattr(pod_report, "report", lambda *_: pytest.fail("compiled"))
    file = tmp_path / name
    assert main(["compile", "--slice", "kimi-linear-48b-v6e-8", "--chart", str(file)]) == 2
    assert re.search(f"error: chart: got '{file}'; .*{words}", capsys.readouterr().err)


def test_a_prefill_of_fewer_tokens_than_rows_wants_logits_of_its_tokens_only():
    few, some = (_work(Setting(LINEAR, MeshSpec(dcp=8), rows=rows, tokens=8), "prefill") for rows in (64, 8))
    assert (few.macs, few.wire) == (some.macs, some.wire)


def test_what_a_kernel_cannot_run_is_a_refusal_of_the_step(monkeypatch):
    def refuse(*_):
        raise ValueError("kda verify: got 1001 tokens")

    monkeypatch.setattr(steps, "lower_step", refuse)
    with pytest.raises(UserError, match=r"step: got 'verify'; choose other sizes: .*kda verify: got 1001 tokens"):
        steps.compile_step(Setting(LINEAR, MeshSpec(dcp=8)), pod("v6e:2x4"), "verify")


def test_a_slice_of_an_unknown_chip_is_refused():
    with pytest.raises(UserError, match="topology: got 'v9:2x2'; write chip and shape"):
        pod("v9:2x2")


def test_no_mesh_is_a_refusal():
    with pytest.raises(UserError):
        fit(Setting(LINEAR, MeshSpec(), rows=1), V6E, 7)
