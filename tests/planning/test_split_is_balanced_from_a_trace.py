"""The split a trace asks for: both pools remember equally many requests, and no other split remembers more."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv.cache.config import Placement
from hybrid_kv.errors import UserError
from hybrid_kv.planning import BlockOptions, Budget, LayerSpec, balance, per_shape, size_pools, trace_demand, unified
from hybrid_kv.planning.balance import peak_distinct
from hybrid_kv.planning.published import full_window_gdn

ROW, STATE, UNIT = 10, 700, 4
MODEL = [LayerSpec("mla", 0, "mla", ROW), LayerSpec("kda", 1, "recurrent", STATE)]
LAYOUT = per_shape(MODEL, BlockOptions(hash_unit=UNIT))


def chat(sessions, turns, seed=0):
    """Sessions that take turns; every prompt extends the last one and its answer."""
    draw = random.Random(seed)
    history = {s: [0] * 8 for s in range(sessions)}
    requests = []
    for _ in range(turns):
        for session in history:
            prompt = history[session] + [draw.randrange(50) for _ in range(draw.randrange(1, 13))]
            answer = [draw.randrange(50) for _ in range(draw.randrange(1, 9))]
            requests.append((prompt, answer))
            history[session] = prompt + answer
    return requests


def demand(memory=60_000, requests=None, layout=LAYOUT, context=256, **more):
    return trace_demand(layout, Budget(memory, context), requests or chat(4, 5), **more)


def test_a_trace_is_counted_in_distinct_blocks():
    asked = demand(requests=[([1, 2, 3, 4, 5], [6, 7, 8, 9]), ([1, 2, 3, 4, 9, 9, 9, 9, 9], [1])])
    rows, states = asked.touched
    # The second shares the first block. Both keep states behind 4 (the tail of one, the hit of the other) and 8.
    assert [len(blocks) for blocks in rows] == [2, 2] and len(rows[0] | rows[1]) == 3
    assert [len(blocks) for blocks in states] == [2, 2] and len(states[0] | states[1]) == 3


def test_placement_decides_what_states_are_kept():
    request = [(list(range(33)), [1, 2, 3, 4, 5])]
    none = Placement(tail=False, turn_end=False, junctions=0)
    placements = (none, Placement(), Placement(ladder=(8, 16)), Placement(positions=(4, 12, 36)))
    asked = [demand(requests=request, placement=p).touched[1][0] for p in placements]
    # Tail and end of prompt are both 32, the turn ends at 36; the grids of the ladder end at 32 too.
    # Two of the positions lie inside the prompt.
    assert [len(states) for states in asked] == [0, 2, 2, 4]
    kept = trace_demand(LAYOUT, Budget(60_000, 256, retention=8), request).touched[1][0]
    assert len(kept) == 5  # 8, 16, 24, 32 and 36


def test_a_request_refreshes_the_state_it_resumes_from():
    prompt = list(range(30))
    rows, states = demand(requests=[(prompt, [1]), (prompt, [1])]).touched
    assert rows[0] == rows[1] and states[0] == states[1]


@given(st.lists(st.frozensets(st.integers(0, 6)), max_size=8), st.integers(0, 10))
def test_the_peak_is_the_largest_window(touched, horizon):
    blocks = [frozenset((0, node) for node in nodes) for nodes in touched]
    windows = [blocks[start : start + horizon] for start in range(len(blocks))]
    assert peak_distinct(blocks, horizon) == max((len(frozenset().union(*w)) for w in windows), default=0)


@settings(deadline=None, max_examples=40)
@given(memory=st.integers(6_000, 60_000), seed=st.integers(0, 5))
def test_no_other_split_remembers_more_requests(memory, seed):
    asked = demand(memory, chat(3, 5, seed), context=128)
    chosen = size_pools(LAYOUT, balance(asked))
    best = 0
    for states in range(1, memory // STATE):
        rows = (memory - (1 + states) * STATE) // (UNIT * ROW) - 1
        if rows > 0:
            best = max(best, asked.horizon((rows, states)))
    assert asked.horizon(chosen.usable) == best


def test_the_default_split_starves_the_states_of_a_chat_first():
    asked = demand(memory=30_000, requests=chat(6, 8), context=256)
    even, chosen = size_pools(LAYOUT, Budget(30_000, 256)), size_pools(LAYOUT, balance(asked))
    assert chosen.usable[1] > even.usable[1]
    assert asked.horizon(chosen.usable) > asked.horizon(even.usable)


def test_the_same_trace_gives_the_same_split():
    assert balance(demand()) == balance(demand())


def test_memory_to_spare_is_shared_and_nothing_is_forgotten():
    asked = demand(memory=10**7)
    plan = size_pools(LAYOUT, balance(asked))
    assert asked.horizon(plan.usable) == asked.requests
    assert plan.left_over < UNIT * ROW + STATE


@pytest.mark.parametrize(
    "layout", [unified(MODEL, BlockOptions(hash_unit=UNIT)), per_shape(full_window_gdn(), BlockOptions())]
)
def test_one_pool_and_windowed_groups_have_a_horizon_too(layout):
    asked = demand(memory=10**9, layout=layout, live=2)
    assert asked.horizon(size_pools(layout, balance(asked)).usable) == asked.requests


def test_a_window_keeps_only_the_rows_that_resuming_reads():
    layers = [LayerSpec("full", 0, "full", ROW), LayerSpec("swa", 1, "sliding_window", 2 * ROW, window=8)]
    asked = demand(requests=[(list(range(41)), [1, 2, 3, 4])], layout=per_shape(layers, BlockOptions(hash_unit=UNIT)))
    rows, recent = asked.touched
    # Kept boundaries 40 and 44: of eleven blocks the two before each.
    assert (len(rows[0]), len(recent[0])) == (11, 3)


REFUSED = {
    "no requests": ({"requests": []}, r"trace: got \[\]; give at least one request"),
    "empty prompt": ({"requests": [([], [1])]}, r"trace\[0\]: got '0 \+ 1 tokens'; prompts need a token"),
    "too long": (
        {"requests": [([1], [1]), ([1] * 250, [1] * 7)]},
        r"trace\[1\]: got '250 \+ 7 tokens'; .* max_context, 256",
    ),
    "nobody live": ({"live": 0}, "live: got 0; use a whole number, at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_trace_that_cannot_be_served_is_refused(case):
    fields, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        trace_demand(LAYOUT, Budget(60_000, 256), fields.get("requests", chat(1, 1)), live=fields.get("live", 1))


def test_memory_below_the_live_requests_is_refused():
    with pytest.raises(
        UserError, match="memory: got 9000; 3 live requests of 256 tokens take 12620 bytes with null blocks"
    ):
        balance(demand(memory=9_000, live=3))
