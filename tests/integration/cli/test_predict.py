"""`fedclade predict`: rows of CSV and .npz files, known and new clients, and what is refused."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest

import fedclade as fc
from fedclade.analysis.predict_file import predict_file
from fedclade.errors import FedcladeWarning, InvalidInputError

from .conftest import Call

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: tables)")

HEADER = "hospital,age,ward,diagnosis,days\n"


def table(target: str = "diagnosis") -> str:
    """Two hospitals with opposite laws: north is ill if old, south is ill if young."""
    rng = np.random.default_rng(0)
    lines = [HEADER]
    for hospital, sign in (("north", 1), ("south", -1)):
        for number in range(60):
            age = float(rng.integers(20, 90))
            ill = "ill" if sign * (age - 55) > 0 else "well"
            days = 100 + sign * (age - 55)
            lines.append(f"{hospital},{age},{'AB'[number % 2]},{ill},{days}\n")
    return "".join(lines)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classification, a regression, and a run of arrays."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "stay.csv").write_text(table())
    classes = fc.data.from_csv(
        folder / "stay.csv", client="hospital", target="diagnosis", drop=["days"]
    )
    numbers = fc.data.from_csv(
        folder / "stay.csv", client="hospital", target="days", drop=["diagnosis"]
    )
    settings = {"rounds": 30, "clients_per_round": 1.0, "lr": 0.1, "device": "cpu"}
    fc.run(fc.Local(), classes, fc.models.MLP(8), out=folder / "classes", **settings)
    fc.run(fc.Local(), numbers, fc.models.MLP(8), out=folder / "numbers", loss="mse", **settings)
    x = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    arrays = fc.data.from_arrays([(x, y, x, y), (x, 1 - y, x, 1 - y)])
    fc.run(fc.Local(), arrays, fc.models.Logistic(), out=folder / "arrays", **settings)
    np.savez(folder / "rows.npz", x=x[:5])
    np.savez(folder / "labeled.npz", x=x, y=1 - y)
    (folder / "rows.csv").write_text("age,ward\n85,A\n25,B\n")
    (folder / "clients.csv").write_text("age,ward,hospital\n85,A,south\n85,A,north\n25,A,south\n")
    (folder / "few.csv").write_text(HEADER + "new,80,A,well,75\nnew,30,B,ill,125\n")
    return folder


def predictions(printed: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(printed)))


def test_rows_of_a_csv_get_the_names_of_classes(command: Call, runs: Path) -> None:
    rows = str(runs / "rows.csv")
    code, printed, errors = command("predict", str(runs / "classes"), "--client", "north", rows)
    assert (code, errors) == (0, "")
    assert printed == "prediction\nill\nwell\n"
    code, printed, _ = command("predict", str(runs / "classes"), "--client", "south", rows)
    assert printed == "prediction\nwell\nill\n"


def test_probabilities_and_a_file(command: Call, runs: Path, tmp_path: Path) -> None:
    arguments = ("--client", "north", "--probability", "--out", "out.csv")
    code, printed, _ = command("predict", str(runs / "classes"), str(runs / "rows.csv"), *arguments)
    assert (code, printed) == (0, "")
    lines = predictions((tmp_path / "out.csv").read_text())
    assert [line["prediction"] for line in lines] == ["ill", "well"]
    assert float(lines[0]["probability ill"]) > 0.5 > float(lines[1]["probability ill"])
    for line in lines:
        total = float(line["probability ill"]) + float(line["probability well"])
        assert total == pytest.approx(1, abs=1e-6)


def test_a_column_of_clients_gives_each_row_its_model(command: Call, runs: Path) -> None:
    code, printed, _ = command("predict", str(runs / "classes"), str(runs / "clients.csv"))
    assert code == 0
    assert [line["prediction"] for line in predictions(printed)] == ["well", "ill", "ill"]


def test_numbers_have_the_unit_of_the_target(command: Call, runs: Path) -> None:
    rows = str(runs / "rows.csv")
    _, printed, _ = command("predict", str(runs / "numbers"), "--client", "north", rows)
    old, young = (float(line["prediction"]) for line in predictions(printed))
    assert old == pytest.approx(130, abs=8)
    assert young == pytest.approx(70, abs=8)


@pytest.mark.parametrize("run", ["classes", "numbers"])
def test_a_new_client_joins_the_group_of_its_labeled_rows(
    command: Call, runs: Path, run: str
) -> None:
    few, rows = str(runs / "few.csv"), str(runs / "rows.csv")
    code, printed, errors = command("predict", str(runs / run), "--labeled", few, rows)
    assert code == 0
    assert "client south" in errors
    _, expected, _ = command("predict", str(runs / run), "--client", "south", rows)
    assert printed == expected


def test_an_unknown_client_is_told_how_to_join(command: Call, runs: Path) -> None:
    rows = str(runs / "rows.csv")
    code, _, errors = command("predict", str(runs / "classes"), "--client", "west", rows)
    assert code == 2
    assert "west" in errors
    assert "--labeled FILE" in errors


def test_rows_of_an_npz_file_and_clients_without_names(command: Call, runs: Path) -> None:
    run, rows = str(runs / "arrays"), str(runs / "rows.npz")
    _, first, _ = command("predict", run, "--client", "0", rows)
    _, second, _ = command("predict", run, "--client", "1", rows)
    _, joined, _ = command("predict", run, "--labeled", str(runs / "labeled.npz"), rows)
    assert first != second == joined
    assert len(predictions(first)) == 5


def test_an_unknown_category_is_a_warning(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("age,ward\n85,A\n25,a\n25,\n")
    with pytest.warns(FedcladeWarning) as caught:
        predict_file(fc.load(runs / "classes"), tmp_path / "rows.csv", "north")
    assert [warning.message.field for warning in caught] == ["ward"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("run", "rows", "arguments", "field"),
    [
        ("classes", "age,ward\n85,A\n", {"client": "nort"}, "client"),
        ("classes", "age,ward\n85,A\n", {}, "--client"),
        ("classes", "age,ward\n85,A\n", {"client": "north", "labeled": Path("x")}, "--labeled"),
        ("classes", "age\n85\n", {"client": "north"}, "ward"),
        ("classes", "age,ward,hospital\n85,A,east\n", {}, "client"),
        ("classes", "age,ward,hospital\n85,A,\n", {}, "hospital"),
        ("numbers", "age,ward\n85,A\n", {"client": "north", "probability": True}, "kind"),
        ("arrays", "age,ward\n85,A\n", {"client": "0"}, "ROWS"),
        ("arrays", "age,ward\n85,A\n", {"client": "2"}, "client"),
    ],
)
def test_rows_that_cannot_be_predicted_are_refused(
    runs: Path, tmp_path: Path, run: str, rows: str, arguments: dict[str, object], field: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(rows)
    with pytest.raises(InvalidInputError) as caught:
        predict_file(fc.load(runs / run), path, **arguments)  # type: ignore[arg-type]
    assert caught.value.field == (str(path) if field == "ROWS" else field)


@pytest.mark.parametrize(
    ("run", "text", "field"),
    [
        ("classes", "age,ward\n85,A\n", "diagnosis"),
        ("classes", "age,ward,diagnosis\n85,A,healthy\n", "diagnosis"),
        ("classes", "age,ward,diagnosis\n85,A,\n", "diagnosis"),
        ("numbers", "age,ward,days\n85,A,\n", "days"),
    ],
)
def test_labeled_rows_need_targets_of_the_run(
    runs: Path, tmp_path: Path, run: str, text: str, field: str
) -> None:
    path = tmp_path / "few.csv"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        predict_file(fc.load(runs / run), runs / "rows.csv", labeled=path)
    assert caught.value.field == field


def test_an_npz_file_without_x_is_refused(command: Call, runs: Path) -> None:
    np.savez("other.npz", z=np.zeros(3))
    code, _, errors = command("predict", str(runs / "arrays"), "--client", "0", "other.npz")
    assert code == 2
    assert "x missing" in errors
