"""What has gone wrong in other systems, as small scenarios with the right value, on the reference model.

The number behind a test is the case's. Every row and state that is read or named is checked by the bench.
"""

import random

import numpy as np
import pytest

from hybrid_kv.cache.reference import Draft
from hybrid_kv.cache.reference.pool import Index, Pool
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.bench import Bench, full, state, tokens, window

# How long is the hit?


def test_a_group_with_more_never_raises_what_another_has_cut():  # 1
    bench = Bench([full(16, draft=True), state(16)], 16, draft=Draft.DROP, retention=None)
    prompt = tokens(0, 65)
    bench.serve(a=prompt)
    assert bench.filed(prompt, 0) == [16, 32, 48] and bench.filed(prompt, 1) == [16, 32, 48, 64]
    assert bench.serve(b=[*prompt[:64], 7]) == [48]


def test_what_retention_keeps_is_what_a_lookup_with_its_drop_can_use():  # 3
    bench = Bench([full(1600, draft=True), state(1600)], 1600, draft=Draft.DROP)
    assert bench.serve(a=tokens(0, 11_910)) == [0]
    assert bench.serve(b=tokens(0, 11_910)) == [9600]


@pytest.mark.parametrize("coarse", [state(16_384), window(16_384, 16_384)], ids=["state", "window"])
def test_a_drop_comes_before_the_alignment(coarse):  # 4
    bench = Bench([full(128, draft=True), coarse], 128, draft=Draft.DROP)
    bench.serve(a=tokens(0, 32_900))
    assert bench.serve(b=tokens(0, 32_900)) == [32_768]


@pytest.mark.parametrize(("retention", "hits"), [(0, [0, 0, 1056]), (None, [0, 1056, 1056])])
def test_a_junction_is_kept_though_the_tail_lies_in_unshared_tokens(retention, hits):  # 5
    bench = Bench([full(528), state(528)], 528, retention=retention)
    shared = tokens(0, 1500)
    assert [bench.serve(**{name: shared + tokens(ord(name), 700)})[0] for name in "abc"] == hits


def test_rows_without_a_state_are_no_hit():  # 6
    bench = Bench([full(16), state(16)], 16, tail=False, turn_end=False)
    bench.serve(a=tokens(0, 520))
    bench.arrive("b", tokens(0, 520))
    step = bench.step()
    assert step.admitted["b"][:2] == (0, 512)
    assert step.rows[0].start == 0


def test_hits_are_as_fine_as_the_hash_unit_whatever_the_block():  # 8
    for length, hit in ((979, 976), (500, 496)):
        bench = Bench([full(528), state(528)], 16)
        bench.serve(a=tokens(0, length))
        assert bench.serve(b=tokens(0, length)) == [hit]


def test_an_edited_end_of_a_prompt_keeps_the_hit_of_a_window():  # 10
    bench = Bench([full(32), window(16, 1024)], 16)
    bench.serve(a=tokens(0, 2000))
    # With hits in units of 32 this would be 1952; the window's blocks allow 16.
    assert bench.serve(b=tokens(0, 1970) + tokens(1, 30)) == [1968]


def test_blocks_behind_a_hole_are_no_hit():  # 12
    bench = Bench([full(16)], 16)
    bench.serve(a=tokens(0, 49))
    bench.forget(tokens(0, 49), 0, 16)
    assert bench.filed(tokens(0, 49), 0) == [32, 48]
    assert bench.serve(b=tokens(0, 49)) == [0]


def test_a_fork_without_a_state_says_how_far_rows_reach_and_gets_one():  # 13
    bench = Bench([full(16), state(16)], 16)
    stem = tokens(0, 32)
    bench.serve(a=stem + tokens(1, 17))
    assert bench.filed(stem, 1) == []
    bench.arrive("b", stem + tokens(2, 17))
    assert bench.step().admitted["b"][:2] == (0, 32)
    bench.drain()
    assert bench.serve(c=stem + tokens(3, 17)) == [32]


