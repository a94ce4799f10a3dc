"""The progress of a comparison: which run, how far, and how long it will take."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedclade.analysis import report
from fedclade.analysis.report.live_server import Live
from fedclade.analysis.report.run_progress import duration
from fedclade.io.run_dir import RunDirectory

SECONDS = 30.0


@pytest.fixture
def unfinished(several: Path, tmp_path: Path) -> Path:
    """A comparison of four runs: one is finished, one is in its third round of four."""
    names = ["clade_groups-seed0", "fedavg-seed0", "clade_groups-seed1", "fedavg-seed1"]
    folder = tmp_path / "comparison"
    for name in names[:2]:
        shutil.copytree(several / name, folder / name)
        path = folder / name / "rounds.jsonl"
        rows = [json.loads(line) | {"seconds": SECONDS} for line in path.read_text().splitlines()]
        rows[0]["seconds"] = 1000.0  # a first round takes long
        if name == names[1]:
            (folder / name / "summary.json").unlink()
            rows = rows[:3]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    RunDirectory(folder).write_plan(
        [{"name": name, "title": name.partition("-")[0], "rounds": 4} for name in names]
    )
    return folder


def test_run_two_of_four(unfinished: Path) -> None:
    data = report.collect([unfinished])
    assert data["progress"]["text"] == "Run 2 of 4 (fedavg-seed0), round 3 of 4."
    assert data["progress"]["share"] == pytest.approx(7 / 16)
    assert data["progress"]["left"] == duration(9 * SECONDS)
    assert data["title"].endswith(": 1 of 4 runs finished")
    assert data["headline"].startswith("So far ")
    assert data["waiting"] == ["clade_groups-seed1", "fedavg-seed1"]


def test_one_picture_has_finished_and_running_runs(
    unfinished: Path, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    names = [line["name"] for line in report.collect([unfinished])["figures"]["curves"]["series"]]
    assert sorted(names) == ["clade_groups", "fedavg-seed0, not finished"]
    tab = opened(report.write_report([unfinished], tmp_path / "page.html").as_uri())
    assert tab.locator("#curves-svg .trace").count() == 2
    assert tab.locator("#curves-svg .trace.dashed").count() == 1
    assert "Not begun: clade_groups-seed1, fedavg-seed1." in tab.locator("#waiting").inner_text()
    assert tab.locator("#progress-text").inner_text().endswith("round 3 of 4.")  # not live
    tab.locator("#run-select").select_option("fedavg-seed0")
    assert tab.locator("#run-title").inner_text() == "Run fedavg-seed0 so far"


def test_axe_finds_no_serious_violation_on_the_live_page(
    unfinished: Path, opened: Callable[..., Any]
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright",
        reason="the pip package axe-playwright-python is not installed",
    )
    with Live(unfinished) as live:
        tab = opened(live.address, 390)
        tab.get_by_text("Live: this page follows the runs.").wait_for()
        assert tab.locator("#progress-text").inner_text().endswith("About 4 min left.")
        violations = axe.Axe().run(tab).response["violations"]
    assert [
        violation["id"]
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ] == []


def test_a_finished_comparison_has_no_progress(several: Path) -> None:
    assert report.collect([several])["progress"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "about 1 s"), (59.4, "about 59 s"), (600.0, "about 10 min"), (9000.0, "about 2.5 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
