"""Settings in files: those of `configs/slices` can be, flags go before a file, and mistakes are named."""

import argparse
import dataclasses

import pytest

from hybrid_kv.chipless.command import slice_of
from hybrid_kv.chipless.pods import pod
from hybrid_kv.chipless.slices import Slice, read_slice, slice_names
from hybrid_kv.errors import UserError

RENTED = {
    "v5e-16",
    "v5p-8",
    "v5p-64",
    "v5p-256",
    "v6e-8",
    "v6e-16",
    "v6e-32",
    "tpu7x-8",
    "tpu7x-64",
    "tpu7x-128",
    "h100-8",
}


def _flags(**given):
    names = [field.name for field in dataclasses.fields(Slice)]
    return argparse.Namespace(**({"slice": None} | dict.fromkeys(names) | given))


def test_all_slices_that_are_promised_are_there():
    assert {name.split("-", 3 if "linear" in name else 2)[-1] for name in slice_names()} == RENTED


@pytest.mark.parametrize("name", slice_names())
def test_a_slice_divides_its_model_and_uses_all_devices(name):
    chosen = Slice(**read_slice(name))
    setting, slice_ = chosen.setting(), pod(chosen.topology)
    assert setting.mesh.devices == len(slice_.devices)
    assert setting.rows * setting.mesh.data == 64
    # The kernels' forms of pools and weights are those of the chip.
    plan = setting.plan(slice_.device.kernels)
    assert plan.sharding.local_bytes < slice_.device.hbm


def test_flags_go_before_the_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('model = "kimi-linear-48b"\ntopology = "v6e:2x4"\nmesh = "dcp=8"\nbatch = 16\n')
    chosen = slice_of(_flags(slice=str(file), batch=8, dtype="float32"))
    assert (chosen.batch, chosen.mesh, chosen.dtype, chosen.context) == (8, "dcp=8", "float32", 131_072)


@pytest.mark.parametrize(("text", "words"), [
    ('mesh = "dcp=8"\nbath = 3', "slice bath: got 3; use fields among model, topology"),
    ("batch = true", "slice batch: got True; use a whole number"),
    ("mesh = 8", "slice mesh: got 8; use text"),
    ("model = ", "the file must be TOML"),
    ("batch = " + "9" * 5000, "the file must be TOML"),
    ("batch = 0x" + "9" * 5000, "slice batch: got '0x9999.*'; use a whole number of 64 bits"),
    ("batch = " + "[" * 20_000, "the file must be TOML"),
])  # fmt: skip
def test_mistakes_in_a_file_are_named(tmp_path, text, words):
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        read_slice(str(file))


@pytest.mark.parametrize(("change", "words"), [
    ({"batch": 0}, "batch: got 0; use at least 1"),
    ({"drafts": -1}, "drafts: got -1; use 0 or more"),
    ({"drafts": 10**9}, "drafts: got 1000000000; .* fewer than 2[*][*]30 tokens of a verify step"),
    ({"tokens": 2**30}, "tokens: got 1073741824; use at least 1 and fewer than 2[*][*]30"),
    ({"mesh": "model=" + "9" * 5000}, "mesh: got 'model=9*'; model has 5000 digits"),
    ({"exchange": "ring"}, "exchange: got 'ring'; use one of reduce_scatter, all_to_all"),
    ({"dtype": "float8"}, "dtype: got 'float8'; use one of bfloat16, float32"),
    ({"expert_form": "zip"}, "expert_form: got 'zip'; use one of plain, packed, native"),
    ({"experts": "some"}, "experts: got 'some'"),
    ({"residual": "stream"}, "residual: got 'stream'; use one of replicated, sequence"),
    ({"kda": "dcp"}, "kda: got 'dcp'; use one of tensor, model, replicated"),
    ({"model": "kimi-9"}, "model: got 'kimi-9'"),
])  # fmt: skip
def test_values_that_cannot_be_are_named(change, words):
    with pytest.raises(UserError, match=words):
        Slice(**(read_slice("kimi-linear-48b-v6e-8") | change)).setting()


def test_model_and_topology_are_needed_and_slices_are_listed():
    with pytest.raises(UserError, match="topology: got None; give --topology, or a --slice"):
        slice_of(_flags(model="kimi-k3"))
    with pytest.raises(UserError, match="slice: got ''; give a TOML file"):
        slice_of(_flags(slice="", model="kimi-k3", topology="v6e:2x4"))
    with pytest.raises(UserError, match="slice: got 'v6e-9'; give a TOML file or use one of kimi-k3-tpu7x-128"):
        slice_of(_flags(slice="v6e-9"))


@pytest.mark.parametrize(("form", "topology", "words"), [
    ("native", "v6e:2x4", "expert_form: got 'native'; only tpu7x converts it, not v6e: use packed or plain"),
    ("packed", "h100:8", "expert_form: got 'packed'; h100 has no kernel for it: use plain"),
])  # fmt: skip
def test_a_form_of_experts_that_the_chip_cannot_run_is_refused(form, topology, words):
    with pytest.raises(UserError, match=words):
        Slice(model="kimi-k3", topology=topology, expert_form=form).setting()


@pytest.mark.parametrize(("model", "topology", "form"), [
    ("kimi-k3", "v6e:2x4", "packed"), ("kimi-k3", "tpu7x:2x2x1", "native"), ("kimi-linear-48b", "v6e:2x4", "plain"),
    ("tiny-k3", "v6e:2x4", "plain"),  # experts of a width of 32
])  # fmt: skip
def test_experts_lie_as_stored_where_a_kernel_takes_them(model, topology, form):
    assert Slice(model=model, topology=topology).setting().model.expert_form == form