def test_a_budget_below_the_block_gets_through():  # 16
    bench = Bench([full(528), state(528)], 528, token_budget=512)
    bench.serve(a=tokens(0, 2000))
    assert bench.ends["a"] == [512, 1024, 1536, 2000]


@pytest.mark.parametrize("more", [[], [full(4, "small")]], ids=["two groups", "and a block of 4"])
def test_states_lie_on_their_own_groups_grid(more):  # 18
    unit = 4 if more else 16
    bench = Bench([full(816), state(1648), *more], unit, retention=None, tail=False)
    bench.serve(a=tokens(0, 5000))
    assert bench.filed(tokens(0, 5000), 1) == [1648, 3296, 4944]


def test_a_column_is_divided_by_the_groups_own_block():  # 19
    recurrent = resolve([full(16), state(1152)]).groups[1]
    assert recurrent.column(11_520 - 1) == 9 and recurrent.columns(11_520) == 10


def test_the_state_of_part_of_a_block_has_no_name():  # 20
    bench = Bench([full(2048), state(2048)], 2048, token_budget=1866, retention=None)
    prompt = tokens(0, 3026)
    bench.arrive("a", prompt)
    bench.step()
    assert bench.ends["a"] == [1866] and bench.filed(prompt, 1) == []
    bench.drain()
    assert bench.ends["a"] == [1866, 3026]
    # Saved inside the second chunk, where the reference system has none.
    assert bench.serve(b=prompt) == [2048]


@pytest.mark.parametrize("specs", [[full(16)], [full(16), state(16)]], ids=["full", "and states"])
def test_a_whole_hit_leaves_one_token_and_loses_nothing(specs):  # 23
    bench = Bench(specs, 16)
    bench.serve(a=tokens(0, 64))
    assert bench.serve(b=tokens(0, 64)) == [48]
    assert bench.serve(c=tokens(0, 192)) == [64]


@pytest.mark.parametrize("specs", [[full(16)], [full(16), state(16)]], ids=["full", "and states"])
def test_a_whole_hit_in_units_of_one_token_leaves_one_token(specs):  # 23
    bench = Bench(specs, 1)
    bench.serve(a=tokens(0, 64))
    assert bench.serve(b=tokens(0, 64)) == [63]
    assert bench.serve(c=tokens(0, 192)) == [64]


@pytest.mark.parametrize(
    ("specs", "unit", "third"),
    [
        ([full(528), state(528)], 528, 1056),
        ([GroupSpec("mla", "mla", 528), state(528), state(528, "two")], 528, 1056),
        ([full(528), full(528, "draft", draft=True), state(1056)], 528, 1056),
        ([full(16), window(16, 512), state(528)], 16, 1488),
        ([full(66), GroupSpec("local", "chunked_local", 66, window=528), state(528)], 66, 1452),
    ],
    ids=["full", "mla and two", "draft", "window", "chunked"],
)  # fmt: skip
def test_the_second_sharer_makes_the_third_hit_in_every_mix_of_groups(specs, unit, third):  # 24
    bench = Bench(specs, unit)
    shared = tokens(0, 1500)
    hits = [bench.serve(**{name: shared + tokens(ord(name), 700)})[0] for name in "abc"]
    assert hits == [0, 0, third]


# Publishing, abort, sharing inside a step


def test_an_aborted_prefill_leaves_what_was_committed_and_nothing_else():  # 26
    prompt = tokens(0, 40_000)
    bench = Bench([full(1024), state(1024)], 1024, chunk_limit=8192, retention=None)
    bench.arrive("a", prompt)
    step = bench.schedule()
    bench.model.abort("a")
    bench.commit(step)
    assert bench.model.probe(prompt)[:2] == (0, 0)
    bench.arrive("b", prompt)
    bench.step()
    bench.model.abort("b")
    assert bench.model.probe(prompt)[:2] == (8192, 8192)


