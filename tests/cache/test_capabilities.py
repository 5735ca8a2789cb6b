"""First numbers of the three capabilities: shared-prefix reuse, DCP geometry, internal checkpoints."""

import numpy as np
import pytest

from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.cache.emission import checkpoint_position, checkpoint_valid
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.content_model import Serving


def config(specs, pools, *, dcp=1, hash_unit=None, **more):
    geometry = resolve(specs, dcp=dcp, hash_unit=hash_unit)
    sizes = {"max_requests": 2, "max_context": 2304, "token_budget": 2304, **more}
    return CacheConfig(geometry=geometry, pool_blocks=pools, group_pool=tuple(range(len(pools))), **sizes)


@pytest.mark.parametrize(("replicated", "columns"), [(False, (2, 2, 16)), (True, (2, 16, 16))])
def test_three_groups_at_dcp_8_serve_a_repeated_prefix_by_their_own_blocks(replicated, columns):  # F1
    specs = [
        GroupSpec("target", "mla", 16),
        GroupSpec("draft", "mla", 16, draft=True, replicated=replicated),
        GroupSpec("kda", "recurrent", 16),
    ]
    serving = Serving(config(specs, (40, 200, 40), dcp=8, max_context=512, token_budget=512))
    prefix = np.arange(256)
    for question in ([1, 2, 3], [4, 5, 6]):
        serving.add([*prefix, *question])
        serving.run()
    assert serving.hits == [0, 256]
    assert serving.config.geometry.columns_of_hit(256) == columns


def test_dcp_4_with_2_rows_a_rank_serves_6_of_7_tokens():
    specs = [GroupSpec("mla", "mla", 2), GroupSpec("kda", "recurrent", 2)]
    serving = Serving(config(specs, (40, 40), dcp=4, hash_unit=2, max_context=64, token_budget=64))
    for _ in range(2):
        serving.add(range(7))
        serving.run()
    assert serving.hits == [0, 6]


@pytest.mark.parametrize(
    ("dcp", "unit", "rows", "block", "prompts"),
    [(8, 16, 16, 16, (512, 513)), (8, 128, 128, 896, (127, 128, 129, 1040, 1168, 1296, 1449))],
)
@pytest.mark.parametrize("extension", [0, 32])
def test_dcp_hits_land_on_the_hash_unit(dcp, unit, rows, block, prompts, extension):  # F7
    specs = [GroupSpec("mla", "mla", rows), GroupSpec("kda", "recurrent", block)]
    serving = Serving(config(specs, (40, 40), dcp=dcp, hash_unit=unit))
    for length in prompts:
        prompt = np.random.default_rng(length).integers(0, 1 << 20, length + extension)
        serving.add(prompt[:length])
        serving.run()
        serving.add(prompt)
        serving.run()
        at_least = (length - 1) // unit * unit
        assert serving.hits[-1] in (at_least, length // unit * unit if extension else at_least)


@pytest.mark.parametrize(
    ("rows", "unit", "third"),
    [(528, None, 1056), (64, None, 1488), (64, 64, 1472)],
)
def test_a_junction_seen_by_the_second_request_serves_the_third(rows, unit, third):
    specs = [GroupSpec("mla", "mla", rows), GroupSpec("kda", "recurrent", 528)]
    serving = Serving(config(specs, (200, 40), hash_unit=unit, placement=Placement()))
    shared = np.random.default_rng(0).integers(0, 1 << 20, 1500)
    for question in range(3):
        serving.add([*shared, *np.random.default_rng(1 + question).integers(0, 1 << 20, 700)])
        serving.run()
    assert serving.hits == [0, 0, third]
    assert serving.admissions[1][2:] == (third, "NO_STATE")


def test_a_ladder_serves_the_second_request_already():
    specs = [GroupSpec("mla", "mla", 64), GroupSpec("kda", "recurrent", 64)]
    serving = Serving(config(specs, (200, 40), placement=Placement(ladder=(512,))))
    shared = np.random.default_rng(0).integers(0, 1 << 20, 1600)
    for question in range(2):
        serving.add([*shared, *np.random.default_rng(1 + question).integers(0, 1 << 20, 300)])
        serving.run()
    assert serving.hits == [0, 1536]


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [
        ((0, 100, 88, 8, 64, 16), False),
        ((0, 100, 96, 8, 64, 16), True),
        ((0, 100, 96, 8, 64, None), False),
        ((8, 100, 96, 8, 64, 16), False),
        ((15360, 16896, 16768, 128, 1536, 16), False),
        ((15360, 16960, 16896, 128, 1536, 16), True),
        ((15360, 16960, 16768, 128, 1536, 16), True),
        ((16064, 18433, 18432, 128, 1536, 16), False),
    ],
)
def test_validity_of_one_aligned_emission(arguments, valid):  # I1
    start, end, position, unit, block, alignment = arguments
    assert checkpoint_valid(start, end, position, unit, block, alignment) is valid


@pytest.mark.parametrize("unit", [16, 32])
def test_position_of_the_usable_boundary(unit):
    down = lambda tokens: tokens // unit * unit  # noqa: E731
    assert checkpoint_position(128, unit) == down(127)
    assert checkpoint_position(128, unit, drop=True) == down(128) - unit
    assert checkpoint_position(240, unit) == down(239)
    assert checkpoint_position(240, unit, drop=True) == 240 // unit * unit - unit


@pytest.mark.parametrize(
    ("lookahead", "prompt", "position"),
    [(0, 1089, 1088), (1, 1089, 1088), (2, 1089, 1024), (2, 1090, 1088), (3, 1089, 1024), (3, 1091, 1088)],
)
def test_position_leaves_the_tokens_that_prove_the_key(lookahead, prompt, position):  # I14
    assert checkpoint_position(prompt, 64, lookahead=lookahead) == position
    assert checkpoint_position(5, 64) == 0
