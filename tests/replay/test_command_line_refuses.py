"""Every bad input of the command line: one line on stderr, exit code 2, no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_kv import cli
from hybrid_kv.errors import UserError
from hybrid_kv.models.config import EXPERT_SPREADS, KDA_SPREADS
from hybrid_kv.models.execution import RESIDUALS

GOOD_MESH = ("--mesh", "model=2,dcp=4")


@pytest.fixture
def place(tmp_path: Path, traces_dir: Path) -> dict[str, str]:
    """Paths that the arguments of the cases name in braces."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    for name, content in {
        "bad.json": "{",
        "object.json": "{}",
        "none.json": "[]",
        "text.json": '["a"]',
        "hollow.json": "[[1], []]",
        "bad.jsonl": "{",
        "deep.json": "[" * 100_000,
        "typed/config.json": '{"linear_attn_config": {"kda_layers": 5}, "num_hidden_layers": "x"}',
        "deep/config.json": "[" * 100_000,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    return {"tmp": str(tmp_path), "trace": str(traces_dir / "miniswe_60.jsonl.gz")}


REPLAY = ("replay", "--checkpoint", "{tmp}/tiny", "--trace")
GENERATE = ("generate", "--checkpoint", "{tmp}/tiny")

CASES = {
    "no checkpoint": (("generate", "--checkpoint", "{tmp}/absent", "--prompt-tokens", "1"), "checkpoint"),
    "checkpoint is a file": (("describe", "--checkpoint", "{tmp}/bad.json"), "checkpoint"),
    "replay without checkpoint": (("replay", "--checkpoint", "{tmp}/no", "--trace", "{trace}"), "checkpoint"),
    "no trace": ((*REPLAY, "{tmp}/absent.jsonl"), "trace"),
    "trace is a folder": ((*REPLAY, "{tmp}"), "trace"),
    "trace is no JSON": ((*REPLAY, "{tmp}/bad.jsonl"), "line 1"),
    "no requests": ((*REPLAY, "{trace}", "--requests", "0"), "requests"),
    "mesh axis unknown": ((*REPLAY, "{trace}", "--mesh", "tensor=8"), "mesh"),
    "mesh without sizes": ((*REPLAY, "{trace}", "--mesh", "2x4"), "mesh"),
    "mesh axis twice": ((*REPLAY, "{trace}", "--mesh", "dcp=2,dcp=2"), "mesh"),
    "mesh size zero": ((*REPLAY, "{trace}", "--mesh", "model=0"), "mesh"),
    "mesh size negative": ((*REPLAY, "{trace}", "--mesh", "model=-2"), "mesh"),
    "prompt is text": ((*GENERATE, "--prompt-tokens", "hello"), "prompt tokens"),
    "prompt is empty": ((*GENERATE, "--prompt-tokens", ""), "prompt tokens"),
    "prompt token negative": ((*GENERATE, "--prompt-tokens=1,-2"), "prompt tokens"),
    "prompt file absent": ((*GENERATE, "--prompt-file", "{tmp}/absent.json"), "prompt file"),
    "prompt file is no JSON": ((*GENERATE, "--prompt-file", "{tmp}/bad.json"), "prompt file"),
    "prompt file is an object": ((*GENERATE, "--prompt-file", "{tmp}/object.json"), "prompt file"),
    "prompt file is too deep": ((*GENERATE, "--prompt-file", "{tmp}/deep.json"), "prompt file"),
    "trace is too deep": ((*REPLAY, "{tmp}/deep.json"), "line 1"),
    "configuration is too deep": (("describe", "--checkpoint", "{tmp}/deep"), "config.json"),
    "configuration has a wrong type": (("describe", "--checkpoint", "{tmp}/typed"), "num_hidden_layers"),
    "prompt file has no prompt": ((*GENERATE, "--prompt-file", "{tmp}/none.json"), "prompt file"),
    "prompt file has text": ((*GENERATE, "--prompt-file", "{tmp}/text.json"), "prompt file"),
    "prompt file has an empty prompt": ((*GENERATE, "--prompt-file", "{tmp}/hollow.json"), "prompt file"),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_bad_input_exits_2_with_one_line(case: str, place: dict[str, str], capsys, monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # main may extend it
    arguments, named = CASES[case]
    code = cli.main([argument.format(**place) for argument in arguments])
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert named in said.err


@pytest.mark.parametrize("arguments", [[], ["serve"], ["generate"], ["replay", "--requests", "x"]])
def test_wrong_usage_exits_2(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (UserError("mesh", "x", "fix it"), 2),
        (FileNotFoundError(2, "No such file", "weights"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_of_a_command_become_exit_codes(raised, code, place, monkeypatch, capsys) -> None:
    def fail(options):
        raise raised

    monkeypatch.setattr(cli, "_engine", fail)
    assert cli.main(["generate", "--checkpoint", "{tmp}/tiny".format(**place), "--prompt-tokens", "1"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_prompt_files_hold_one_prompt_or_several(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    for content, prompts in (([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])):
        path.write_text(json.dumps(content))
        assert cli.prompt_file(path) == prompts


def run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hybrid_kv", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_the_module_runs_and_passes_its_exit_code_on(place: dict[str, str]) -> None:
    assert run_module("--version").returncode == 0
    done = run_module("describe", "--checkpoint", place["tmp"] + "/absent")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_the_mesh_decides_how_many_devices_a_cpu_plays(place: dict[str, str]) -> None:
    script = (
        "import argparse, pathlib, sys; from hybrid_kv import cli\n"
        f"folder = pathlib.Path({place['tmp'] + '/tiny'!r})\n"
        "cli._prepare_devices(argparse.Namespace(mesh='model=3,dcp=2', checkpoint=folder))\n"
        "import jax; print(len(jax.devices()))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    for flags, devices in (("", "6"), ("--xla_force_host_platform_device_count=2", "2")):
        environment["XLA_FLAGS"] = flags
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment
        )
        assert done.stdout.strip() == devices, done.stderr


def test_choices_of_spreads_are_those_that_the_library_takes() -> None:
    library = {"experts": EXPERT_SPREADS, "kda": KDA_SPREADS, "residual": RESIDUALS}
    assert {name: choices for name, (choices, _) in cli.SPREADS.items()} == {k: tuple(v) for k, v in library.items()}