def test_equal_prompts_of_one_step_share_no_unfinished_state():  # 27
    bench = Bench([full(16), state(16)], 16)
    bench.arrive("a", tokens(0, 100))
    bench.arrive("b", tokens(0, 100))
    assert list(bench.step().admitted) == ["a"]
    assert bench.step().admitted["b"].tokens == 96
    # Without states b takes a's whole blocks at once: all rows of a step are written before any is read, which the
    # device checks. The part of a block behind them is not copied.
    bench = Bench([full(16)], 16)
    bench.arrive("a", tokens(0, 100))
    bench.arrive("b", tokens(0, 100))
    step = bench.step()
    assert [row.start for row in step.rows] == [0, 96] and not step.copies


def test_a_preempted_request_resumes_with_prompt_and_answer():  # 30
    bench = Bench([full(16)], 16, blocks=11)
    # In step 31 the older one needs a third block when all are taken.
    bench.arrive("old", tokens(1, 3), answer=140)
    request = bench.arrive("new", tokens(0, 100), answer=60)
    while not request.epoch:
        bench.step()
    assert len(request.tokens) == 130 and request.computed == 0
    while request in bench.model.requests.values() and not request.running:
        bench.step()
    assert bench.model.pools[0].evicted > 0
    assert bench.hits["new"] == request.hit < 96
    assert bench.ends["new"][-1] == 130 and len(request.tokens) == 131


def test_used_cached_and_free_always_make_the_total():  # 32
    bench = Bench([full(16), state(16)], 16, blocks=(40, 12))
    rng = random.Random(0)
    for number in range(50):
        bench.arrive(str(number), tokens(number % 5, rng.randrange(1, 90)), rng.randrange(1, 30))
    while bench.model.requests:
        bench.step()
        for pool in bench.model.pools:
            held = {block for request in bench.model.requests.values() for block in request.held()}
            used = sum(block.pool is pool for block in held)
            assert used + len(pool.named) + len(pool.nameless) == pool.size
    assert all(pool.free == pool.size and pool.named for pool in bench.model.pools)


def test_a_refused_allocation_keeps_nothing():  # 34
    bench = Bench([full(16)], 16, blocks=11)
    running = bench.arrive("a", tokens(0, 70), answer=8)
    bench.step()
    before = dict(running.tables[0])
    assert bench.free == [6]
    waiting = bench.arrive("b", tokens(1, 150))
    step = bench.step()
    assert list(step.admitted) == [] and bench.free == [6]
    assert waiting.held() == [] and running.tables[0] == before
    bench.drain()


# Sharing and copy-on-write


def test_a_shared_part_of_a_block_is_copied_before_it_is_written():  # 37
    bench = Bench([full(64)], 4)
    owner = bench.arrive("a", tokens(0, 100), answer=30)
    bench.step()
    source = owner.tables[0][1]
    rows = dict(bench.device.rows[source])
    sharer = bench.arrive("b", tokens(0, 100) + tokens(1, 3), answer=30)
    step = bench.step()
    assert bench.hits["b"] == 100 and step.copies == 1
    assert owner.tables[0][1] is source is not sharer.tables[0][1]
    assert (source.holders, sharer.tables[0][1].holders) == (1, 1)
    bench.step()
    assert {at: bench.device.rows[source][at] for at in rows} == rows
    assert bench.device.rows[source][37] != bench.device.rows[sharer.tables[0][1]][37]


def test_resuming_leaves_the_shared_state_as_it_was():  # 38, 40
    bench = Bench([full(4), state(4)], 4)
    bench.serve(a=tokens(0, 9))
    request = bench.arrive("b", tokens(0, 8) + tokens(1, 20))
    step = bench.schedule(budget=2)
    shared, own = request.state_read[1], request.tables[1][0]
    before = bench.device.states[shared]
    # It reads the state of exactly the hit, and writes another block.
    assert (step.rows[0].start, step.rows[0].length) == (8, 2)
    assert shared is not own and before == bench.device.tags_of(request)[8]
    bench.commit(step)
    assert bench.device.states[shared] == before
    assert bench.device.states[own] == bench.device.tags_of(request)[10]
    assert request.state_read[1] is None


