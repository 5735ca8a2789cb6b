"""What XLA estimates for operations that are no kernels, by depth of loop, from the text of a module."""

import pytest

from hybrid_kv.chipless.cases import cases_of, composites_of, kernel_names
from hybrid_kv.chipless.estimates import estimated_cycles

MODULE = """HloModule jit_run

%inner (p: s32[]) -> s32[] {
  %a = s32[] add(%p, %p), backend_config={"estimated_cycles":"7","x":1}
}

%body (p: s32[]) -> s32[] {
  %b = s32[] fusion(%p), kind=kLoop, backend_config={"estimated_cycles":"100"}
  %c = s32[] custom-call(%b), custom_call_target="tpu_custom_call", backend_config={"estimated_cycles":"5000"}
  ROOT %w = s32[] while(%c), condition=%test, body=%inner
}

%fused (p: s32[]) -> s32[] {
  ROOT %d = s32[] add(%p, %p), backend_config={"estimated_cycles":"999"}
}

ENTRY %main (p: s32[]) -> s32[] {
  %e = s32[] fusion(%p), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"30"}
  ROOT %w = s32[] while(%e), condition=%test, body=%body
}
"""


def test_cycles_are_added_up_by_depth_of_loop_without_kernels_and_what_is_fused():
    assert estimated_cycles(MODULE) == (30, 100, 7)


def test_what_cannot_be_added_up_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        estimated_cycles(MODULE.replace("ENTRY ", ""))
    with pytest.raises(ValueError, match="conditional in inner"):
        estimated_cycles(MODULE.replace('add(%p, %p), backend_config={"estimated_cycles":"7"', "conditional(%p)"))


def test_composites_name_cases_of_their_kernel_once():
    for kernel in kernel_names():
        names = [case.name for case in cases_of(kernel)]
        composites = composites_of(kernel)
        assert len({c.name for c in composites}) == len(composites)
        assert {name for c in composites for name, _ in c.kernels} <= set(names)
