"""Blocks: which are taken, in which order, by whom they are held. Numbers of the reference system, cases named."""

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