def test_another_request_on_the_same_prefix_lets_go_of_nothing_but_its_own():  # 43
    bench = Bench([full(64), window(16, 32), state(16)], 16)
    holder = bench.arrive("x", tokens(0, 100), answer=40)
    bench.step()
    before = {block: block.holders for block in holder.held()}
    bench.arrive("y", tokens(0, 96) + tokens(1, 30))
    assert bench.step().copies == 1
    assert "y" not in bench.model.requests and bench.hits["y"] == 96
    assert {block: block.holders for block in holder.held()}.items() >= before.items()
    assert not any(block in block.pool.named for block in before)


# Eviction and retention


def test_a_fork_deep_in_an_old_chain_finds_a_spaced_state():  # 46
    bench = Bench([full(2048), state(2048)], 2048, blocks=(80, 50), token_budget=8192, retention=None)
    chains = [tokens(seed, 32_769) for seed in range(3)]
    for number, chain in enumerate(chains):
        bench.serve(**{str(number): chain})
    bench.serve(more=tokens(9, 17_600))
    assert bench.model.pools[1].evicted > 0
    # By age alone the states at 8192 and 4096 were taken before those further on. Those at 1, 2, 4, ... blocks stay.
    assert bench.serve(fork=chains[0][:8192] + tokens(8, 1600)) == [8192]


def test_the_tail_of_a_prefix_goes_before_its_head_however_it_was_computed():  # 48
    bench = Bench([full(16)], 16, blocks=130, token_budget=32 * 16)
    prompt = tokens(0, 128 * 16)
    bench.serve(a=prompt)
    assert len(bench.ends["a"]) == 4
    free = len(bench.model.pools[0].nameless)
    bench.serve(b=tokens(1, (64 + free) * 16 - 1))
    assert bench.filed(prompt, 0) == [16 * unit for unit in range(1, 65)]


def test_a_hit_counts_as_use():  # 50
    bench = Bench([full(16)], 16, blocks=4)
    prompts = {name: tokens(ord(name), 17) for name in "sabc"}
    for name in "sab":
        bench.serve(**{name: prompts[name]})
    assert bench.serve(again=prompts["s"]) == [16]
    bench.serve(c=prompts["c"])
    assert {name: bench.model.probe(prompts[name]).tokens for name in "sabc"} == {"s": 16, "a": 0, "b": 16, "c": 16}


def test_a_state_that_finds_no_slot_is_skipped_and_counted():  # 52
    bench = Bench([full(16), state(16)], 16, blocks=(200, 8), chunk_limit=30)
    for number in range(8):
        bench.arrive(str(number), tokens(number, 40), answer=5)
    assert len(bench.step().rows) == 8
    assert bench.free[1] == 0 and bench.model.statistics.skipped_states == 0
    step = bench.step()  # into which the tails fall
    assert len(step.rows) == 8 and not step.preempted and bench.model.statistics.skipped_states == 8
    bench.drain()
    assert not any(bench.filed(tokens(number, 40), 1) for number in range(8))


def test_free_and_held_blocks_part_the_pool_after_any_operation():  # 53
    rng = random.Random(0)
    index = Index()
    pool = Pool(12, index)
    held: list = []
    for number in range(10_000):
        choice = rng.randrange(5)
        if choice == 0 and pool.free:
            held.append(pool.take())
            assert not held[-1].names
        elif choice == 1 and pool.named:
            held.append(rng.choice(list(pool.named)))
            pool.hold(held[-1])
        elif choice == 2 and held:
            index.add((0, rng.randrange(40)), rng.choice(held))
        elif choice == 3 and held:
            pool.drop(held.pop(rng.randrange(len(held))))
        elif 0 < len(held) < 30:
            held.append(rng.choice(held))
            pool.hold(held[-1])
        free = [*pool.nameless, *pool.named]
        assert len(set(free)) == len(free) == pool.free == pool.size - len(set(held)), number
        assert all(block.holders == held.count(block) for block in {*free, *held})
        found = {block for name in index.names() for block in index.all(name)}
        assert found == {block for block in {*free, *held} if block.names}
        assert set(pool.named) == found - set(held)


# Drafts


