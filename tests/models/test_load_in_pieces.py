"""Loading in pieces: the same bits in any cut, each byte read once, bounded memory, resumption, progress, refusals."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hybrid_kv.errors import UserError
from hybrid_kv.models.checkpoint_io import load, load_config, random_checkpoint
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.load_soak import soak
from hybrid_kv.models.parameters import inventory
from hybrid_kv.models.pieces import cut, targets
from hybrid_kv.models.published import named
from hybrid_kv.models.tensor_files import TensorFiles
from tests.models.harness import CHECKPOINT, mesh_of

EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.5.w2"
SMALL_PIECES = 1 << 15


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    """A tiny K3 in three files, whose experts are wide enough to be packed on the device."""
    raw = named("tiny-k3")
    raw["text_config"] |= {"routed_expert_hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8}
    folder = tmp_path_factory.mktemp("k3-pieces")
    return folder, random_checkpoint(folder, raw, seed=3, shards=3)


@pytest.fixture
def reads(monkeypatch):
    """(tensor, begin, end) of every read, counted."""
    seen: Counter = Counter()
    rows = TensorFiles.rows

    def spy(self, name, begin, end):
        seen[name, begin, end] += 1
        return rows(self, name, begin, end)

    monkeypatch.setattr(TensorFiles, "rows", spy)
    return seen


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and one[name].sharding == other[name].sharding, name
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), err_msg=name)


@pytest.mark.parametrize(("form", "mesh"), [("plain", (2, 2)), ("packed", (2, 2)), ("native", (1, 1))])
def test_every_cut_gives_the_same_bits_and_reads_each_byte_once(k3, reads, form, mesh):
    folder, config = k3[0], dataclasses.replace(k3[1], expert_form=form)
    whole = load(folder, config, mesh_of(*mesh), piece_bytes=1 << 40)
    reads.clear()
    assert_equal(load(folder, config, mesh_of(*mesh), piece_bytes=SMALL_PIECES), whole)
    assert set(reads.values()) == {1}
    rows = Counter()
    for name, begin, end in reads:
        rows[name] += end - begin
    shapes = {n: s for entry in inventory(config).values() for n, s in entry.source.tensors().items()}
    assert rows.keys() == shapes.keys()
    assert all(rows[n] == s[0] for n, s in shapes.items() if not n.endswith("A_log"))  # stored padded


def test_experts_split_over_replicas_too_are_cut_the_same(k3):
    config = dataclasses.replace(k3[1], expert_axes=("data", "model", "dcp"), expert_form="packed")
    whole = load(k3[0], config, mesh_of(2, 1, data=2), piece_bytes=1 << 40)
    assert_equal(load(k3[0], config, mesh_of(2, 1, data=2), piece_bytes=1 << 18), whole)


def test_pieces_are_of_the_size_asked_for_and_cover_every_parameter():
    config = KimiLinearConfig.from_dict(named("kimi-linear-48b"))
    table = targets(inventory(config), mesh_of(2, 4), jnp.bfloat16)
    limit = 256 << 20
    pieces = cut(table, limit)
    assert {name for piece in pieces for name in piece.names} == table.keys()
    assert len({piece.label for piece in pieces}) == len(pieces)
    for name, target in table.items():
        own = [piece for piece in pieces if name in piece.names]
        assert sum(piece.nbytes for piece in own) == target.nbytes
        assert target.placed / len(own) <= limit, name
        entries = sum(int(np.prod(piece.size)) for piece in own)
        assert entries == int(np.prod(target.local[: target.source.cuts]))


def test_memory_above_the_weights_is_at_most_two_files():
    result = soak(200 << 20, files=4, devices=8)
    assert result["weights_bytes"] > 150e6 and result["shard_bytes"] < 70e6
    assert result["above_bytes"] <= 2 * result["shard_bytes"], result


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from hybrid_kv.models.checkpoint_io import load, load_config
from tests.models.harness import mesh_of

calls = 0

def progress(done, total):
    global calls
    calls += 1
    if calls > 20:
        os.kill(os.getpid(), signal.SIGKILL)

load(sys.argv[1], load_config(sys.argv[1]), mesh_of(2, 2), cache=sys.argv[2], progress=progress, piece_bytes=1 << 15)
"""


