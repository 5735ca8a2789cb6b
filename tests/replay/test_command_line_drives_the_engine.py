"""The command line gives the engine what its flags say and prints what the engine returns."""

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv import cli


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    prefix_caching: bool = True
    hash_unit: int = 64
    token_budget: int = 1024
    max_requests: int = 16
    max_context: int | None = None
    attention_blocks: int | None = None
    state_slots: int | None = None
    token_buckets: tuple[int, ...] | None = None
    ladder: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    ignore_stop: bool = False


@dataclasses.dataclass(frozen=True)
class Made:
    """What one engine was made with."""

    path: Any
    mesh: str
    cache: CacheOptions
    dtype: str
    experts: str = "tensor"
    weights_cache: Path | None = None
    kda: str = "tensor"
    residual: str = "replicated"


@pytest.fixture
def made(toy_engine, monkeypatch) -> list[Made]:
    """Puts a toy in the engine's place; lists the engines that were made."""
    engines: list[Made] = []

    class Engine(toy_engine):
        @classmethod
        def from_checkpoint(cls, path, mesh, cache, dtype, **placement):
            engines.append(Made(path, mesh, cache, dtype, **placement))
            return cls(cache.prefix_caching)

        def generate(self, prompts, sampling):
            numbers = [self.add_request(prompt, sampling) for prompt in prompts]
            while self.has_work:
                self.step()
            return [self.result(number) for number in numbers]

        def stream(self, prompt, sampling):
            yield from self.generate([prompt], sampling)[0].tokens

    module = types.ModuleType("hybrid_kv.runtime.engine")
    vars(module).update(Engine=Engine, CacheOptions=CacheOptions, SamplingParams=SamplingParams)
    monkeypatch.setitem(sys.modules, "hybrid_kv.runtime", types.ModuleType("hybrid_kv.runtime"))
    monkeypatch.setitem(sys.modules, "hybrid_kv.runtime.engine", module)
    return engines


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    return str(tmp_path / "tiny")


def test_generate_prints_one_line_an_answer(made, checkpoint, tmp_path, capsys) -> None:
    (tmp_path / "prompts.json").write_text("[[5, 6, 7], [8]]")
    several = ["--prompt-file", str(tmp_path / "prompts.json")]
    assert cli.main(["generate", "--checkpoint", checkpoint, *several, "--max-tokens", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split(",")) for line in lines] == [4, 4]
    one = ["--prompt-tokens", "5,6,7", "--max-tokens", "4"]
    assert cli.main(["generate", "--checkpoint", checkpoint, *one]) == 0
    assert capsys.readouterr().out.splitlines() == lines[:1]
    assert cli.main(["generate", "--checkpoint", checkpoint, *one, "--stream"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[:1]
    assert cli.main(["generate", "--checkpoint", checkpoint, *several, "--stream"]) == 2


def test_flags_reach_the_engine_and_others_keep_their_defaults(made, checkpoint, capsys) -> None:
    flags = ["--mesh", "data=2,dcp=4", "--hash-unit", "32", "--ladder", "512,2048", "--dtype", "bfloat16"]
    flags += ["--experts", "mesh", "--weights-cache", "kept", "--kda", "replicated", "--residual", "sequence"]
    assert cli.main(["generate", "--checkpoint", checkpoint, "--prompt-tokens", "7", *flags]) == 0
    options = CacheOptions(hash_unit=32, ladder=(512, 2048))
    spread = "mesh", Path("kept"), "replicated", "sequence"
    assert made == [Made(Path(checkpoint), "data=2,dcp=4", options, "bfloat16", *spread)]


def test_replay_verifies_with_a_second_engine_without_the_cache(made, checkpoint, traces_dir, tmp_path) -> None:
    trace = str(traces_dir / "magagent_60.jsonl.gz")
    out = tmp_path / "out"
    flags = ["--requests", "4", "--verify", "--out", str(out), "--in-flight", "2"]
    assert cli.main(["replay", "--checkpoint", checkpoint, "--trace", trace, *flags]) == 0
    assert [engine.cache.prefix_caching for engine in made] == [True, False]
    # Room for the longest prompt with its answer.
    assert {engine.cache.max_context for engine in made} == {1789}
    report = json.loads((out / "report.json").read_text())
    assert report["in_flight"] == 2
    assert report["trace"] == "magagent_60.jsonl.gz"
    assert report["configuration"]["max_context"] == 1789
    assert [row["answer_tokens"] for row in report["requests"]] == [367, 199, 346, 315]


def test_replay_without_the_cache_hits_nothing(made, checkpoint, traces_dir, tmp_path) -> None:
    trace = str(traces_dir / "magagent_60.jsonl.gz")
    flags = ["--requests", "3", "--no-cache", "--out", str(tmp_path)]
    assert cli.main(["replay", "--checkpoint", checkpoint, "--trace", trace, *flags]) == 0
    assert [engine.cache.prefix_caching for engine in made] == [False]
    assert json.loads((tmp_path / "report.json").read_text())["summary"]["hit_rate"] == 0
