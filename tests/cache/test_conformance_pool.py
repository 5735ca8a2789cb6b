"""Blocks: which are taken, in which order, by whom they are held. Numbers of the reference system, cases named."""

import pytest

from hybrid_kv.cache.reference import Draft, Model, Rules, admission, room
from hybrid_kv.cache.reference.pool import Index, Pool
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from tests.cache.bench import Bench, full, state, tokens, window


def ids(blocks) -> list[int]:
    return [block.number for block in blocks]


def order(bench: Bench) -> list[int]:
    """Free blocks in the order they are taken."""
    return ids(bench.model.pools[0].next(bench.free[0]))


def table(bench: Bench, name: str) -> list[int]:
    return ids(bench.model.requests[name].tables[0].values())


def test_a_cold_prefill_hits_while_in_use_and_after_and_the_order_of_eviction():  # A1
    bench = Bench([full(16)], 16, blocks=10)
    head = tokens(0, 48)
    bench.arrive("a", head + tokens(1, 7), answer=5)
    bench.step()
    assert table(bench, "a") == [1, 2, 3, 4] and bench.filed(head + tokens(1, 7), 0) == [16, 32, 48]
    bench.arrive("b", head + tokens(2, 5), answer=5)
    bench.step()
    assert bench.hits["b"] == 48 and table(bench, "b") == [1, 2, 3, 5] and bench.free == [5]
    assert [block.holders for block in bench.model.requests["b"].tables[0].values()] == [2, 2, 2, 1]
    for name in "ab":
        bench.model.finish(name)
    assert order(bench) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    bench.arrive("c", head + tokens(3, 6), answer=5)
    bench.step()
    assert bench.hits["c"] == 48 and table(bench, "c") == [1, 2, 3, 5] and bench.free == [6]
    bench.model.finish("c")
    bench.arrive("d", tokens(4, 159))
    bench.schedule()
    assert table(bench, "d") == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_blocks_without_a_name_go_first_and_each_prefix_from_its_end():  # A2
    bench = Bench([full(16)], 16, blocks=10)
    first, second = tokens(0, 87), tokens(1, 48)
    bench.arrive("a", first)
    bench.arrive("b", second)
    step = bench.schedule()
    assert (table(bench, "a"), table(bench, "b")) == ([1, 2, 3, 4, 5, 6], [7, 8, 9])
    bench.device.run(step, {"a": [1], "b": [1]})
    bench.model.commit(step, {"a": [1], "b": [1]})
    bench.model.finish("a")
    assert order(bench) == [6, 10, 5, 4, 3, 2, 1]
    bench.model.finish("b")
    assert order(bench) == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    bench.arrive("c", first[:32] + tokens(2, 3))
    bench.schedule()
    assert table(bench, "c") == [1, 2, 6] and bench.free == [7]


def test_hits_of_all_groups_are_held_before_anything_is_taken():  # A20
    # One pool, just large enough: the hits of both full groups and what comes behind them.
    bench = Bench([full(16, "one"), full(16, "two")], 16, blocks=14)
    bench.serve(a=tokens(0, 81))
    bench.arrive("b", tokens(0, 80) + tokens(1, 31))
    bench.step()
    assert bench.hits["b"] == 80
    bench = Bench([full(16), window(16, 32), state(16)], 16, blocks=17)
    bench.serve(a=tokens(0, 81))
    request = bench.arrive("b", tokens(0, 80) + tokens(1, 31), answer=2)
    bench.schedule()
    held = request.held()
    assert bench.hits["b"] == 80 and len(set(held)) == len(held)
    assert all(block.holders == 1 for block in held)


# Names and the order of eviction


def test_a_block_that_is_taken_again_has_lost_its_name():  # A3
    bench = Bench([full(16)], 16, blocks=1)
    bench.serve(a=tokens(0, 16))
    (block,) = bench.model.pools[0].blocks
    assert block.names
    bench.arrive("b", tokens(1, 15))
    bench.schedule()
    assert table(bench, "b") == [block.number] and not block.names


def test_a_hit_is_not_taken_for_what_comes_behind_it():  # A4
    bench = Bench([full(16)], 16, blocks=2)
    bench.serve(a=tokens(0, 16))
    bench.arrive("b", tokens(0, 16) + tokens(1, 5))
    bench.schedule()
    assert bench.hits["b"] == 16 and table(bench, "b") == [1, 2]


def test_a_block_is_named_when_its_last_token_is_computed():  # A5
    bench = Bench([full(16)], 16)
    request = bench.arrive("a", tokens(0, 55), answer=40)
    seen = []
    for steps in (1, 4, 19):
        for _ in range(steps):
            bench.step()
        seen.append((request.computed, len(table(bench, "a")), bench.filed(request.tokens, 0)[-1]))
    assert seen == [(55, 4, 48), (59, 4, 48), (78, 5, 64)]


def test_who_does_not_read_the_cache_still_writes_it_and_equal_content_is_filed_twice():  # A6
    bench = Bench([full(16)], 16, blocks=20)
    head = tokens(0, 48)
    bench.arrive("a", head + tokens(1, 7), answer=5)
    bench.step()
    bench.arrive("b", head + tokens(1, 7), answer=5, read_cache=False)
    bench.step()
    assert bench.hits["b"] == 0 and not set(table(bench, "a")) & set(table(bench, "b"))
    blocks = [bench.model.requests[name].tables[0][column] for name in "ab" for column in range(3)]
    assert [block.names for block in blocks[:3]] == [block.names for block in blocks[3:]] != [set()] * 3
    bench.model.abort("a")
    assert bench.model.probe([*head, 5]).tokens == 48  # b's are left


