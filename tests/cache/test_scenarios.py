"""Every scenario hits at least as much as the reference system, in no more steps, and gives every block back."""

import gzip
import itertools
import json
from pathlib import Path

import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.simulate.scenarios import Run, main, stream, tokens_of

FOLDER = Path(__file__).parents[1] / "data" / "scenarios"


def scenarios() -> dict[str, dict]:
    with gzip.open(FOLDER / "scenarios.jsonl.gz", "rt") as lines:
        return {scenario["name"]: scenario for scenario in map(json.loads, lines)}


SCENARIOS = scenarios()
# Families the reference traces do not cover: no numbers to compare with, but every block is looked at.
UNTRACED = {one["name"]: one for one in map(json.loads, (FOLDER / "untraced.jsonl").read_text().splitlines())}


@pytest.mark.parametrize("family", ["A", "B", "C", "E", "F", "G", "J"])
def test_hits_steps_and_pool_of_a_family(family):
    chosen = [scenario for name, scenario in SCENARIOS.items() if name.startswith(family)]
    assert chosen
    for scenario in chosen:
        _holds(scenario, Run(scenario).run())


def test_the_compiled_core_serves_a_scenario_as_well():
    scenario = SCENARIOS["E_full_swa_drop"]
    _holds(scenario, Run(scenario, compiled=True).run())


def _holds(scenario, records) -> None:
    """The trace of a scenario is at least as good as the reference system's."""
    want, end = scenario["reference"], records[-1]
    assert "stall" not in end and "unfinished" not in end
    assert end["free"] == want["end"]["free"], scenario["name"]
    assert end["steps"] <= want["end"]["steps"], scenario["name"]
    for kind in ("r", "p"):
        got = {record["id"]: record["hit"] for record in records if record["t"] == kind}
        assert got.keys() == want[kind].keys()
        if not want["end"]["evicted"]:
            less = {name: (got[name], hit) for name, hit in want[kind].items() if got[name] < hit}
            assert not less, scenario["name"]
    if want["end"]["evicted"]:
        floor = want["end"]["hit"] + want["end"]["resume_hit"]
        assert end["hit"] + end["resume_hit"] >= 0.98 * floor, scenario["name"]


@pytest.mark.parametrize("name", sorted(UNTRACED))
@pytest.mark.parametrize("overlapped", [False, True])
def test_content_is_true_and_every_block_comes_back(name, overlapped):
    scenario = {**UNTRACED[name], "config": {**UNTRACED[name]["config"], "async_scheduling": overlapped}}
    records = Run(scenario, checked=True).run()
    end, ended = records[-1], {record["id"] for record in records if record["t"] == "r"}
    assert "stall" not in end and "unfinished" not in end
    assert ended == {request["id"] for request in scenario["requests"]}
    assert end["free"] == scenario["config"]["num_blocks"] - 1
    budget = scenario["config"]["max_num_batched_tokens"]
    most = min(scenario["config"]["max_num_seqs"], scenario["config"].get("max_num_active_seqs") or 1 << 20)
    for record in records:
        if record["t"] == "s":
            assert sum(row[1] for row in record["sched"].values()) <= budget
            assert record["q"][0] <= most


@pytest.mark.parametrize("name", ["A_shared_b64_r0_ck", "C_agent_eagle_drop_pm16", "C_agent_ngram3_pm16", "G_burst_r0"])
def test_overlapped_steps_hit_as_much_and_are_completed_one_step_later(name):
    scenario = SCENARIOS[name]
    overlapped = {**scenario, "config": {**scenario["config"], "async_scheduling": True}}
    apart, together = Run(scenario).run(), Run(overlapped).run()
    assert together[-1]["hit"] >= apart[-1]["hit"]
    assert {"stall", "unfinished"}.isdisjoint(together[-1])
    steps = [record for record in together if record["t"] == "s"]
    assert {record["u"] - record["i"] for record in steps} <= {0, 1}
    follower = [(a, b) for a, b in itertools.pairwise(steps) if b["i"] == a["i"] + 1]
    assert follower and all(a["u"] == b["i"] for a, b in follower)


def test_token_streams_are_the_published_ones():
    assert stream(101, 3) == stream(101, 5)[:3]
    assert tokens_of([[101, 2, 3], [7, 1]]) == [*stream(101, 5)[3:], stream(7, 1)[0]]
    assert tokens_of({"ids": [4, 5]}) == [4, 5]
    # By the formula, in arbitrary precision.
    z = (101 * 0x9E3779B97F4A7C15 + 0xBF58476D1CE4E5B9) % 2**64
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 % 2**64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    assert stream(101, 1) == (z % 163840,)


def test_the_command_writes_a_trace_and_refuses_what_it_cannot_do(tmp_path, capsys):
    scenario = SCENARIOS["F_mla64"]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(scenario))
    assert main([str(path), "--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "F_mla64.jsonl").read_text().splitlines()
    assert [json.loads(line)["t"] for line in (lines[0], lines[-1])] == ["cfg", "end"]
    with pytest.raises(UserError, match="async_scheduling"):
        Run({**scenario, "config": {**scenario["config"], "async_scheduling": "yes"}})
    for text, said in (
        ("{", "readable JSON"),
        ('{"name": "x"}', "field"),
        ("[]", "field"),
        ('{"config": {}}', "field"),
    ):
        path.write_text(text)
        assert main([str(path), "--out", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": "a/b"}, "name"), ({"name": "a\nb"}, "name"), ({"config": {"num_blocks": 10**12}}, "num_blocks"),
        ({"config": {"max_num_batched_tokens": 2.5}}, "max_num_batched_tokens"),
        ({"request": {"output_len": 0}}, "output_len"),
        ({"request": {"after": ["zz", 0]}}, "after"), ({"request": {"arrival_step": 1.5}}, "arrival_step"),
        ({"request": {"prompt": [[-1, 5]]}}, "prompt"), ({"request": {"prompt": [[1, 10**13]]}}, "prompt"),
        ({"request": {"accept": ["q"]}}, "accept"), ({"probes": [{"id": "p"}]}, "field"),
        ({"events": [{"step": "x", "op": "reset_prefix_cache"}]}, "step"), ({"request": {"id": "r1"}}, "id"),
    ],
)  # fmt: skip
def test_a_bad_scenario_is_one_line_and_exit_code_2(change, named, tmp_path, capsys):
    scenario = json.loads(json.dumps(SCENARIOS["F_mla64"]))
    scenario["config"] |= change.get("config", {})
    scenario["requests"][0] |= change.get("request", {})
    scenario |= {key: value for key, value in change.items() if key not in ("config", "request")}
    path = tmp_path / "one.json"
    path.write_text(json.dumps(scenario))
    assert main([str(path), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert named in printed and printed.count("\n") == 1
