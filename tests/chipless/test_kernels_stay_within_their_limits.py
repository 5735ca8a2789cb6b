"""Every case of the kernel benchmark compiles for its chips and costs no more than what is stored with it."""

import functools
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from hybrid_kv.chipless.cases import cases_of, kernel_names
from hybrid_kv.chipless.measure import measure_on
from hybrid_kv.chipless.targets import compiler_installed

needs_compiler = pytest.mark.skipif(not compiler_installed(), reason="libtpu is not installed (extra aot)")

MEASURED = [
    (kernel, chip) for kernel in kernel_names() for chip in sorted({c for case in cases_of(kernel) for c in case.chips})
]


measured = functools.cache(measure_on)


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(("kernel", "chip"), MEASURED)
def test_cases_stay_within_their_limits(kernel, chip):
    found = measured(kernel, chip)
    assert {m.case for m in found} == {case.name for case in cases_of(kernel) if chip in case.chips}
    for measurement in found:
        assert measurement.too_slow == [], measurement
        # A limit far above what is measured guards nothing.
        assert measurement.allowed_cycles <= 1.15 * measurement.cycles, measurement
        assert measurement.share_of_limit <= 1, measurement


@pytest.mark.aot
@needs_compiler
def test_the_yardsticks_cost_what_they_must():
    """A copy is bound by memory and a dot by the matrix units; neither can be far from it, nor beyond."""
    copy, dot = measured("yardstick", "v6e")
    assert copy.limit_unit == "HBM" and 0.98 <= copy.share_of_limit <= 1
    assert copy.hbm_bytes == 2 * 32768 * 1024 * 4
    assert dot.limit_unit == "MXU" and 0.75 <= dot.share_of_limit <= 1
    assert dot.busy is not None and dot.busy["MATMUL"] == pytest.approx(dot.share_of_limit, abs=0.05)
    slow = replace(copy, allowed_cycles=copy.cycles - 1)
    assert slow.too_slow == [f"cycles: {copy.cycles:,} > {copy.cycles - 1:,}"]


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_kda_is_as_near_the_limit_as_it_is_meant_to_be(chip):
    found = {m.case: m for m in measured("kda", chip)}
    assert found["prefill-any"].cycles_each <= 340 and found["prefill-bounded"].cycles_each <= 270
    assert found["decode-32-heads"].share_of_limit >= 0.95
    assert found["decode-32-heads-bf16"].share_of_limit >= 0.85
    if chip == "v6e":
        for gate in ("any", "bounded"):
            assert found[f"prefill-{gate}-4-saves-inside"].cycles <= 1.06 * found[f"prefill-{gate}"].cycles
        assert found["verify-4"].cycles <= 1.3 * found["decode-32-heads"].cycles


@pytest.mark.aot
@needs_compiler
def test_the_benchmark_prints_json(repo_root):
    command = [sys.executable, "scripts/bench_kernels.py", "--kernel", "yardstick", "--chip", "v6e", "--case", "copy"]
    done = subprocess.run([*command, "--json"], cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["cycles"] <= found["allowed_cycles"] and found["libtpu"]


@pytest.mark.aot
@needs_compiler
def test_scalars_come_from_the_wrapper_and_a_refusal_is_told():
    script = """
import jax, jax.numpy as jnp
from hybrid_kv.chipless.compile import compile_for, refusal
from hybrid_kv.chipless.operands import kernel_calls
from tests.chipless.samples import LENGTHS, SAMPLES
for function, data in SAMPLES.values():
    (call,) = kernel_calls("v6e", jax.jit(function), jnp.array(LENGTHS, jnp.int32), data)
    print(call.name, {i: x.tolist() for i, x in call.scalars.items()}, call.missing)
(call,) = kernel_calls("v6e", function, jax.ShapeDtypeStruct((8,), jnp.int32), data)
print(call.scalars, call.missing)
compilation = compile_for("v6e", lambda x, y: x + y, data, data, donate=(0,))
print(compilation.alias_bytes == compilation.output_bytes == 4 * data.size)
big = jax.ShapeDtypeStruct((1 << 20, 1 << 16), jnp.float32)
try:
    compile_for("v6e", lambda x: x + 1, big)
except Exception as error:
    print(refusal(error))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    lengths = "[3, 0, 7, 5, 9, 0, 1, 2]"
    assert lines[0] == f"ragged_steps {{0: 6, 1: {lengths}}} ()"
    assert lines[1] == f"gather_rows {{0: {lengths}}} ()"
    assert lines[2:4] == ["{} (0,)", "True"]
    assert "RESOURCE_EXHAUSTED" in lines[4]
