"""Stored schedules of two kernels: what is in them, and what a replay with their scalars comes to."""

from pathlib import Path

import numpy as np
import pytest

from hybrid_kv.chipless.replay import replay
from hybrid_kv.chipless.report import hottest, run_text, tree_text
from hybrid_kv.chipless.schedule import Schedule, read_dump
from hybrid_kv.chipless.targets import CHIPS
from hybrid_kv.chipless.tree import region_tree

V6E = CHIPS["v6e"]
LENGTHS = np.array([3, 0, 7, 5, 9, 0, 1, 2])


@pytest.fixture
def schedule(request, data_dir: Path) -> Schedule:
    (found,) = read_dump(data_dir / "schedules", request.param)
    return found


@pytest.mark.parametrize("schedule", ["ragged_steps"], indirect=True)
def test_a_dynamic_grid_runs_as_often_as_its_size_says(schedule):
    assert (len(schedule.bundles), schedule.code_bundles, schedule.spills) == (158, 136, 0)
    run = replay(schedule, V6E, {0: [6], 1: LENGTHS})
    assert (round(run.cycles), run.issued, round(run.stalled), run.hbm_bytes) == (3067, 1072, 1995, 49152)
    assert not run.warnings
    assert run.busy["SALU"] == pytest.approx(0.1834, abs=1e-4)
    assert {name: traffic.count for name, traffic in run.copies.items()} == {
        "vmem_to_smem": 1, "hbm_to_vmem": 6, "vmem_to_hbm": 6,
    }  # fmt: skip
    # The inner loop runs lengths[i] times in the steps 0 .. 5 of the grid.
    inner = next(row for row in hottest(schedule, V6E, run) if row["region"] == "C1.L1.C1.C1.L1")
    assert inner["entered"] == LENGTHS[:6].sum()


@pytest.mark.parametrize("schedule", ["ragged_steps"], indirect=True)
def test_more_work_costs_its_bundles_and_nothing_else(schedule):
    longer = np.where(np.arange(8) == 0, LENGTHS + 4, LENGTHS)
    short, long = (replay(schedule, V6E, {0: [6], 1: lengths}) for lengths in (LENGTHS, longer))
    loop = region_tree(schedule, V6E.branch_delay).inner[0].inner[0].inner[0].inner[0].inner[0]
    assert loop.label == "C1.L1.C1.C1.L1"
    assert long.issued - short.issued == 4 * (loop.span[1] - loop.span[0])


@pytest.mark.parametrize("schedule", ["ragged_steps"], indirect=True)
def test_a_scalar_not_given_is_a_warning(schedule):
    assert any("operand 1" in warning for warning in replay(schedule, V6E, {0: [6]}).warnings)
    assert replay(schedule, V6E, {1: LENGTHS}).warnings


@pytest.mark.parametrize("schedule", ["gather_rows"], indirect=True)
def test_copies_wait_for_bandwidth_and_latency(schedule):
    run = replay(schedule, V6E, {0: LENGTHS})
    assert (round(run.cycles), run.issued, round(run.stalled), run.hbm_bytes) == (3736, 533, 3203, 524800)
    assert not run.warnings and not run.notes
    at_once = replay(schedule, V6E, {0: LENGTHS}, latency=0)
    slower = replay(schedule, V6E, {0: LENGTHS}, bandwidth_share=0.5)
    assert at_once.cycles < run.cycles < slower.cycles
    assert at_once.issued == run.issued == slower.issued
    # Rows of slot 0 are not stored: six of eight enter the branch.
    stored = next(row for row in hottest(schedule, V6E, run) if row["region"] == "L1.C1")
    assert stored["entered"] == 6


@pytest.mark.parametrize("schedule", ["gather_rows"], indirect=True)
def test_a_constant_loop_has_its_trips_in_the_tree(schedule):
    kernel = region_tree(schedule, V6E.branch_delay)
    (loop,) = kernel.inner
    assert (loop.kind, loop.trips, loop.span) == ("loop", 8, (0x20, 0x5D))
    (branch,) = loop.inner
    assert branch.kind == "branch" and branch.span == (0x52, 0x58)
    assert kernel.cycles == 118 + 7 * 61
    spans = [span for region in kernel.walk() for span in region.own]
    assert sorted(i for low, high in spans for i in range(low, high)) == list(range(118))


@pytest.mark.parametrize("schedule", ["ragged_steps", "gather_rows"], indirect=True)
def test_reports_name_every_region_and_the_copies(schedule):
    text = tree_text(schedule, V6E)
    assert all(region.label in text for region in region_tree(schedule, V6E.branch_delay).walk())
    assert "hbm_to_vmem" in text and "hbm_to_vmem" in run_text(replay(schedule, V6E, {0: [6], 1: LENGTHS}))


def test_a_name_that_matches_nothing_gives_nothing(data_dir):
    assert read_dump(data_dir / "schedules", "no_such_kernel") == []
