"""Planning cases with numbers of the reference system, and what the engine's plan refuses.

The comment behind a test names the case.
"""

import math

import pytest

from hybrid_kv.cache.reference import Model, Rules
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.planning import (
    BlockOptions,
    Budget,
    CacheOptions,
    CacheShape,
    LayerSpec,
    group_layers,
    per_shape,
    plan_cache,
    size_pools,
    unified,
)
from hybrid_kv.planning.published import kimi_linear
from hybrid_kv.sharding import MeshSpec
from tests.cache.bench import tokens

FREE = BlockOptions(hash_unit=None, row_multiple=16)


def full(index: int, width: int = 1024, **options) -> LayerSpec:
    return LayerSpec("full", index, "full", width, **options)


def window(index: int, width: int = 1024, size: int = 1024) -> LayerSpec:
    return LayerSpec("swa", index, "sliding_window", width, window=size)


def state(index: int, size: int = 32_768) -> LayerSpec:
    return LayerSpec("kda", index, "recurrent", size)


# Concurrency

MIXES = {
    "full": ([full(0)], {"full": 1536}, 1.5),
    "window": ([window(0)], {"swa": 387}, 3),
    "both, one pool": ([full(0), window(1)], {"full+swa": 3 * (1024 + 129)}, 3),
    "both, two pools": ([full(0), window(1, 512)], {"full": 3 * 1024, "swa": 387}, 3),
    "unlike counts": ([full(i) for i in range(4)] + [window(i) for i in range(4, 7)], {"full": 3072, "swa": 387}, 3),
    "wrapped": ([full(0), full(1, 656), window(2)], {"full": 3072, "swa": 387}, 3),
    "the scarcer pool decides": ([full(0), window(1, 512)], {"full": 3 * 1024, "swa": 258}, 2),
}


@pytest.mark.parametrize("case", MIXES)
def test_requests_at_once_are_the_blocks_there_are_by_those_one_takes(case):  # M13
    layers, blocks, requests = MIXES[case]
    layout = per_shape(layers, BlockOptions(hash_unit=16))
    budget = Budget(10**12, 16_384, step_tokens=1024, blocks={name: 1 + count for name, count in blocks.items()})
    plan = size_pools(layout, budget)
    assert plan.requests == requests
    each = {"full": 1024, "swa": 129}
    assert plan.need == tuple(sum(each[part] for part in name.split("+")) for name in blocks)


def test_requests_at_once_in_common_pages_of_groups_with_unlike_counts():  # M13
    layout = unified([*(full(i) for i in range(4)), *(window(i) for i in range(4, 7))], FREE)
    assert [len(group.layers) for group in layout.groups] == [4, 3]
    plan = size_pools(layout, Budget(10**12, 16_384, step_tokens=1024, blocks={"all": 1 + 3 * (1024 + 129)}))
    assert plan.need == (1024 + 129,) and plan.requests == 3


@pytest.mark.parametrize(("requests", "preempted"), [(3, False), (4, True)])
def test_the_scheduler_runs_as_many_requests_as_were_planned(requests, preempted):  # M13, a sixteenth of its size
    layout = per_shape([full(0), window(1, 512, size=64)], BlockOptions(hash_unit=16))
    budget = Budget(10**12, 1024, step_tokens=64)
    rows, recent = plan_need = size_pools(layout, budget).need
    assert plan_need == (64, 9)
    rules = Rules(layout.geometry, (3 * rows, 3 * recent), (0, 1), token_budget=64, chunk_limit=16, admit_whole=False)
    core = Model(rules)
    for number in range(requests):
        core.arrive(str(number), tokens(number, 1015), answer=9)
    given = dict.fromkeys(core.requests, 0)
    together = 0
    while core.requests:
        step = core.schedule()
        together = max(together, len(core.running))
        ends = [row.request.name for row in step.rows if row.samples]
        for name in ends:
            given[name] += 1
        core.commit(step, {name: [1] for name in ends}, [name for name in ends if given[name] == 9])
    assert together == requests and bool(core.statistics.preemptions) is preempted


# Pages and groups


@pytest.mark.parametrize(
    ("layers", "blocks", "padding"),
    [
        # A state of 16 KiB in a page of 32 KiB, an attention page of 16 KiB, one of 24 KiB.
        ([full(0, 2048), state(1, 16_384)], {"full": 16}, {"full": 0, "kda": 16_384}),
        ([full(0, 1024), state(1, 32_768)], {"full": 32}, {"full": 0, "kda": 0}),
        ([full(0, 2048), window(1, 1536)], {"full": 16, "swa": 16}, {"full": 0, "swa": 16 * 512}),
        ([full(0, 2048), window(1, 1024)], {"full": 16, "swa": 32}, {"full": 0, "swa": 0}),
    ],
    ids=["state padded", "rows scaled", "rows padded", "window scaled"],
)
def test_common_pages_scale_rows_that_divide_and_pad_what_does_not(layers, blocks, padding):  # M5
    layout = unified(layers, FREE)
    assert layout.pools[0].block_bytes == 32_768
    assert {g.name: g.block for g in layout.geometry.groups if g.name in blocks} == blocks
    assert {g.name: layout.padding(number) for number, g in enumerate(layout.groups)} == padding


def test_layers_of_unlike_pages_share_a_table_or_are_cut_to_the_shortest_bucket():  # M4
    layers = [LayerSpec("mla", i, "mla", 1152) for i in range(3)] + [LayerSpec("idx", i, "mla", 132) for i in (3, 4, 5)]
    layers += [LayerSpec("swa", i, "sliding_window", 1152, window=128) for i in range(6, 11)]
    assert [len(group.layers) for group in group_layers(layers)] == [6, 5]
    assert sorted(len(group.layers) for group in unified(layers, FREE).groups) == [2, 3, 3, 3]


