"""The replay command: exit codes, the report's numbers, its files."""

import io
import json

import pytest
from rich.console import Console

from hybrid_kv.errors import UserError
from hybrid_kv.replay.command import ReplayOptions, run_replay


@pytest.fixture
def go(two_sessions, toy_engine, sampling, tmp_path):
    """Runs the command with a toy engine that has the given faults; (exit code, printed text, folder)."""

    def run(verify: bool = True, **faults):
        out = tmp_path / "made" / "here"
        options = ReplayOptions("some/trace.jsonl", "some/tiny", "model=1", 8, 1000, 8, verify, out, {"hash_unit": 8})
        console = Console(file=io.StringIO(), width=120, markup=False, highlight=False)
        code = run_replay(
            options,
            two_sessions,
            lambda caching: toy_engine(caching, **faults if caching else {}),
            sampling,
            console,
        )
        return code, console.file.getvalue(), out

    return run


def test_a_good_run_exits_0_and_writes_both_files(go) -> None:
    code, text, out = go()
    assert code == 0
    assert "FAILED" not in text
    report = json.loads((out / "report.json").read_text())
    assert report["passed"]
    assert report["verification"]["mismatches"] == []
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "0 wrong" in text


def test_the_report_counts_the_replay_and_not_the_warm_up(go) -> None:
    _, _, out = go()
    report = json.loads((out / "report.json").read_text())
    summary = report["summary"]
    hits = sum(row["hit"] for row in report["requests"])
    assert summary["prompt_tokens"] == sum(row["prompt_tokens"] for row in report["requests"]) == 139
    assert summary["hit_rate"] == pytest.approx(hits / 139)
    assert (summary["tokens_saved"], summary["tokens_prefilled"]) == (hits, 139 - hits)
    assert summary["steps"] == 15
    assert summary["checkpoints_per_1k_prefilled"] == pytest.approx(1000 * summary["checkpoints"] / (139 - hits))
    assert 0 < summary["hit_rate"] <= summary["ceilings"]["attention"]
    assert summary["prefill_splits"] == 0
    assert set(report["seconds"]) == {"load", "warm-up", "replay", "verify"}
    assert report["machine"].keys() == {"cpu_count"}
    assert report["versions"]["jax"]
    assert report["configuration"] == {"hash_unit": 8}
    first = report["requests"][0]
    assert (first["index"], first["prefill_chunks"], first["checkpoints"]) == (0, 1, [16])


@pytest.mark.parametrize(
    ("faults", "sentence"),
    [
        ({"wrong": (2, 1)}, "1 tokens differ"),
        ({"recompiles": 2}, "2 compilations after warm-up"),
        ({"broken": ("a block is owned twice",)}, "a block is owned twice"),
    ],
)
def test_a_fault_exits_1_and_still_writes_the_report(go, faults, sentence) -> None:
    code, text, out = go(**faults)
    assert code == 1
    assert sentence in text
    report = json.loads((out / "report.json").read_text())
    assert not report["passed"]
    assert sentence in report["failures"][0]


def test_without_verify_nothing_is_scored(go) -> None:
    code, _, out = go(verify=False, wrong=(0, 0))
    assert code == 0
    assert json.loads((out / "report.json").read_text())["verification"] is None


def test_an_out_that_cannot_be_a_folder_is_refused_before_any_work(two_sessions, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    options = ReplayOptions("t", "c", "model=1", 8, 1000, 8, True, tmp_path / "file", {})
    with pytest.raises(UserError, match="out"):
        run_replay(options, two_sessions, lambda caching: pytest.fail("made an engine"), len, Console())
