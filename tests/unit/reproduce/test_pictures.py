"""Pictures of a table: their panels, what is stored of them, and the drawn files."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from typer.testing import CliRunner

from fedclade.cli.main import app
from fedclade.reproduce import spec as definitions
from fedclade.reproduce.compare_to_paper import Outcome
from fedclade.reproduce.draw import colors, draw
from fedclade.reproduce.execute import Done, Options, TableEntry, plan
from fedclade.reproduce.markdown import from_json, page
from fedclade.reproduce.panels import Panel, Picture, Series, StudyResult
from fedclade.reproduce.pictures import pictures
from fedclade.reproduce.spec import Table
from fedclade.reproduce.studies import STUDIES

SMALL: dict[str, Any] = {
    "name": "small",
    "title": "A small figure",
    "paper": "nobody",
    "seeds": 2,
    "experiment": {
        "partition": {"name": "label_clusters", "clients": 6, "clusters": 2, "classes": 5},
        "model": {"name": "mlp", "hidden": 8},
        "run": {"rounds": 2, "clients_per_round": 1.0},
    },
    "columns": [
        {"name": "digits", "data": ["digits"]},
        {"name": "variance", "like": "digits", "metric": "accuracy_variance"},
    ],
    "rows": [
        {"name": "FedAvg", "method": "fedavg"},
        {"name": "Local", "method": "local"},
    ],
    "pictures": [
        {"name": "accuracy", "title": "Accuracy", "kind": "curves", "reading": "It rises."},
        {"name": "fedavg", "title": "One", "kind": "curves", "reading": ".", "rows": ["FedAvg"]},
        {"name": "none", "title": "No", "kind": "curves", "reading": ".", "metric": "perplexity"},
    ],
}
KINDS = (
    Panel("lines", "lines", "round", "accuracy, %", (Series("a", (1, 2), (3, math.nan)),)),
    Panel(
        "points",
        "points",
        series=(Series("a", (1, 2), (3, 4)), Series("b", (0, 1), (1, 0), connect=True)),
    ),
    Panel("matrix", "matrix", matrix=((0.0, 1.0), (1.0, 0.0)), boundaries=(1,), scale_label="A"),
    Panel("graph", "graph", edges=((0, 1, 0.5), (1, 2, 1.0)), groups=(0, 0, 1)),
    Panel("tree", "tree", parents=(-1, 0, 0, 2), groups=(-1, 0, 1, 1), labels=("", "b", "c", "d")),
)


def table(**changes: Any) -> Table:
    return TypeAdapter(Table).validate_python({**SMALL, **changes})


def test_a_curve_is_the_mean_over_seeds_with_the_extremes() -> None:
    planned = plan(table(), Options())
    histories = [
        [{"round": 1, "accuracy": 10.0}, {"round": 2}, {"round": 3, "accuracy": 40.0}],
        [{"round": 1, "accuracy": 20.0}, {"round": 2}, {"round": 3, "accuracy": 30.0}],
    ]
    done = {("FedAvg", "digits", seed): Done({}, rows) for seed, rows in enumerate(histories)}
    accuracy, fedavg = pictures(planned, done)
    assert (accuracy.file, fedavg.file) == ("small-accuracy", "small-fedavg")
    [panel] = accuracy.panels
    assert (panel.title, panel.x_label, panel.y_label) == ("digits", "round", "accuracy, %")
    [line] = panel.series
    assert line == Series("FedAvg", (1.0, 3.0), (15.0, 35.0), (10.0, 30.0), (20.0, 40.0))


def test_a_long_curve_keeps_its_ends() -> None:
    history = [{"round": number, "accuracy": float(number)} for number in range(1, 1001)]
    [line] = (
        pictures(plan(table(), Options()), {("Local", "digits", 0): Done({}, history)})[0]
        .panels[0]
        .series
    )
    assert len(line.x) == 60
    assert (line.x[0], line.x[-1], line.low) == (1.0, 1000.0, None)
    assert line.x == line.y


def test_the_panels_of_a_study_are_those_of_its_first_seed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    done: Callable[..., tuple[Outcome, list[TableEntry]]],
) -> None:
    def study(tables: dict[str, dict[str, Any]], clients: Any, device: str) -> StudyResult:
        panel = replace(KINDS[0], title=f"seed {tables['run']['seed']}")
        return StudyResult([{"round": 1, "accuracy": 1.0}, {"round": 2, "accuracy": 2.0}], (panel,))

    monkeypatch.setitem(STUDIES, "cfl_directions", study)
    rows = [{"name": "one"}, {"name": "the same", "at": 1}, {"name": "two", "set": ["run.x=1"]}]
    picture = {"title": "P", "kind": "study", "reading": "R."}
    columns = [{"name": "c", "data": ["synthetic"]}]
    setting = {"rows": rows, "columns": columns, "pictures": [picture], "experiment": {"run": {}}}
    small = table(study="cfl_directions", **setting)
    for _ in range(2):  # the second time from the files
        result, _ = done(small, tmp_path)
        [drawn] = result.pictures
        assert drawn.file == "small"
        assert [panel.title for panel in drawn.panels] == ["one: seed 0", "two: seed 0"]
        assert math.isnan(drawn.panels[0].series[0].y[1])


def test_cells_are_drawn_over_the_numbers_of_the_rows() -> None:
    rows = [{"name": name, "method": "fedavg"} for name in ("β=0.5", "β=0", "FedAvg")]
    picture = {"title": "P", "kind": "rows", "reading": "R."}
    planned = plan(table(rows=rows, pictures=[picture]), Options())
    done = {
        ("β=0.5", "digits", 0): Done({"accuracy": 70.0, "accuracy_variance": 4.0}, []),
        ("β=0.5", "digits", 1): Done({"accuracy": 80.0, "accuracy_variance": 6.0}, []),
        ("β=0", "digits", 0): Done({"accuracy": 60.0, "accuracy_variance": 3.0}, []),
        ("FedAvg", "digits", 0): Done({"accuracy": 10.0, "accuracy_variance": 1.0}, []),
    }
    [drawn] = pictures(planned, done)
    [panel] = drawn.panels
    assert (panel.title, panel.x_label, panel.y_label) == ("digits", "β", "accuracy, %")
    assert panel.series == (
        Series("digits", (0.0, 0.5), (60.0, 75.0), (60.0, 70.0), (60.0, 80.0)),
        Series("variance", (0.0, 0.5), (3.0, 5.0), (3.0, 4.0), (3.0, 6.0)),
    )


def test_one_series_of_a_study_in_all_rows_is_one_panel() -> None:
    two = replace(KINDS[0], series=(Series("a", (1,), (2,)), Series("b", (1,), (3,))))
    picture = {"title": "P", "kind": "study", "reading": "R.", "series": "b"}
    rows = [{"name": name, "set": [f"run.x={name}"]} for name in ("1", "2", "3")]
    columns = [{"name": "c", "data": ["synthetic"]}]
    setting = {"rows": rows, "columns": columns, "pictures": [{**picture, "rows": ["1", "3"]}]}
    planned = plan(table(study="cfl_directions", **setting), Options())
    done = {(name, "c", 0): Done({}, [], (two,)) for name in ("1", "2", "3")}
    [drawn] = pictures(planned, done)
    [panel] = drawn.panels
    assert panel.series == (Series("1", (1,), (3,)), Series("3", (1,), (3,)))


def test_pictures_need_what_they_show() -> None:
    with pytest.raises(ValidationError, match="no study"):
        table(pictures=[{"title": "P", "kind": "study", "reading": "R."}])
    with pytest.raises(ValidationError, match="same name"):
        table(pictures=[{"title": "P", "kind": "curves", "reading": "R."}] * 2)
    with pytest.raises(ValueError, match="needs matrix"):
        Panel("empty", "matrix")
    with pytest.raises(ValueError, match="differ in length"):
        Panel("ragged", "matrix", matrix=((1.0,), (1.0, 2.0)))
    with pytest.raises(ValueError, match="labels has 1 entries for 2 nodes"):
        Panel("few", "tree", parents=(-1, 0), labels=("a",))
    with pytest.raises(ValueError, match="low has 1 values"):
        Series("band", (1, 2), (1, 2), low=(1,))


def test_json_keeps_what_a_picture_needs() -> None:
    stored = json.loads(json.dumps(Picture("f", "t", "r", KINDS[1:]).as_json()))
    assert Picture.from_json(stored) == Picture("f", "t", "r", KINDS[1:])
    assert "matrix" not in stored["panels"][0]
    line = Panel("l", "lines", series=(Series("a", (1.0, 1000.0), (12.34567, math.nan)),))
    assert line.as_json()["series"] == [{"name": "a", "x": [1, 1000], "y": [12.35, None]}]
    values = tuple(tuple((i * 7 + j) / 100 for j in range(9)) for i in range(9))
    [restored] = [Panel.from_json(Panel("m", "matrix", matrix=values).as_json())]
    assert (
        max(
            abs(a - b)
            for old, new in zip(values, restored.matrix, strict=True)
            for a, b in zip(old, new, strict=True)
        )
        <= 0.64 / 255
    )


@pytest.mark.parametrize("panel", KINDS, ids=lambda panel: panel.kind)
def test_a_stored_panel_draws_the_same_bytes(panel: Panel, tmp_path: Path) -> None:
    picture = Picture("p", "t", "r", (panel,))
    stored = Picture.from_json(json.loads(json.dumps(picture.as_json())))
    first, again = (draw(each, tmp_path / name) for each, name in ((picture, "a"), (stored, "b")))
    assert [path.name for path in first] == ["p.svg", "p.png"]
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert b"<dc:date>" not in first[0].read_bytes()


@pytest.mark.parametrize("count", [1, 8, 9, 30])
def test_colors_do_not_repeat(count: int) -> None:
    assert len(set(colors(count))) == count


def test_the_command_writes_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = table(seeds=1)
    monkeypatch.setattr(definitions, "tables", lambda: {"small": small})
    folder = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["reproduce", "small", "--quiet", "--out", str(folder), "--device", "cpu"]
    )
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.glob("small*")} == {
        f"small-{name}.{kind}" for name in ("accuracy", "fedavg") for kind in ("svg", "png")
    }
    assert "small-accuracy.svg" in result.output
    text = (folder / "table.md").read_text()
    assert "![Accuracy](small-accuracy.svg)" in text
    assert "It rises." in text
    stored = from_json(json.loads((folder / "table.json").read_text()))
    assert page(stored) == text
