"""A trace that cannot be replayed is refused with the place and the reason."""

import gzip
import json
from pathlib import Path

import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.simulate.traces import map_tokens, map_trace, prompts, read_trace

GOOD = {"session": "a", "t": 0.0, "base": -1, "keep": 0, "add": [1, 2, 3], "out": [4, 5]}
NEXT = {"session": "a", "t": 1, "base": 0, "keep": 5, "add": [6], "out": [7]}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_good_trace_is_read(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path / "t.jsonl", GOOD, NEXT))
    assert (first.index, first.session, first.base, first.keep) == (0, "a", -1, 0)
    assert (first.add, first.out, first.prompt_length) == ((1, 2, 3), (4, 5), 3)
    assert (second.index, second.base, second.keep, second.prompt_length) == (1, 0, 5, 6)


def test_kept_tokens_come_from_the_earliest_request_that_has_them(tmp_path: Path) -> None:
    lines = [GOOD, NEXT, {**NEXT, "base": 1, "keep": 6}, {**NEXT, "base": 2, "keep": 5}, {**NEXT, "base": 3, "keep": 6},
             {**NEXT, "base": 4, "keep": 0}]  # fmt: skip
    requests = read_trace(write(tmp_path / "t.jsonl", *lines))
    assert [request.base for request in requests] == [-1, 0, 1, 0, 3, -1]


def test_only_the_wanted_requests_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, {"broken": True})
    assert len(read_trace(path, 1)) == 1
    with pytest.raises(UserError, match="requests"):
        read_trace(path, 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"base": 1}, "base"),
        ({"base": -2}, "base"),
        ({"base": 0.0}, "base"),
        ({"base": True}, "base"),
        ({"keep": 6}, "keep"),
        ({"keep": -1}, "keep"),
        ({"keep": "5"}, "keep"),
        ({"base": -1}, "keep"),
        ({"keep": 0, "add": []}, "empty"),
        ({"out": []}, "empty"),
        ({"add": "abc"}, "add"),
        ({"add": [1, -1]}, "add"),
        ({"add": [1, 1.5]}, "add"),
        ({"add": [2**31]}, "add"),
        ({"out": None}, "out"),
        ({"session": 3}, "session"),
        ({"t": "soon"}, "t: got"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, change: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match="line 2") as error:
        read_trace(write(tmp_path / "t.jsonl", GOOD, {**NEXT, **change}))
    assert named in str(error.value)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    rest = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(UserError, match=f"add {name}"):
        read_trace(write(tmp_path / "t.jsonl", rest))


@pytest.mark.parametrize("line", ["{", "[1, 2]", "3", "null", "[" * 100_000, '{"a":' * 100_000])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match="JSON object"):
        read_trace(path)


def test_a_value_about_as_deep_as_the_recursion_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for depth in range(850, 1000):  # readable or not, depending on how deep the caller is
        path.write_text(json.dumps(GOOD).replace('"a"', "[" * depth + "]" * depth) + "\n")
        with pytest.raises(UserError, match="line 1"):
            read_trace(path)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(json.dumps(GOOD).encode() + b"\n" for _ in range(50)))
    bad = {
        "cut.jsonl.gz": whole[: len(whole) // 2],
        "flipped.jsonl.gz": whole[:20] + bytes([whole[20] ^ 255]) + whole[21:],
        "plain.jsonl.gz": b"not gzip",
        "binary.jsonl": b"\xff\xfe\x00",
        "empty.jsonl": b"\n\n",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            read_trace(tmp_path / name)
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(UserError, match="readable"):
            read_trace(path)


def test_mapped_tokens_keep_equality_and_avoid_reserved_ids() -> None:
    mapped = map_tokens([0, 1, 2, 508, 509, 1017], vocab_size=512, reserved=3)
    assert mapped.tolist() == [3, 4, 5, 511, 3, 511]
    with pytest.raises(UserError, match="reserved"):
        map_tokens([1], vocab_size=3, reserved=3)


def test_prompts_take_the_answers_they_are_given(traces_dir: Path) -> None:
    requests = map_trace(read_trace(traces_dir / "miniswe_60.jsonl.gz", 5), vocab_size=512, reserved=3)
    recorded = list(prompts(requests, lambda index: requests[index].out))
    other = list(prompts(requests, lambda index: [0] * len(requests[index].out)))
    assert [len(prompt) for prompt in other] == [request.prompt_length for request in requests]
    length = requests[0].prompt_length
    assert (other[0] == recorded[0]).all()
    assert (other[1][:length] == recorded[1][:length]).all()
    assert (other[1][length : length + len(requests[0].out)] == 0).all()
