"""Placements compared without a core: what each serves and writes."""

import numpy as np

from hybrid_kv.simulate.ceilings import ceilings
from hybrid_kv.simulate.placements import Policy, compare, ladder


def requests(seed: int, count: int = 40) -> list[tuple[np.ndarray, np.ndarray]]:
    """Prompts that begin like one of three texts, and answers; no prompt ends at a multiple of 4."""
    rng = np.random.default_rng(seed)
    stems, served = rng.integers(0, 3, (3, 60)), []
    for _ in range(count):
        length = 4 * rng.integers(1, 20) + rng.integers(1, 4)
        prompt = np.concatenate([stems[rng.integers(3)][: rng.integers(0, 60)], rng.integers(0, 3, 90)])[:length]
        served.append((prompt, rng.integers(0, 3, rng.integers(1, 12))))
    return served


def test_nothing_besides_the_common_points_serves_the_ceiling_of_ends_turns_and_branches():
    served, plain = requests(0), Policy("plain", ladder())
    attention = compare(served, 4, [plain])
    want = ceilings(served, 4)
    assert plain.hit_rate == want.end_turn_branch and attention / plain.prompts == want.attention
    assert 0 < plain.hit_rate < want.attention


def test_a_position_serves_the_first_request_that_parts_behind_it_and_costs_one_state():
    text = np.arange(40)
    served = [(text[:39], text[:1]), (np.append(text[:22], 99), text[:1])]
    told: list[tuple[int, int]] = []
    plain = Policy("plain", ladder())
    placed = Policy("placed", lambda length: (16, 36, 40), watch=lambda overlap, hit: told.append((overlap, hit)))
    rung = Policy("rung", ladder(16))
    assert compare(served, 4, [plain, placed, rung]) == 20
    assert [one.hits for one in (plain, placed, rung)] == [0, 16, 0]
    assert told == [(0, 0), (20, 16)]
    # The tail at 36; and the junction at 20, which is the second one's tail as well. Then 16, and 32 and 16.
    assert [one.states for one in (plain, placed, rung)] == [2, 3, 4]
