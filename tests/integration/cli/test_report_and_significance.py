"""The report and the significant differences that run and compare write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedclade.analysis import report
from fedclade.errors import InvalidInputError

Call = Callable[..., tuple[int, str, str]]
RUN = ["run", "quickstart", "--set", "run.rounds=2"]
COMPARE = ["compare", "quickstart", "--set", "run.rounds=2", "--methods", "fedavg,local"]


def test_a_run_writes_a_report_and_prints_its_path(command: Call) -> None:
    code, out, err = command(*RUN, "--out", "run")
    assert (code, err) == (0, "")
    assert out.splitlines()[-2:] == ["Report: run/report.html", "Run directory: run"]
    page = Path("run/report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page == report.page(report.collect([Path("run")]))


def test_a_comparison_writes_one_report_of_all_runs(command: Call) -> None:
    code, out, err = command(*COMPARE, "--out", "out", "-q")
    assert (code, err) == (0, "")
    assert "Report:" not in out
    assert Path("out/report.html").exists()
    assert not list(Path("out").glob("*/report.html"))


@pytest.mark.parametrize("words", [RUN, COMPARE], ids=["run", "compare"])
def test_no_report_writes_none(words: list[str], command: Call) -> None:
    code, out, _ = command(*words, "--out", "out", "--no-report")
    assert code == 0
    assert "Report:" not in out
    assert not list(Path("out").rglob("report.html"))


@pytest.mark.parametrize(
    "error", [InvalidInputError("this and that"), OSError(28, "No space left on device")]
)
def test_a_failed_report_does_not_fail_the_run(
    error: Exception, command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(report, "write_report", fail)
    code, out, err = command(*RUN, "--out", "run")
    assert code == 0
    assert err.startswith("fedclade: ")
    assert str(error) in err
    assert len(err.splitlines()) == 1
    assert out.splitlines()[-1] == "Run directory: run"
    assert Path("run/summary.json").exists()


def test_a_finished_run_keeps_its_report(command: Call) -> None:
    command(*RUN, "--out", "run", "-q")
    before = Path("run/report.html").stat().st_mtime_ns
    _, out, _ = command(*RUN, "--out", "run", "--resume")
    assert "Report:" not in out
    assert Path("run/report.html").stat().st_mtime_ns == before


def test_the_printed_differences_are_those_in_the_file(command: Call) -> None:
    _, out, _ = command(*COMPARE, "--seeds", "2", "--out", "out", "-q")
    differences = json.loads(Path("out/comparison.json").read_text())["differences"]
    assert differences["seeds"] == [0, 1]
    assert len(differences["pairs"]) == 1
    lines = out.splitlines()
    start = lines.index(differences["in_words"][0])
    assert lines[start : start + len(differences["in_words"])] == differences["in_words"]
    _, out, _ = command(*COMPARE, "--out", "one", "-q")
    assert "--seeds 5" in out
