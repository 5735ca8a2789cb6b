"""Measurements are told with their bars."""

import json

import pytest

from hybrid_kv.errors import UserError
from hybrid_kv.simulate.benchmark import measures, report
from hybrid_kv.simulate.benchmark.measures import Line

LINES = [Line("step", 3, 1.25, "ms"), Line("ratio", 1, 1.5, "x", 1.3), Line("speed", 0, 70.0, "M/s", 60.0, True)]


def test_a_line_says_whether_its_bar_holds():
    assert [line.holds for line in LINES] == [None, False, True]
    assert report.as_text(LINES[0]) == "step  [3 recurrent]: 1.250 ms"
    assert report.as_text(LINES[1]) == "ratio  [1 recurrent]: 1.500 x  bar <= 1.3  MISSED"
    assert report.as_text(LINES[2]) == "speed: 70.000 M/s  bar >= 60  holds"
    told = json.loads(report.as_json(LINES[1]))
    assert (told["measured"], told["bar"], told["holds"]) == (1.5, 1.3, False)


def test_the_picture_is_written(tmp_path):
    report.write_png(tmp_path / "lines.png", LINES)
    assert (tmp_path / "lines.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="measure something to draw"):
        report.write_png(tmp_path / "none.png", [])


def test_hashing_is_measured_against_its_bar():
    (line,) = measures.hashing_speed(rounds=1)
    assert line.measured > 0 and (line.bar, line.at_least) == (60.0, True)
