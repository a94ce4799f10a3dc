"""tools/docs/merge_results.py: new cells replace old ones, and claims are checked again."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedclade.reproduce.compare_to_paper import Cell, Outcome
from fedclade.reproduce.execute import Sizes
from fedclade.reproduce.panels import Panel, Picture, Series

TOOL = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "docs" / "merge_results.py"))


def cell(row: str, mean: float) -> Cell:
    return Cell(row, "end", "", "accuracy", None, (mean,), mean, None, None, "", "")


def outcome(cells: list[Cell], lines: dict[str, float], commit: str, samples: int) -> Outcome:
    series = tuple(Series(name, (1.0,), (value,)) for name, value in lines.items())
    return Outcome(
        "cfl_figure8",
        "",
        "",
        (),
        False,
        {"end": "cifar10"},
        {"end": ("cifar10",)},
        tuple(cells),
        (),
        {"commit": commit},
        10.0,
        (Picture("curves", "", "", (Panel("end", "lines", series=series),)),),
        {"end": (Sizes(20, samples, 0), Sizes(20, samples, 0))},
    )


def test_new_cells_replace_old_ones() -> None:
    old = outcome(
        [cell("FedAvg", 25.0), cell("CFL", 40.0), cell("no such row", 1.0)],
        {"FedAvg": 1.0, "CFL": 2.0},
        "a",
        1000,
    )
    new = outcome([cell("CFL", 60.0)], {"CFL": 3.0}, "b", 2500)
    both = TOOL["merged"](old, new)
    assert [(each.row, each.mean) for each in both.cells] == [("FedAvg", 25.0), ("CFL", 60.0)]
    # FedAvg + 20 ≤ CFL: not with the old number.
    assert [(claim.means, claim.holds) for claim in both.claims] == [((25.0, 60.0), True)]
    lines = {line.name: line.y for line in both.pictures[0].panels[0].series}
    assert lines == {"FedAvg": (1.0,), "CFL": (3.0,)}
    assert (both.about, both.seconds) == ({"commit": "a, b"}, 20.0)
    assert both.sizes == {"end": (Sizes(20, 1000, 0), Sizes(20, 2500, 0))}


def test_merging_twice_changes_only_the_seconds() -> None:
    new = outcome([cell("FedAvg", 25.0)], {"FedAvg": 1.0}, "b", 2500)
    assert TOOL["merged"](new, new) == replace(new, seconds=20.0)


def test_numbers_of_a_quick_run_are_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = replace(outcome([cell("FedAvg", 25.0)], {"FedAvg": 1.0}, "b", 2500), quick=True)
    (tmp_path / "table.json").write_text(json.dumps(new.as_json()))
    monkeypatch.setattr(sys, "argv", ["merge_results.py", str(tmp_path / "table.json")])
    before = (TOOL["RESULTS"] / "cfl_figure8.json").read_bytes()
    with pytest.raises(SystemExit, match="quick"):
        TOOL["main"]()
    assert (TOOL["RESULTS"] / "cfl_figure8.json").read_bytes() == before
