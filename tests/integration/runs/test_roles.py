"""Shakespeare by role, from a small file to the report: the roles keep their names."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from typer.testing import CliRunner

import fedclade as fc
from fedclade.cli.main import app

# Two plays with two ways of writing; every role has enough for windows of 80 characters.
ROLES = {
    ("lear", "FOOL"): "sirrah, thou wert better give thy coxcomb to the wind and rain",
    ("lear", "KENT"): "this is nothing, fool: who wears the coxcomb stands in the storm",
    ("henryv", "PISTOL"): "0123 4567 8901 2345 6789 0123 4567 8901 2345 6789 0123 4567 8901",
    ("henryv", "NYM"): "9876 5432 1098 7654 3210 9876 5432 1098 7654 3210 9876 5432 1098",
}
NAMES = {f"{role} ({play})" for play, role in ROLES}
LINES = 60
SETTINGS = [
    "partition.key=role",
    "partition.clients=4",
    "model.name=lstm_lm",
    "model.embedding=4",
    "model.hidden=8",
    "run.rounds=1",
    "run.clients_per_round=1.0",
    "method.name=clade",
]


def test_names_of_roles_stay(tmp_path: Path) -> None:
    with (tmp_path / "shakespeare.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("play", "role", "line"))
        for (play, role), line in ROLES.items():
            writer.writerows((play, role, f"{line} {number}") for number in range(LINES))
    run = tmp_path / "run"
    arguments = ["run", "quickstart", "--out", str(run), "--data-root", str(tmp_path), "--quiet"]
    sets = ["data.name=shakespeare", "partition.name=natural_id", *SETTINGS]
    done = CliRunner().invoke(app, [*arguments, *(f"--set={value}" for value in sets)])
    assert done.exception is None, done.output
    with (run / "clients.csv").open() as file:
        assert {row["client"] for row in csv.DictReader(file)} == NAMES
    assert set(json.loads((run / "names.json").read_text())["clients"]) == NAMES
    report = (run / "report.html").read_text()
    assert all(name in report for name in NAMES)
    result = fc.load(run)
    members = [name for names in result.groups.values() for name in names]
    assert set(members) == NAMES
    assert len(members) == len(NAMES)
