"""Chips by name, and what is said when the compiler is missing or the process is not fresh."""

import importlib.util

import pytest

from hybrid_kv.chipless import cases, targets
from hybrid_kv.chipless.targets import CHIPS, chip_named, prepare_environment
from hybrid_kv.errors import UserError


def test_limits_name_the_unit_that_sets_them():
    v6e = chip_named("v6e")
    assert v6e.limit(hbm_bytes=937.2e3).cycles == pytest.approx(1000, rel=1e-3)
    assert v6e.limit(hbm_bytes=1, macs=262_144_000).unit == "MXU"
    assert CHIPS["tpu7x"].hbm_bytes_per_cycle == pytest.approx(1677, abs=1)


def test_an_unknown_chip_is_refused_with_those_that_exist():
    with pytest.raises(UserError, match="v5e, v5p, v6e, tpu7x"):
        chip_named("v9")


def test_a_missing_compiler_is_named_with_the_extra_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"hybrid-kv\[aot\]"):
        prepare_environment()


def test_a_process_that_loaded_the_compiler_keeps_its_flags(monkeypatch):
    monkeypatch.setattr(targets, "compiler_installed", lambda: True)
    monkeypatch.setattr(targets, "_compiler_loaded", lambda: True)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other")
    with pytest.raises(UserError, match="LIBTPU_INIT_ARGS"):
        prepare_environment("somewhere")


def test_kernels_with_cases_are_found_and_others_refused():
    assert "yardstick" in cases.kernel_names()
    assert {case.name for case in cases.cases_of("yardstick")} == {"copy", "dot"}
    with pytest.raises(UserError, match="yardstick"):
        cases.cases_of("nothing")