def test_without_caching_blocks_are_given_and_nothing_is_found():  # A7
    bench = Bench([full(4)], 4, blocks=4, caching=False)
    prompt = tokens(0, 16)
    for name in "ab":
        assert bench.serve(**{name: prompt}) == [0]
    assert not list(bench.model.index.names()) and bench.free == [4]
    with pytest.raises(UserError, match="this request alone needs 5 blocks"):
        bench.arrive("c", tokens(0, 17))


def test_a_hit_that_nobody_holds_counts_as_taken_and_a_refusal_moves_nothing():  # A9
    bench = Bench([full(16)], 16, blocks=10)
    head = tokens(0, 48)
    bench.serve(a=head)
    bench.arrive("holder", tokens(1, 107), answer=20)
    bench.step()
    before = order(bench)
    assert before == [3, 2, 1]
    # Three blocks of the hit and one behind it, where three are free.
    request = bench.arrive("b", head + tokens(2, 10))
    assert not bench.schedule().admitted
    assert order(bench) == before and not request.held()
    assert [block.holders for block in bench.model.pools[0].next(3)] == [0, 0, 0]


def test_a_request_larger_than_the_pool_is_refused_at_once():  # A22
    bench = Bench([full(16), window(16, 64)], 16, blocks=(5, 100), token_budget=128, max_context=1024)
    with pytest.raises(UserError, match=r"pool_blocks\[0\]: got 5; this request alone needs 16 blocks"):
        bench.arrive("a", tokens(0, 255))
    assert not bench.model.requests


def test_the_index_gives_the_block_filed_first_and_forgets_only_what_it_is_told_to():  # A11, A12
    index = Index()
    pool = Pool(3, index)
    one, two, stranger = (pool.take() for _ in range(3))
    name = (0, 7)
    assert index.add(name, one) and index.add(name, two)
    assert not index.add(name, one)  # silent the second time
    assert index.find(name) is one and index.all(name) == [one, two] and list(index.names()) == [name]
    index.remove(name, stranger)
    assert index.all(name) == [one, two]
    index.evict(one)
    assert index.find(name) is two and not one.names and name not in index.evicted
    index.evict(two)
    assert index.find(name) is None and not list(index.names()) and name in index.evicted


def test_the_queue_of_free_blocks_keeps_its_order_when_one_is_held_in_between():  # A13
    index = Index()
    pool = Pool(6, index)
    blocks = [pool.take() for _ in range(6)]
    assert ids(blocks) == [1, 2, 3, 4, 5, 6] and pool.next(9) == []
    for number, block in enumerate(blocks[:4]):
        index.add((0, number), block)
    for block in blocks:
        pool.drop(block)
    # Nameless ones first, the last dropped of them first; named ones in the order they were dropped.
    assert ids(pool.next(6)) == [6, 5, 1, 2, 3, 4] and ids(pool.next(3)) == [6, 5, 1]
    pool.hold(blocks[1])
    assert pool.free == 5 and ids(pool.next(6)) == [6, 5, 1, 3, 4]
    pool.drop(blocks[1])
    assert ids(pool.next(6)) == [6, 5, 1, 3, 4, 2]
    pool.refresh(blocks[0])
    assert [pool.take().number for _ in range(6)] == [6, 5, 3, 4, 2, 1]
    assert pool.evicted == 4 and not list(index.names())


# What is reserved is what is taken


@pytest.mark.parametrize(
    ("spec", "blocks"),
    # Twenty blocks: ten of the hit, nobody's before, and ten new. A window takes up the last five of the hit.
    [(full(2), 20), (window(2, 10), 15), (GroupSpec("local", "chunked_local", 2, window=64), 20)],
    ids=["full", "window", "local"],
)
def test_blocks_of_a_hit_count_unless_the_window_has_left_them(spec, blocks):  # A18, A19
    bench = Bench([spec], 2, blocks=40, retention=None)
    head = tokens(0, 20)
    bench.serve(a=head + tokens(1, 2))
    request = bench.arrive("b", head + tokens(2, 20))
    hit, find = admission.find_hit(bench.model, request)
    adopted = admission.served(bench.model, request, hit.tokens, find)
    assert hit.tokens == 20 and room.need(bench.model, request, 40, adopted, hit.tokens) == [blocks]
    bench.schedule()
    assert bench.free == [40 - blocks]


@pytest.mark.parametrize("block", [896, 1536])
@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("hit", [0, 23040])
def test_admission_and_step_reserve_what_is_taken(block, drafts, hit):  # I12, A24
    rules = {"draft": Draft.LOOKAHEAD, "lookahead": 1, "slots_ahead": drafts} if drafts else {}
    geometry = resolve([full(block, draft=bool(drafts)), window(128, 512), state(block)], hash_unit=128)
    core = Model(Rules(geometry, (2000, 2000, 50), (0, 1, 2), **rules))
    prompt = tokens(0, 25121)
    if hit:
        core.arrive("first", prompt[: hit + 1])
        while core.requests:
            step = core.schedule()
            ends = [row.request.name for row in step.rows if row.samples]
            core.commit(step, {name: [1] for name in ends}, ends)
    core.arrive("a", prompt)
    request = core.requests["a"]
    found, find = admission.find_hit(core, request)
    assert found.tokens == hit
    adopted = admission.served(core, request, hit, find)
    before = [pool.free for pool in core.pools]
    end = min(hit + 8192, 25121)
    wanted = room.need(core, request, end, adopted, hit)
    step = core.schedule()
    saved = sum(len(row.emissions) for row in step.rows)
    taken = [had - pool.free for had, pool in zip(before, core.pools, strict=True)]
    assert taken == [wanted[0], wanted[1], wanted[2] + saved]
