"""`hybrid-kv plan` prints the tables of the known models, or one line that says what to change."""

import json

import pytest

from hybrid_kv import cli
from hybrid_kv.planning.published import MODELS


def run(capsys, *arguments):
    assert cli.main(("plan", *arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("mesh", ["model=1", "dcp=8"])
def test_all_models_are_planned_by_default_and_unified(capsys, mesh):
    text = run(capsys, "--mesh", mesh)
    assert all(name in text for name in MODELS)
    records = json.loads(run(capsys, "--mesh", mesh, "--json"))
    assert [record["layout"] for record in records] == ["per shape", "unified", "unified"] * len(MODELS)
    assert all(group["padding_bytes"] == 0 for record in records[::3] for group in record["groups"])


def test_the_table_shows_the_inflated_block_and_its_waste(capsys):
    text = run(capsys, "--model", "kimi-linear")
    assert "state takes 2,170,880 B, its row 1,152 B: a block of common pages has at least 1,885 rows a rank" in text
    assert "unified, mesh 1x1: hash unit 1,885, schedule block 1,885, hit unit 1,885 tokens" in text
    assert "4.17 MiB of it padding (0.38%)" in text
    assert "unified, mesh 1x1: hash unit 64, schedule block 1,920" in text


def test_a_trace_chooses_the_split(capsys, traces_dir):
    trace = ("--trace", str(traces_dir / "miniswe_60.jsonl.gz"), "--memory", "4", "--model", "kimi-linear")
    chosen, *_ = json.loads(run(capsys, *trace, "--max-context", "20480", "--json"))
    given, *_ = json.loads(run(capsys, *trace, "--max-context", "20480", "--split", "kda=0.2,mla=0.8", "--json"))
    assert chosen["horizon"] > given["horizon"]
    assert f"any {chosen['horizon']} successive requests of 60" in run(capsys, *trace, "--max-context", "20480")


REFUSED = {
    "model": (("--model", "gpt"), "model: got 'gpt'; use one of: kimi-linear, kimi-k3"),
    "no memory": (("--memory", "0"), "memory: got 0.0; give GiB of one device, more than 0"),
    "memory no number": (("--memory", "nan"), "memory: got nan"),
    "little memory": (("--memory", "0.01"), "the null block and one more of every pool take"),
    "short memory": (("--memory", "1"), "or set max_context to at most 116928"),
    "split no number": (("--split", "kda"), "split: got 'kda'; write fractions as in kda=0.1,mla=0.9"),
    "split twice": (("--split", "kda=0.1,kda=0.9"), "it names pool 'kda' twice"),
    "split sum": (("--split", "kda=0.5,mla=0.6"), "fractions add up to 1.1"),
    "mesh": (("--mesh", "dcp=5"), "mesh: got 'dcp=5'; it splits the 32 heads of layer 0 (kda) into 5 parts"),
    "interleave": (("--mesh", "dcp=8", "--interleave", "3"), "interleave: got 3; it must divide the 64 rows"),
    "retention": (("--retention", "100"), "retention: got 100; hits end at multiples of the hash unit"),
    "no trace": (("--trace", "absent.jsonl"), "trace: got 'absent.jsonl'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_one_line_and_exit_code_2(capsys, case):
    arguments, message = REFUSED[case]
    assert cli.main(("plan", *arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1
