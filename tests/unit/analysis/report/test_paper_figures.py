"""Figures for papers, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedclade.analysis import report
from fedclade.cli.report import report as command
from fedclade.errors import InvalidInputError

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
FIGURES = {
    *("curves", "groups", "map", "matrix", "dendrogram", "distribution", "traffic", "seconds"),
}


def test_figures_of_several_runs_have_their_names(several: Path, tmp_path: Path) -> None:
    names = {path.name for path in report.write_figures([several], tmp_path, formats=["svg"])}
    assert {"curves.svg", "clade_groups-seed0-matrix.svg", "fedavg-seed1-distribution.svg"} <= names


def test_files_have_the_names_and_axes_that_the_page_draws(several: Path, tmp_path: Path) -> None:
    report.write_figures([several], tmp_path, formats=["svg"])
    data = report.collect([several])
    described = {
        **data["figures"],
        **{
            f"{run['name']}-{name}": figure
            for run in data["runs"]
            for name, figure in run["figures"].items()
        },
    }
    assert {path.stem for path in tmp_path.glob("*.svg")} == set(described)
    for name, figure in described.items():
        texts = re.findall(r"<text[^>]*>([^<]*)<", (tmp_path / f"{name}.svg").read_text())
        shown = [figure[axis]["label"] for axis in ("x", "y") if axis in figure]
        lines = figure.get("series", ())
        shown += [line["name"] for line in lines if len(lines) > 1]
        shown += [row["name"] for row in figure.get("rows", ())]
        assert set(shown) <= set(texts), name


def test_a_run_without_a_finished_round_has_no_figure(copied: Path, tmp_path: Path) -> None:
    for name in ("summary.json", "client_features.safetensors", "rounds.jsonl"):
        (copied / name).unlink()
    assert report.write_figures([copied], tmp_path / "figures") == []


def test_an_unknown_format_is_rejected(one: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"'pgn'.*'png'", check=lambda error: error.field == "formats"
    ):
        report.write_figures([one], tmp_path, formats=["pgn"])


def test_the_command_writes_every_figure_in_every_format_and_the_same_bytes_again(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command([copied], tmp_path / "page.html", tmp_path / "a")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"Report: {tmp_path / 'page.html'}", f"Figures: 24 files in {tmp_path / 'a'}"]
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    again = report.write_figures([copied], tmp_path / "b")
    assert {path.name for path in again} == {
        f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg", "pdf")
    }
    assert [path.read_bytes() for path in again] == [
        (tmp_path / "a" / path.name).read_bytes() for path in again
    ]
    assert again[0].read_bytes().startswith(b"\x89PNG")
    assert again[2].read_bytes().startswith(b"%PDF")


def test_the_default_page_is_in_the_first_folder(copied: Path, one: Path) -> None:
    command([copied, one])
    assert (copied / "report.html").exists()
    assert not (one / "report.html").exists()


def test_the_command_rejects_invalid_paths(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "--out"):
        command([copied], tmp_path)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "--figures"):
        command([copied], None, copied / "summary.json")
    (copied / "summary.json").write_text(json.dumps({"clients": 3, "clusters": 1, "rounds": 4}))
    with pytest.raises(InvalidInputError, match=r"clients\.csv: "):
        command([copied])
