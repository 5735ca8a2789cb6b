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


@pytest.mark.parametrize(("kda", "parts"), [("tensor", 8), ("model", 2), ("replicated", 1)])
def test_states_take_what_their_split_leaves_on_a_device(capsys, kda, parts):
    text = run(capsys, "--model", "kimi-linear", "--mesh", "model=2,dcp=4", "--kda", kda)
    assert f"state takes {2_170_880 // parts:,} B, its row 1,152 B" in text


# MiB of padding in a request of 131,072 tokens: smallest blocks, blocks of whole 64-token units (docs/08-planning.md).
PADDING = {
    ("kimi-linear", "model=1"): (4.17, 5.78),
    ("kimi-k3", "model=1"): (37.37, 44.02),
    ("kimi-k3+draft", "model=1"): (223.72, 231.75),
    ("kimi-k3+replicated-draft", "model=1"): (161.60, 175.43),
    ("full+window+gdn", "model=1"): (0.0, 12.19),
    ("kimi-linear", "dcp=8"): (0.54, 0.72),
    ("kimi-k3", "dcp=8"): (4.71, 5.50),
    ("kimi-k3+draft", "dcp=8"): (28.01, 28.97),
    ("kimi-k3+replicated-draft", "dcp=8"): (21.02, 30.39),
    ("full+window+gdn", "dcp=8"): (0.12, 1.52),
}


@pytest.mark.parametrize(("model", "mesh"), PADDING)
def test_the_documented_waste_is_what_the_command_prints(capsys, repo_root, model, mesh):
    records = json.loads(run(capsys, "--model", model, "--mesh", mesh, "--json"))
    padded = [round(record["request_padding_bytes"] / 2**20, 2) for record in records]
    assert tuple(padded) == (0, *PADDING[model, mesh])
    page = (repo_root / "docs" / "08-planning.md").read_text()
    assert all(f"{figure:.2f} MiB" in page for figure in PADDING[model, mesh] if figure)


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
