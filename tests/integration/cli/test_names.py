"""Names from an .npz file on the command line: run, diagnose, export."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from .conftest import Call

SITES = ["north", "south", "[b]east[/b]", "west", "São Paulo", "x,y"]
EXPERIMENT = """
[data]
name = "mine.npz"
[partition]
name = "natural_id"
key = "site"
clients = 6
probe = 0
[model]
name = "logistic"
[method]
name = "clade_groups"
[run]
rounds = 2
clients_per_round = 1.0
"""


@pytest.fixture
def experiment(command: Call, tmp_path: Path) -> str:
    """Six sites in two groups with two classes each."""
    rng = np.random.default_rng(0)
    corners = 3 * rng.normal(size=(4, 6))
    site = np.arange(240) % 6
    y = 2 * (site % 2) + rng.integers(0, 2, 240)
    x = (corners[y] + rng.normal(size=(240, 6))).astype("float32")
    names = np.array(SITES)[site]
    np.savez(
        tmp_path / "mine.npz",
        x_train=x[:180],
        y_train=y[:180],
        x_test=x[180:],
        y_test=y[180:],
        site_train=names[:180],
        site_test=names[180:],
        class_names=np.array(["cat", "dog", "bird", "fish"]),
        feature_names=np.array(["a", "b", "c", "d", "e", "f"]),
    )
    (tmp_path / "mine.toml").write_text(EXPERIMENT)
    return "mine.toml"


def test_run_and_export_show_the_names(command: Call, experiment: str, tmp_path: Path) -> None:
    assert command("run", experiment, "--out", "run", "--device", "cpu")[0] == 0
    with (tmp_path / "run" / "clients.csv").open(newline="") as file:
        assert [row["client"] for row in csv.DictReader(file)] == sorted(SITES)
    assert "S\\u00e3o Paulo" in (tmp_path / "run" / "report.html").read_text()
    assert command("export", "run", "--format", "safetensors")[0] == 0
    models = json.loads((tmp_path / "run" / "export" / "models.json").read_text())
    assert models["model_of_client"].keys() == set(SITES)
    card = json.loads((tmp_path / "run" / "export" / "group-0" / "card.json").read_text())
    assert card["model"]["class_names"] == ["cat", "dog", "bird", "fish"]


def test_a_diagnosis_lists_the_groups_by_name(command: Call, experiment: str) -> None:
    code, printed, _ = command("diagnose", experiment, "--probe-rounds", "0", "--device", "cpu")
    assert code == 0
    assert "Group 0: São Paulo, [b]east[/b], north.\nGroup 1: south, west, x,y.\n" in printed
    table = " ".join(re.split(r"group +clients", printed, maxsplit=1)[1].split())
    assert "São Paulo, [b]east[/b], north" in table
    assert "cat (" in table
    assert "fish (" in table
