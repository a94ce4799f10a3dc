"""A CSV file on the command line: init, diagnose, run, compare, resume; the preset `hospitals`."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fedclade as fc
from fedclade.analysis import report
from fedclade.errors import InvalidInputError
from fedclade.training import experiment_file

from .conftest import Call

pytest.importorskip("pyarrow", reason="pyarrow (fedclade[tables]) is not installed")
SITES = ("north", "south", "east", "west", "São Paulo", "x,y")


@pytest.fixture
def stay(command: Call, tmp_path: Path) -> Path:
    """Six sites; the law of the target is reversed in every second one."""
    rng = np.random.default_rng(0)
    path = tmp_path / "stay.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "site", "admitted", "age", "ward", "diagnosis", "days"])
        for row in range(240):
            site, age = row % 6, float(rng.normal(50, 10))
            sick = (age > 50) != (site % 2 == 1)
            days = 3 + 0.1 * (age - 50) * (1 if site % 2 else -1)
            diagnosis = "yes" if sick else "no"
            fixed = (row, SITES[site], "2026-01-02", f"{age:.1f}", "ab"[row % 2])
            writer.writerow([*fixed, diagnosis, f"{days:.2f}"])
    return path


def test_from_csv_to_report(command: Call, stay: Path, tmp_path: Path) -> None:
    code, out, _ = command("init", "stay.csv", "--client", "site", "--target", "diagnosis")
    assert code == 0
    assert "São Paulo" in out
    tables = tomllib.loads((tmp_path / "stay.toml").read_text("utf-8"))
    assert tables["data"]["drop"] == ["id", "admitted"]
    assert "days" not in tables["data"]["drop"]
    few = ("--set", "run.rounds=3", "--set", 'data.drop=["id","admitted","days"]')
    assert command("diagnose", "stay.toml", "--probe-rounds", "0", *few)[0] == 0
    assert command("run", "stay.toml", *few, "--out", "run", "--device", "cpu")[0] == 0
    assert (tmp_path / "run" / "report.html").exists()
    assert "[partition]" not in (tmp_path / "run" / "experiment.toml").read_text("utf-8")
    result = fc.load(tmp_path / "run")
    assert result.clients["client"] == sorted(SITES)
    assert result.names.classes == ("no", "yes")
    assert isinstance(result.encoding, fc.data.ColumnEncoding)
    assert result.encoding.feature_names == ("age", "ward=a", "ward=b")
    methods = ("--methods", "fedavg,local", "--out", "two", "--device", "cpu")
    assert command("compare", "stay.toml", *few, *methods)[0] == 0
    assert command("report", "run", "two", "--out", "page.html")[0] == 0


def test_init_never_overwrites(command: Call, stay: Path, tmp_path: Path) -> None:
    (tmp_path / "stay.toml").write_text("mine")
    code, _, err = command("init", "stay.csv", "--client", "site", "--target", "diagnosis")
    assert (code, "stay.toml" in err) == (2, True)
    assert (tmp_path / "stay.toml").read_text() == "mine"


def test_init_finds_the_column_of_parts(command: Call, tmp_path: Path) -> None:
    rows = "".join(
        f"{'ab'[i % 2]},{i / 7},{i % 3},{'test' if i % 5 == 0 else 'train'}\n" for i in range(40)
    )
    (tmp_path / "t.csv").write_text("s,n,y,part\n" + rows)
    assert command("init", "t.csv", "--client", "s", "--target", "y", "--out", "e.toml")[0] == 0
    assert tomllib.loads((tmp_path / "e.toml").read_text())["data"]["test"] == "part"


def test_regression(command: Call, stay: Path, tmp_path: Path) -> None:
    command("init", "stay.csv", "--client", "site", "--target", "days")
    tables = tomllib.loads((tmp_path / "stay.toml").read_text("utf-8"))
    assert tables["data"]["task"] == "regression"
    del tables["local"]["loss"]  # the squared error is the default of numbers
    experiment = experiment_file.experiment(tables)
    assert experiment.to_run(experiment.clients(), "cpu").local.loss == "mse"
    run = ("run", "stay.toml", "--set", "run.rounds=3", "--set", 'data.drop=["id","admitted"]')
    assert command(*run, "--out", "run", "--device", "cpu")[0] == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy"] is None
    assert 0 < summary["loss"] < 2  # in variances of the target
    assert command("diagnose", "stay.toml", "--probe-rounds", "1", "--out", "d")[0] == 0
    assert json.loads((tmp_path / "d" / "diagnosis.json").read_text())["about"]["score"] == "loss"


def test_resume_depends_on_the_content_only(command: Call, stay: Path, tmp_path: Path) -> None:
    command("init", "stay.csv", "--client", "site", "--target", "diagnosis")
    run = ("run", "stay.toml", "--device", "cpu", "--quiet", "--no-report")
    assert command(*run, "--set", "run.rounds=2", "--out", "run")[0] == 0
    assert command(*run, "--set", "run.rounds=4", "--out", "whole")[0] == 0
    (tmp_path / "moved.csv").write_bytes(stay.read_bytes())
    again = (*run, "--set", "run.rounds=4", "--out", "run", "--resume")
    assert command(*again, "--set", "data.path=moved.csv")[0] == 0
    models = [tmp_path / name / "models" / "models.safetensors" for name in ("run", "whole")]
    assert models[0].read_bytes() == models[1].read_bytes()
    text = (tmp_path / "moved.csv").read_text("utf-8")
    (tmp_path / "moved.csv").write_text(text.replace(",b,yes,", ",a,yes,", 1), "utf-8")
    code, _, err = command(*again, "--set", "data.path=moved.csv", "--set", "run.rounds=6")
    assert code == 2
    assert "another experiment" in err


def test_experiment_of_a_run_runs_again(command: Call, stay: Path, tmp_path: Path) -> None:
    command("init", "stay.csv", "--client", "site", "--target", "diagnosis")
    few = ("--set", "run.rounds=2", "--set", "data.validation=0.2", "--device", "cpu")
    assert command("run", "stay.toml", *few, "--out", "one")[0] == 0
    (tmp_path / "again.toml").write_bytes((tmp_path / "one" / "experiment.toml").read_bytes())
    assert command("run", "again.toml", "--out", "two", "--device", "cpu")[0] == 0
    for name in ("models/models.safetensors", "encoding.json", "names.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


TABLES = {
    "data": {"path": "stay.csv", "client": "site", "target": "diagnosis"},
    "model": {"name": "mlp"},
    "method": {"name": "fedavg"},
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"partition": {"name": "iid"}}, "partition"),
        ({"data": TABLES["data"] | {"name": "digits"}}, "data.path"),
        ({"data": {"path": "stay.csv", "client": "site"}}, "data.target"),
        ({"data": {"path": "stay.csv", "target": "diagnosis"}}, "data.client"),
        ({"data": TABLES["data"] | {"missing": "zero"}}, "data.missing"),
        ({"data": TABLES["data"] | {"test": 2.0}}, "data.test"),
        ({"data": TABLES["data"] | {"drop": "id"}}, "data.drop"),
        ({"data": TABLES["data"] | {"targets": "x"}}, "data.targets"),
        ({"data": TABLES["data"] | {"path": "."}}, "data.client"),
        (
            {"data": {"name": "digits", "client": "site"}, "partition": {"name": "iid"}},
            "data.client",
        ),
    ],
)
def test_wrong_tables(changes: dict[str, dict[str, str]], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        experiment_file.experiment(TABLES | changes)
    assert caught.value.field == field


@pytest.mark.parametrize("path", ["stay.xlsx", "stay", "missing.csv"])
def test_wrong_paths(command: Call, path: str) -> None:
    tables = TABLES | {"data": TABLES["data"] | {"path": path}}
    with pytest.raises(InvalidInputError) as caught:
        experiment_file.experiment(tables).clients()
    assert caught.value.field in ("data.path", path)


def test_who_is_in_which_group(command: Call, stay: Path, tmp_path: Path) -> None:
    command("init", "stay.csv", "--client", "site", "--target", "diagnosis")
    settings = ("--set", 'data.drop=["id","admitted","days"]', "--set", "method.name=clade")
    code, out, _ = command("run", "stay.toml", *settings, "--out", "run", "--device", "cpu")
    assert code == 0
    result = fc.load(tmp_path / "run")
    # The law is reversed in every second site.
    members = sorted(result.groups.values(), key=len)
    assert sorted(map(sorted, members)) == [
        ["São Paulo", "east", "north"],
        ["south", "west", "x,y"],
    ]
    page = report.collect([tmp_path / "run"])["runs"][0]["groups"]
    assert {row["group"]: row["members"] for row in page} == result.groups
    for group, names in result.groups.items():
        assert re.search(rf"group {group} +{re.escape(', '.join(map(str, names)))}", out)
    frame = dict(zip(result.clients["client"], result.clients["cluster"], strict=True))
    assert frame == {name: result.cluster_of(name) for name in result.names.clients or ()}
    # One group, or one for each client, needs no list.
    for method in ("fedavg", "local"):
        name = ("--set", f"method.name={method}", "--set", "run.rounds=1")
        out = command("run", "stay.toml", *settings[:2], *name, "--out", method)[1]
        assert "group 0" not in out


def test_hospitals(command: Call, tmp_path: Path) -> None:
    few = ("--set", "run.rounds=2", "--device", "cpu")
    assert command("run", "hospitals", *few, "--out", "run")[0] == 0
    result = fc.load(tmp_path / "run")
    assert result.clients["client"] == ["cleveland", "hungarian", "switzerland", "va"]
    assert result.names.classes == ("no", "yes")
    assert "heart" in command("data", "list")[1]
