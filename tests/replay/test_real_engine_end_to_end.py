"""The command line with the real engine on eight stand-in devices: reference tokens, hits, verification."""

import json
from pathlib import Path

import numpy as np
import pytest

from hybrid_kv import cli
from hybrid_kv.simulate.traces import read_trace

MESH = ("--mesh", "model=2,dcp=4")
# Small, and the same in all tests, so that little is compiled and that once: units of 16 tokens, steps of 4 or 64.
SMALL = ("--hash-unit", "16", "--token-budget", "64", "--token-buckets", "64", "--max-requests", "4")
CONTEXT = ("--max-context", "256")


def test_generate_gives_the_reference_tokens(tiny_checkpoint: Path, capsys) -> None:
    with np.load(tiny_checkpoint / "reference_outputs.npz") as reference:
        prompt, answer = reference["prompt_1"].ravel().tolist(), reference["greedy_1"].ravel().tolist()
    arguments = ["--checkpoint", str(tiny_checkpoint), "--prompt-tokens", ",".join(map(str, prompt))]
    count = ["--max-tokens", str(len(answer)), "--ignore-stop"]
    assert cli.main(["generate", *arguments, *MESH, *SMALL, *CONTEXT, *count]) == 0
    assert capsys.readouterr().out == ",".join(map(str, answer)) + "\n"


def test_replay_hits_and_verifies(tiny_checkpoint: Path, tmp_path: Path) -> None:
    # Two sessions of two turns; every turn goes on from the answer before, and the second session forks off.
    rng = np.random.default_rng(0)

    def row(session: str, base: int, keep: int, add: int, out: int) -> str:
        tokens = [rng.integers(0, 10_000, n).tolist() for n in (add, out)]
        fields = {"session": session, "t": 0.0, "base": base, "keep": keep, "add": tokens[0], "out": tokens[1]}
        return json.dumps(fields) + "\n"

    trace = tmp_path / "trace.jsonl"
    rows = [("a", -1, 0, 150, 20), ("b", 0, 100, 30, 12), ("a", 0, 170, 25, 9), ("b", 1, 142, 20, 5)]
    trace.write_text("".join(row(*fields) for fields in rows))
    assert len(read_trace(trace)) == 4

    arguments = ["--checkpoint", str(tiny_checkpoint), "--trace", str(trace), "--out", str(tmp_path)]
    assert cli.main(["replay", "--verify", *arguments, *MESH, *SMALL, *CONTEXT]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    summary, turns = report["summary"], {row["index"]: row for row in report["requests"]}
    assert report["verification"]["tokens"] == 46
    assert turns[0]["hit"] == 0
    # A turn resumes at the last boundary of what the turn before computed: 169 and 141 tokens.
    assert (turns[2]["hit"], turns[3]["hit"]) == (160, 128)
    assert summary["compilations_after_warm_up"] == 0
    assert summary["prefill_splits"] == 0
    assert summary["hit_rate"] <= summary["ceilings"]["attention"]


@pytest.mark.parametrize("mesh", ["model=1", "model=2,dcp=4", "dcp=8"])
def test_describe_needs_neither_weights_nor_devices(tiny_checkpoint: Path, tmp_path: Path, mesh: str, capsys) -> None:
    (tmp_path / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
    assert cli.main(["describe", "--checkpoint", str(tmp_path), "--mesh", mesh]) == 0
    text = capsys.readouterr().out
    assert "mla" in text
    assert "kda" in text
    assert "MiB per device" in text


def test_describe_shows_how_the_model_is_spread(tiny_checkpoint: Path, capsys) -> None:
    flags = ["--mesh", "model=2,dcp=4", "--kda", "replicated", "--residual", "sequence", "--token-budget", "100"]
    assert cli.main(["describe", "--checkpoint", str(tiny_checkpoint), *flags]) == 0
    text = capsys.readouterr().out
    assert "whole state on every rank" in text
    assert "32, 104 tokens" in text
