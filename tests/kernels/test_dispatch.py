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