def test_after_each_verification_the_state_is_that_of_the_accepted_tokens():  # 55
    bench = Bench([full(4, draft=True), state(4)], 4, draft=Draft.DROP, slots_ahead=3)
    request = bench.arrive("a", tokens(0, 20), answer=40)
    bench.step()
    computed = []
    for accepted in range(4):
        bench.model.propose("a", 3)
        step = bench.step(accept=accepted)
        assert step.rows[0].length == 4
        computed.append(request.computed)
        tags = bench.device.tags_of(request)
        assert bench.device.states[request.tables[1][0]] == tags[request.computed]
        assert max(bench.filed(request.tokens, 0)) <= request.computed
    assert computed == [21, 23, 26, 30]


def test_a_step_is_settled_with_the_tables_it_was_planned_with():  # 58
    specs = [full(4, draft=True), window(4, 8, draft=True), state(4)]
    bench = Bench(specs, 4, draft=Draft.DROP, slots_ahead=3, steps_in_flight=3)
    request = bench.arrive("a", tokens(0, 10), answer=80)
    flying, moved = [], 0
    for number in range(24):
        bench.model.propose("a", 3)
        before = [dict(table) for table in request.tables]
        flying.append(bench.schedule())
        moved += before != request.tables
        if len(flying) == 3:
            # Tables of the two steps behind it exist, and tokens they count on may be refused.
            bench.commit(flying.pop(0), accept=number % 4)
            tags = bench.device.tags_of(request)
            assert request.computed == len(request.tokens) - 1
            assert bench.device.states[request.tables[2][0]] == tags[request.computed]
            assert max(bench.filed(request.tokens, 0), default=0) <= request.computed
    assert moved > 5 and len(request.tokens) > 40


def test_rows_behind_a_refused_draft_read_the_prefix_as_it_stands():  # 59
    specs = [full(4, draft=True), full(4, "target"), state(4), state(4, "two")]
    bench = Bench(specs, 4, draft=Draft.DROP, slots_ahead=3)
    request = bench.arrive("a", tokens(0, 21), answer=40)
    bench.step()
    ends = []
    for _ in range(4):
        bench.model.propose("a", 3)
        # Of four tokens the second is refused: one draft holds, and the device looks at all rows that are read.
        step = bench.step(accept=1)
        assert (step.rows[0].length, step.rows[0].start) == (4, ends[-1] if ends else 21)
        ends.append(request.computed)
        tags = bench.device.tags_of(request)
        assert [bench.device.states[request.tables[group][0]] for group in (2, 3)] == [tags[request.computed]] * 2
    assert ends == [23, 25, 27, 29]


# Context-parallel shards


@pytest.mark.parametrize(("unit", "hit"), [(32, 128), (16, 144)])
def test_a_hit_never_passes_the_shared_prefix_under_dcp(unit, hit):  # 61
    bench = Bench([full(16)], unit, dcp=2)
    bench.serve(a=tokens(0, 550))
    # With the finer unit a block of 32 is served to its middle.
    assert bench.serve(b=tokens(0, 150) + tokens(1, 400)) == [hit]


def test_striped_rows_and_whole_states_serve_one_hit():  # 64
    bench = Bench([full(16), state(64)], 64, dcp=4)
    bench.serve(a=tokens(0, 200))
    assert bench.serve(b=tokens(0, 200)) == [192]
    rows, recurrent = bench.geometry.groups
    assert [rows.count(192, rank) for rank in range(4)] == [48] * 4
    assert recurrent.shards == 1 and recurrent.count(192, 0) == 192


@pytest.mark.parametrize("interleave", [1, 16, 64])
def test_shards_of_a_resumed_prefix_differ_by_one_stripe_at_most(interleave):  # 65
    group = resolve([full(64)], dcp=8, interleave=interleave).groups[0]
    counts = np.array([group.count(4096 + 300, rank) for rank in range(8)])
    assert counts.sum() == 4396 and counts.max() - counts.min() <= interleave
    owned = np.bincount([group.rank(position) for position in range(4396)], minlength=8)
    assert (owned == counts).all()
