"""Requests made from block traces: equal ids are equal tokens, and nothing else is."""

import gzip
import json

import numpy as np
import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.simulate.workloads import LONGEST_ANSWER, agent_sessions, mooncake, reference


def written(path, rows):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def row(length, ids, answer=10):
    return {"timestamp": 0, "input_length": length, "output_length": answer, "hash_ids": ids}


def common(one, other):
    """Tokens at the front that two prompts share."""
    length = min(len(one), len(other))
    unlike = np.flatnonzero(one[:length] != other[:length])
    return int(unlike[0]) if len(unlike) else length


def test_prompts_share_exactly_the_blocks_whose_ids_they_share(tmp_path):
    path = written(tmp_path / "t.gz", [row(1100, [1, 2, 3], 900), row(1536, [1, 2, 4]), row(700, [5, 6])])
    first, second, third = mooncake(path)
    assert [len(one.prompt) for one in (first, second, third)] == [1100, 1536, 700]
    assert common(first.prompt, second.prompt) == 1024 and common(first.prompt, third.prompt) < 4
    assert len(first.answer) == LONGEST_ANSWER and len({one.session for one in (first, second, third)}) == 3
    assert len(list(mooncake(path, limit=2))) == 2


def test_who_goes_on_behind_the_only_request_that_ended_inside_a_block_begins_it_alike(tmp_path):
    rows = [row(600, [1, 2]), row(1536, [1, 3, 4]), row(1100, [1, 3, 5])]
    path = written(tmp_path / "t.gz", rows)
    first, second, third = mooncake(path, continued=True)
    assert (common(first.prompt, second.prompt), common(second.prompt, third.prompt)) == (600, 1024)
    first, second, _ = mooncake(path)
    assert common(first.prompt, second.prompt) < 520


def test_only_the_second_to_reach_a_block_goes_on_where_the_first_ended(tmp_path):
    path = written(tmp_path / "t.gz", [row(1024, [1, 2]), row(600, [1, 3]), row(1024, [1, 4])])
    _, second, third = mooncake(path, continued=True)
    assert common(second.prompt, third.prompt) < 520


def session(name, requests):
    rows = [{"t": t, "in": length, "out": 5, "runs": runs} for t, length, runs in requests]
    return {"id": name, "tool_tokens": 0, "system_tokens": 0, "requests": rows}


def test_sessions_end_before_a_long_prompt_and_share_nothing_with_each_other(tmp_path):
    one = session("a", [(0, 200, [[0, 3]]), (5, 300, [[0, 4]]), (9, 999, [[0, 15]]), (12, 100, [[0, 1]])])
    other = session("b", [(0, 200, [[0, 3]])])
    path = written(tmp_path / "t.gz", [one, other])
    arrivals = list(agent_sessions(path, 2, 1.0, longest_prompt=500))
    mine = [arrival for arrival in arrivals if arrival.session == "a"]
    assert [len(arrival.prompt) for arrival in mine] == [200, 300]
    assert common(mine[0].prompt, mine[1].prompt) == 192
    (theirs,) = (arrival for arrival in arrivals if arrival.session == "b")
    assert common(mine[0].prompt, theirs.prompt) < 4


def test_requests_of_a_sub_agent_count_from_its_start_and_long_pauses_are_cut(tmp_path):
    nested = session("a", [(0, 64, [[0, 1]]), (1000, 64, [[1, 1]])])
    nested["requests"].append({"t": 30, "requests": [{"t": 5, "in": 128, "out": 1, "runs": [[2, 2]]}]})
    other = session("b", [(0, 192, [[0, 3]]), (100, 256, [[0, 4]])])
    path = written(tmp_path / "t.gz", [nested, other])
    # Each begins in the first seconds; a pause of 965 seconds and one of 100 count as 60.
    lengths = [len(arrival.prompt) for arrival in agent_sessions(path, 2, 1.0)]
    assert lengths.index(128) < lengths.index(256)
    assert sorted(lengths) == [64, 64, 128, 192, 256]


def test_a_folder_without_the_traces_or_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(UserError, match="use one of miniswe"):
        reference(tmp_path, "other")
    with pytest.raises(UserError, match=r"readable \.jsonl\.gz"):
        reference(tmp_path, "synthetic")
    (tmp_path / "mooncake_synthetic.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match=r"readable \.jsonl\.gz"):
        reference(tmp_path, "synthetic")
