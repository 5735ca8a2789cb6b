"""Which form of an op runs when none is named."""

import jax
import pytest

from pallas_kernels.dispatch import choose


@pytest.mark.parametrize(
    ("platform", "forms", "chosen"),
    [
        ("cpu", ("reference", "xla"), "reference"),
        ("tpu", ("reference", "xla"), "xla"),
        ("tpu", ("reference", "xla", "tpu"), "tpu"),
        ("gpu", ("reference", "tpu"), "reference"),
    ],
)
def test_the_platform_then_the_parallel_form_then_the_reference(platform, forms, chosen, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    available = {form: lambda form=form: form for form in forms}
    assert choose("op", None, available)() == chosen


def test_what_does_not_fit_is_taken_only_by_name(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    available = {form: lambda form=form: form for form in ("reference", "xla", "gpu")}
    assert choose("op", None, available, lambda form: form != "gpu")() == "xla"
    assert choose("op", "gpu", available, lambda form: form != "gpu")() == "gpu"


def test_a_named_module_is_imported_when_it_is_chosen():
    assert choose("op", "gpu", {"reference": len, "gpu": "math:sqrt"})(4.0) == 2.0