def test_a_block_is_as_large_as_its_largest_group():  # M15
    for layout in (unified(kimi_linear(), FREE), per_shape(kimi_linear(), BlockOptions())):
        for pool in layout.pools:
            contents = [layout.content[group] for group in pool.groups]
            assert (
                max(contents) == pool.block_bytes
                and min(contents) + max(layout.padding(group) for group in pool.groups) == pool.block_bytes
            )


def test_a_replicated_state_is_a_group_of_its_own():  # M16
    groups = group_layers([state(0), LayerSpec("kda", 1, "recurrent", 32_768, replicated=True), state(2)])
    assert [[layer.index for layer in group.layers] for group in groups] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("few", "many", "groups"),
    [
        ([full(i) for i in range(10)], [state(i) for i in range(10, 110)], [10] * 11),
        ([LayerSpec("mla", i, "mla", 1152) for i in range(11)], [window(i, 1152, 128) for i in range(11, 54)],
         [11, 11, 11, 11, 10]),
    ],
    ids=["100 states", "43 windows"],
)  # fmt: skip
def test_many_layers_are_cut_into_groups_that_do_not_widen_the_block(few, many, groups):  # M16
    layout = unified([*few, *many], FREE)
    assert [len(group.layers) for group in layout.groups] == groups
    # The block is that of the few layers, and what it holds of the others is no larger.
    assert layout.pools[0].block_bytes == layout.content[0] >= max(layout.content)


def test_groups_of_the_draft_are_those_that_hold_its_layers():  # M11
    groups = group_layers([full(0), full(1, draft=True), window(2), state(3)])
    assert [group.draft for group in groups] == [True, False, False]
    geometry = resolve([group.declare(16) for group in groups])
    assert [group.spec.draft for group in geometry.groups] == [True, False, False]


def test_stages_of_a_model_are_planned_apart_and_the_least_of_their_blocks_serves_all():  # M2
    layers = kimi_linear()
    stages = [[layer for layer in layers if layer.index < 13], [layer for layer in layers if layer.index >= 13]]
    plans = [size_pools(per_shape(stage, BlockOptions()), Budget(20 * 2**30, 65_536)) for stage in stages]
    least = [min(blocks) for blocks in zip(*(plan.blocks for plan in plans), strict=True)]
    for plan in plans:
        names = [pool.name for pool in plan.layout.pools]
        again = size_pools(plan.layout, Budget(20 * 2**30, 65_536, blocks=dict(zip(names, least, strict=True))))
        assert again.blocks == tuple(least) and again.requests <= plan.requests
    with pytest.raises(UserError, match="no layer keeps anything"):
        per_shape([], BlockOptions())


# Units


@pytest.mark.parametrize(
    ("specs", "dcp", "units"),
    [
        ([GroupSpec("full", "full", 16), GroupSpec("kda", "recurrent", 16)], 1, (16, 16)),
        ([GroupSpec("full", "full", 256), GroupSpec("swa", "sliding_window", 64, window=128),
          GroupSpec("small", "sliding_window", 4, window=8)], 1, (256, 4)),
        ([GroupSpec("full", "full", 16), GroupSpec("kda", "recurrent", 64)], 4, (64, 64)),
        ([GroupSpec("full", "full", 128), GroupSpec("kda", "recurrent", 896)], 8, (7168, 128)),
        ([GroupSpec("full", "full", 544), GroupSpec("own", "full", 136)], 1, (544, 136)),
    ],
)  # fmt: skip
def test_the_scheduler_block_is_the_common_multiple_and_the_hash_unit_the_common_divisor(specs, dcp, units):  # M8, M17
    geometry = resolve(specs, dcp=dcp)
    assert (geometry.schedule_block, geometry.hash_unit) == units
    assert math.gcd(*units) == geometry.hash_unit


# What the engine's plan refuses

SHAPE = CacheShape(
    mla_layers=(3,), recurrent_layers=(0, 1, 2), latent=32, position=8, heads=8, key=16, value=16, taps=4,
    max_context=4096, row_itemsize=4, conv_itemsize=4,
)  # fmt: skip
REFUSED = {
    "admission": ({"admission": "late"}, "1x1", "admission: got 'late'; use prompt or chunk"),
    "eviction": ({"eviction": "fifo"}, "1x1", "eviction: got 'fifo'; use one of joint, tied, coverage, lru"),
    "step sizes": ({"token_buckets": (64, 0)}, "1x1", "token_buckets: got 0; use at least 1 token"),
    "no slots": ({"max_requests": 0}, "1x1", "max_requests: got 0; use at least 1"),
    "no blocks": ({"attention_blocks": 0}, "1x1", "attention_blocks: got 0; use at least 1"),
    "context": ({"max_context": 5000}, "1x1", "max_context: got 5000; the model reaches 4096 tokens"),
    "heads": ({}, "model=3", "mesh: got 'model=3'; model x dcp must divide the 8 heads"),
    "ladder": ({"ladder": (100,)}, "1x1", "placement.ladder: got 100; hits end at multiples of 64 tokens: use such"),
    "interleave": ({"interleave": 5, "rows_per_rank": 64}, "dcp=2", "interleave: got 5; it must divide the 64 rows"),
    "unit": (
        {"rows_per_rank": 100},
        "1x1",
        r"hash_unit: got 64; it must divide the block of group 'mla' \(100 tokens\)",
    ),
    "budget": ({"token_budget": 8}, "1x1", "token_budget: got 8; every one of 16 requests may decode in one step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_engine_that_cannot_be_is_refused(case):
    options, mesh, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        plan_cache(SHAPE, CacheOptions(**options), MeshSpec.parse(mesh))
