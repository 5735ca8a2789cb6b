"""Bytes to blocks: null blocks come first, splits are plans, and what can never run is refused with the way out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.errors import UserError
from hybrid_kv.planning import BlockOptions, Budget, LayerSpec, per_shape, size_pools, unified
from hybrid_kv.planning.published import MODELS, full_window_gdn, kimi_linear
from hybrid_kv.planning.sizing import check_retention, concurrency, group_need, memory_of

ROW, STATE = 100, 5_000
GIB = 2**30


def full(count=1, block=16):
    layers = [LayerSpec("full", i, "full", ROW) for i in range(count)]
    return per_shape(layers, BlockOptions(hash_unit=block))


def window(size, block=16, kind="sliding_window"):
    return per_shape([LayerSpec("swa", 0, kind, ROW, window=size)], BlockOptions(hash_unit=block))


def mixed(block=16):
    layers = [LayerSpec("mla", 0, "mla", ROW), LayerSpec("kda", 1, "recurrent", STATE)]
    return per_shape(layers, BlockOptions(hash_unit=block))


def test_concurrency_is_blocks_by_the_blocks_of_one_request():  # M13
    budget = Budget(memory=1, max_context=16_384, step_tokens=1024)
    (rows,) = group_need(full().geometry, 16_384, budget)
    (recent,) = group_need(window(1024).geometry, 16_384, budget)
    assert (rows, recent) == (1024, 129)
    assert concurrency([1536], [rows]) == 1.5
    assert concurrency([387], [recent]) == 3
    assert concurrency([(1024 + 129) * 3], [rows + recent]) == 3


def test_a_local_chunk_starts_inside_a_block_only_if_blocks_do_not_divide_it():
    budget = Budget(memory=1, max_context=16_384, step_tokens=1024)
    assert group_need(window(1024, kind="chunked_local").geometry, 16_384, budget) == (128,)
    assert group_need(window(1000, kind="chunked_local").geometry, 16_384, budget) == (128,)
    assert group_need(window(1001, kind="chunked_local").geometry, 16_384, budget) == (128,)
    assert group_need(window(1010, kind="chunked_local").geometry, 16_384, budget) == (129,)


def test_a_window_never_holds_more_than_the_request_has():
    assert group_need(window(1024).geometry, 40, Budget(memory=1, max_context=40)) == (3,)


def test_the_null_block_is_nobodys():  # M9, M10
    block = 16 * ROW
    with pytest.raises(UserError, match="memory: got 51200; one request of 512 tokens takes 52800 bytes with null"):
        size_pools(full(), Budget(32 * block, 512))
    assert size_pools(full(), Budget(33 * block, 512)).blocks == (33,)
    plan = size_pools(full(), Budget(64 * block, 63 * 16))
    assert plan.usable == (63,) and plan.requests == 1
    with pytest.raises(UserError, match="or set max_context to at most 1008"):
        size_pools(full(), Budget(64 * block, 63 * 16 + 1))


def test_the_default_split_lets_every_pool_serve_as_many_requests():
    plan = size_pools(per_shape(kimi_linear(), BlockOptions()), Budget(40 * GIB, 131_072))
    ratios = [have / want for have, want in zip(plan.usable, plan.need, strict=True)]
    assert ratios == [37.5, pytest.approx(37.5, abs=0.05)]
    assert 0 <= plan.left_over < sum(pool.block_bytes for pool in plan.layout.pools)


@given(memory=st.integers(1, 10**7), context=st.integers(1, 2_000), block=st.sampled_from([1, 16, 64]))
def test_memory_is_never_overdrawn_and_refusals_are_exact(memory, context, block):
    layout, budget = mixed(block), Budget(memory, context)
    need = [-(-context // block), 2]
    enough = memory >= memory_of(layout, need)
    if enough:
        plan = size_pools(layout, budget)
        assert sum(plan.pool_bytes) <= memory and plan.longest == context
    else:
        with pytest.raises(UserError, match="memory: got"):
            size_pools(layout, budget)


def test_fractions_share_out_what_the_null_blocks_leave():
    layout = mixed()
    rest = 100 * (1600 + STATE)
    budget = Budget(1600 + STATE + rest, 160, split={"mla": 0.75, "kda": 0.25})
    assert size_pools(layout, budget).usable == (int(0.75 * rest) // 1600, int(0.25 * rest) // STATE)


def test_blocks_may_be_given_outright():
    plan = size_pools(mixed(), Budget(10**6, 160, blocks={"kda": 5, "mla": 20}))
    assert plan.blocks == (20, 5) and plan.longest == 160


# The compiled core refuses windowed groups.
@pytest.mark.parametrize("name", [name for name in MODELS if "window" not in name])
@pytest.mark.parametrize("make", [per_shape, unified])
def test_what_a_request_may_hold_is_what_the_cache_reserves(name, make):
    layout = make(MODELS[name](), BlockOptions())
    plan = size_pools(layout, Budget(80 * GIB, 131_072))
    config = CacheConfig(
        geometry=layout.geometry,
        pool_blocks=plan.blocks,
        group_pool=tuple(layout.pool_of(group) for group in range(len(layout.groups))),
        max_requests=1,
        max_context=131_072,
        token_budget=1024,
        chunk_limit=1024,
        max_prefills=1,
    )
    assert config.blocks_of(131_072) == plan.need


def test_padding_of_a_request_is_counted_by_group():
    plan = size_pools(unified(kimi_linear(), BlockOptions(hash_unit=None)), Budget(40 * GIB, 131_072))
    assert plan.need == (70 + 3 * 2,)
    assert plan.request_padding() == 2 * (20 * 640 + 1_885 * 1_152)
    assert plan.request_bytes() == 76 * 7 * 1_885 * 1_152


REFUSED = {
    "no memory": ({"memory": 0}, "memory: got 0; use a whole number, at least 1"),
    "no context": ({"max_context": 0}, "max_context: got 0; use a whole number, at least 1"),
    "no states": ({"states": 0}, "states: got 0; use a whole number, at least 1"),
    "no step": ({"step_tokens": -1}, "step_tokens: got -1; use a whole number, at least 1"),
    "one block": ({"memory": 13_199}, "memory: got 13199; the null block and one more of every pool take 13200 bytes"),
    "one request": (
        {"memory": 20_000},
        "takes 32600 bytes with null blocks: give that, or set max_context to at most 32",
    ),
    "a split too small": (
        {"split": {"mla": 0.01, "kda": 0.99}},
        r"split\[mla\] blocks: got 6; one request of 160 tokens needs 10 blocks of it besides the null block: "
        "give it more, or set max_context to at most 96",
    ),
    "no state at all": (
        {"memory": 40_000, "split": {"mla": 0.9, "kda": 0.1}},
        r"split\[kda\] blocks: got 0; one request .*: give it more$",
    ),
    "split over 1": ({"split": {"mla": 0.7, "kda": 0.4}}, "fractions add up to 1.1: make them add up to 1"),
    "split below 1": ({"split": {"mla": 0.3, "kda": 0.4}}, "fractions add up to 0.7: make them add up to 1"),
    "split of nothing": ({"split": {"mla": 1.0, "kda": 0.0}}, r"split\[mla\]: got 1.0; every pool needs a fraction"),
    "split of a stranger": ({"split": {"mla": 0.5, "swa": 0.5}}, "name every pool once: mla, kda"),
    "split without a pool": ({"split": {"mla": 1.0}}, "name every pool once: mla, kda"),
    "blocks of a stranger": ({"blocks": {"mla": 20, "swa": 5}}, "name every pool once: mla, kda"),
    "only a null block": ({"blocks": {"mla": 20, "kda": 1}}, r"blocks\[kda\]: got 1; use a whole number, at least 2"),
    "blocks over memory": ({"blocks": {"mla": 20, "kda": 999}}, "they take 5027000 bytes, the memory is 1000000"),
    "too few blocks": ({"blocks": {"mla": 9, "kda": 9}}, r"blocks\[mla\] blocks: got 8; one request .* at most 128"),
    "both": ({"split": {"mla": 1.0}, "blocks": {"mla": 2}}, "give fractions or blocks, not both"),
    "retention": ({"retention": 24}, "retention: got 24; hits end at multiples of the hash unit: use a multiple of 16"),
    "no retention": ({"retention": 0}, "retention: got 0; use a whole number, at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_budget_that_cannot_work_is_refused(case):
    fields, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        size_pools(mixed(), Budget(**{"memory": 10**6, "max_context": 160, **fields}))


def test_a_split_that_is_not_a_number_is_refused():
    with pytest.raises(UserError, match="fractions add up to nan"):
        size_pools(full(), Budget(10**6, 160, split={"full": float("nan")}))


def test_retention_goes_by_what_a_hit_can_reach():
    check_retention(mixed().geometry, 48)
    check_retention(mixed().geometry, None)
    coarse = unified(full_window_gdn(), BlockOptions()).geometry
    assert coarse.hit_unit == coarse.schedule_block == 1_152
    with pytest.raises(
        UserError, match="retention: got 64; hits end at multiples of the schedule block: use a multiple"
    ):
        check_retention(coarse, 64)
    with pytest.raises(UserError, match="retention: got 64; every group keeps all its rows"):
        check_retention(full().geometry, 64)