def test_a_killed_load_goes_on_where_it_was(k3, reads, tmp_path, repo_root):
    folder, config = k3
    run = subprocess.run(
        [sys.executable, "-c", KILLED, folder, tmp_path / "cache"], cwd=repo_root, env=os.environ | {
            "PYTHONPATH": str(repo_root)
        }, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == -signal.SIGKILL, run.stderr
    finished = {file.stem for file in (tmp_path / "cache").glob("*.safetensors")}
    assert len(finished) == 20
    plain = load(folder, config, mesh_of(2, 2), piece_bytes=SMALL_PIECES)
    reads.clear()
    assert_equal(load(folder, config, mesh_of(2, 2), cache=tmp_path / "cache", piece_bytes=SMALL_PIECES), plain)
    table = targets(inventory(config), mesh_of(2, 2), jnp.bfloat16)
    pieces = cut(table, SMALL_PIECES)
    from_checkpoint = {name for name, _, _ in reads if "@" not in name}
    for piece in pieces:
        assert (piece.first(table[piece.names[0]]) in from_checkpoint) == (piece.label not in finished), piece
    # By now all of it is there.
    reads.clear()
    assert_equal(load(folder, config, mesh_of(2, 2), cache=tmp_path / "cache", piece_bytes=SMALL_PIECES), plain)
    assert all("@" in name for name, _, _ in reads)


def test_a_piece_that_was_being_written_is_made_again(tmp_path):
    config = load_config(CHECKPOINT)
    plain = load(CHECKPOINT, config, mesh_of(), cache=tmp_path)
    done = next(iter(sorted(tmp_path.glob("*.safetensors"))))
    done.with_suffix(".part").write_bytes(done.read_bytes()[:100])
    done.unlink()
    assert_equal(load(CHECKPOINT, config, mesh_of(), cache=tmp_path), plain)
    assert not list(tmp_path.glob("*.part"))
    done.write_bytes(done.read_bytes()[:-1])
    with pytest.raises(UserError, match="truncated") as error:
        load(CHECKPOINT, config, mesh_of(), cache=tmp_path)
    assert done.name in str(error.value)


@pytest.mark.parametrize("damage", ["cut", "type", "unwritable"])
def test_a_damaged_or_unwritable_piece_is_named(tmp_path, damage):
    config, cache = load_config(CHECKPOINT), tmp_path / "cache"
    load(CHECKPOINT, config, mesh_of(), cache=cache)
    file = cache / "kda.qkv-0.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "type":  # of as many entries
        save_file({key: value.astype(np.float32) for key, value in load_file(file).items()}, file)
    else:
        file.unlink()
        file.with_suffix(".part").mkdir()
    words = {"cut": "the piece is damaged", "type": "of its shape and type", "unwritable": "cannot be written"}
    with pytest.raises(UserError, match=rf"cache: got '.*kda.qkv-0.*{words[damage]}"):
        load(CHECKPOINT, config, mesh_of(), cache=cache)


def test_a_cache_of_another_load_is_refused_by_the_field(tmp_path):
    config = load_config(CHECKPOINT)
    load(CHECKPOINT, config, mesh_of(), cache=tmp_path / "cache")

    def refused(field, config=config, model=1, folder=CHECKPOINT, **keywords):
        with pytest.raises(UserError, match="another load") as error:
            load(folder, config, mesh_of(model), cache=tmp_path / "cache", **keywords)
        assert error.value.field == f"cache {field}"

    refused("dtype", dtype=jnp.float32)
    refused("mesh.model", model=2)
    refused("piece_bytes", piece_bytes=1 << 15)
    refused("config.rms_norm_eps", dataclasses.replace(config, rms_norm_eps=0.5))
    other = tmp_path / "copy"
    other.mkdir()
    for file in CHECKPOINT.glob("*.*"):
        (other / file.name).write_bytes(file.read_bytes())
    refused("files", folder=other)
    manifest = tmp_path / "cache" / "manifest.json"
    manifest.write_text("{")
    with pytest.raises(UserError, match=r"cache: got .*manifest"):
        load(CHECKPOINT, config, mesh_of(), cache=tmp_path / "cache")
    manifest.unlink()
    with pytest.raises(UserError, match="empty folder"):
        load(CHECKPOINT, config, mesh_of(), cache=tmp_path / "cache")


def test_progress_goes_from_nothing_to_all_bytes_of_the_parameters(k3):
    seen = []
    params = load(*k3, mesh_of(2, 2), progress=lambda done, total: seen.append((done, total)), piece_bytes=SMALL_PIECES)
    total = sum(x.nbytes for x in params.values())
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert len(seen) > 50 and [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch, capsys):
    config = load_config(CHECKPOINT)
    load(CHECKPOINT, config, mesh_of())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    load(CHECKPOINT, config, mesh_of())
    assert "weights" in capsys.readouterr().err


def test_all_that_is_wrong_with_tensors_is_listed_at_once_and_before_any_is_read(k3, reads, tmp_path):
    folder, config = k3
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    norm, head = "language_model.model.norm.weight", "language_model.lm_head.weight"
    changes = {
        norm: None, head: np.zeros((3, 5), np.float32), EXPERT + ".weight_packed": np.zeros((128, 64), np.int8),
        EXPERT + ".weight_scale": np.zeros((128, 3), np.float32),
        "language_model.model.embed_tokens.weight": np.zeros((2, 2), np.int64),
    }  # fmt: skip
    for name, value in changes.items():
        file = tmp_path / where[name]
        stored = {k: np.array(v) for k, v in load_file(file).items()} | {name: value}
        if name == norm:
            stored["language_model.more"] = np.zeros(1)
        save_file({k: v for k, v in stored.items() if v is not None}, file)
    with pytest.raises(UserError) as error:
        load(tmp_path, config, mesh_of())
    words = str(error.value)
    assert f"missing: ['{norm}']; extra: ['language_model.more']" in words
    for line in (
        f"{head}: got [3, 5]", f"{EXPERT}.weight_packed: got 'I8'", f"{EXPERT}.weight_scale: got [128, 3]",
        f"{EXPERT}.weight_scale: got 'F32'", "embed_tokens.weight: got [2, 2]", "embed_tokens.weight: got 'I64'",
    ):  # fmt: skip
        assert line in words
    assert not reads


def test_a_file_cut_short_while_it_is_read_is_refused(k3, monkeypatch):
    folder, config = k3
    real = os.preadv
    limits = {"left": 60}

    def preadv(handle, buffers, offset):
        limits["left"] -= 1
        return real(handle, buffers, offset) if limits["left"] > 0 else 0

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(UserError, match="bytes are missing"):
        load(folder, config, mesh_of())


def test_sizes_of_pieces_are_checked(k3):
    with pytest.raises(UserError, match="piece_bytes: got 0"):
        load(*k3, mesh_of(), piece_bytes=0)
    with pytest.raises(UserError, match=r"cache: got .*written"):
        load(*k3, mesh_of(), cache=Path("/proc/none"))
