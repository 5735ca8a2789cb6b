"""Routed experts give the same logits in every form in which they can lie on the device."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.models.checkpoint_io import load, random_checkpoint
from hybrid_kv.models.published import named
from tests.models.harness import Runner, mesh_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny K3 whose experts are wide enough to be packed on the device."""
    raw = named("tiny-k3")
    raw["text_config"] |= {"routed_expert_hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8}
    folder = tmp_path_factory.mktemp("wide-k3")
    return folder, random_checkpoint(folder, raw, seed=3)


def _logits(folder, config, mesh):
    run = Runner(config, load(folder, config, mesh, jnp.float32), mesh, rows=2, capacity=64)
    prompts = np.random.default_rng(0).integers(1, 200, (2, 20)).tolist()
    return run.run(run.batch(prompts, [0, 0], pad_to=64))[:40]


@pytest.mark.parametrize(("form", "mesh"), [("packed", (1, 1)), ("native", (2, 2))])
def test_logits_are_those_of_plain_experts(checkpoint, form, mesh):
    folder, config = checkpoint
    plain = _logits(folder, config, mesh_of(*mesh))
    other = _logits(folder, dataclasses.replace(config, expert_form=form), mesh_of(*mesh))
    np.testing.assert_allclose(other, plain, atol=1e-4)


@pytest.mark.parametrize(("change", "words"), [
    ({"expert_form": "int4"}, "expert_form: got 'int4'; use one of plain, packed, native"),
    ({"expert_form": "packed", "packed_experts": False}, "experts are not stored in MXFP4: use plain"),
    ({"expert_form": "packed", "expert_width": 96}, "expert_width: got 96; packed on the device"),
])  # fmt: skip
def test_forms_that_cannot_be_are_refused(checkpoint, change, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(checkpoint[1], **change)
