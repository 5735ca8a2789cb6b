"""Text of a compiled module says which collectives, kernels and arrays it has."""

import pytest

from hybrid_kv.chipless import module
from hybrid_kv.chipless.pod_report import beyond

TEXT = """HloModule jit_local, is_scheduled=true

%fused_computation.1 (param_0.1: bf16[26,16,2304,1024]) -> bf16[16,2304,1024] {
  %param_0.1 = bf16[26,16,2304,1024]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %slice.9 = bf16[16,2304,1024]{2,1,0:T(8,128)(2,1)} slice(%param_0.1), slice={[0:1]}
}

ENTRY %main (x: bf16[64,2304]) -> bf16[64,2304] {
  %fusion.1 = bf16[16,2304,1024]{2,1,0} fusion(%p), calls=%fused_computation.1, metadata={op_name="a/moe/squeeze"}
  %psum.66 = bf16[64,2304]{1,0:S(1)} all-reduce(%f), replica_groups={{0,1,2,3},{4,5,6,7}}, metadata={op_name="a/kda/b"}
  %ag = bf16[64,8,576]{2,0,1} all-gather(%q), replica_groups=[4,4]<=[16], metadata={op_name="a/mla/all_gather"}
  %rs = (f32[64,2]{1,0}) reduce-scatter(%q), replica_groups={{0,1,2,3}}, metadata={op_name="a/mla/reduce_scatter"}
  %ars = bf16[8,128]{1,0} all-reduce-start(%q), replica_groups={{0,1}}
  %ags = (bf16[64,4,576]{2,1,0}, bf16[64,32,576]{2,1,0}) all-gather-start(%q), replica_groups={{0,1,2,3,4,5,6,7}}
  %kda_decode.1 = (bf16[64,2,128]{2,1,0}, f32[20,1024,2,128,128]) custom-call(%a), custom_call_target="tpu_custom_call"
  %copy.3 = f32[20,1024,2,128,128]{4,3,2,1,0:T(8,128)} copy(%a)
  ROOT %t = bf16[64,2304]{1,0} get-tuple-element(%w), index=0
}
"""


@pytest.fixture(scope="module")
def found():
    return module.operations(TEXT)


def test_collectives_have_group_scope_and_bytes(found):
    reduce, gather, scatter, start, _ = module.collectives(found)
    assert (reduce.kind, reduce.group, reduce.bytes, reduce.within("kda")) == ("all-reduce", 4, 64 * 2304 * 2, True)
    assert (gather.kind, gather.group, gather.within("mla")) == ("all-gather", 4, True)
    assert (scatter.kind, scatter.arrays) == ("reduce-scatter", (("f32", (64, 2)),))
    assert (start.kind, start.group) == ("all-reduce", 2)


def test_bytes_on_the_wire_are_those_of_a_ring(found):
    reduce, gather, scatter, _, both = module.collectives(found)
    assert module.wire_bytes(reduce) == 2 * 64 * 2304 * 2 * 3 / 4
    assert module.wire_bytes(gather) == 64 * 8 * 576 * 2 * 3 / 4
    assert module.wire_bytes(scatter) == 4 * 64 * 2 * 4 * 3 / 4
    assert module.wire_bytes(both) == 64 * 32 * 576 * 2 * 7 / 8


def test_kernels_are_named_without_their_number(found):
    assert module.kernels(found) == {"kda_decode": 1}


def test_what_is_made_is_neither_inside_a_fusion_nor_in_place(found):
    assert [op.name for op in module.made(found, 1e6)] == ["fusion.1", "ags", "copy.3"]


@pytest.mark.parametrize(("message", "over"), [
    ("RESOURCE_EXHAUSTED: ... Exceeded hbm capacity by 12.03G.", 12.03 * 2**30),
    ("Used 17.02G of 15.75G hbm. Exceeded hbm capacity by 1.27G.", 1.27 * 2**30),
    ("total memory required for HLO temporaries (106.78G) exceeds available HBM (94.74G)", (106.78 - 94.74) * 2**30),
    ("RESOURCE_EXHAUSTED: something else", 0.0),
])  # fmt: skip
def test_a_refusal_says_by_how_much(message, over):
    assert beyond(message) == pytest.approx(over)
