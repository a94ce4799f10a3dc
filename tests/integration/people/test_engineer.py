"""An engineer with a Flower federation: a new app with its own data, tried in the simulator, then
on processes of Flower.
"""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")
Call = Callable[..., str]
OWN_DATA = '''
def load_data(node):
    """The patients of this node's file: name of the ward -> (x, y, x_test, y_test)."""
    import csv
    import numpy as np

    with open(f"@FOLDER@/node-{node['partition-id']}.csv", newline="") as file:
        rows = np.array(list(csv.reader(file))[1:], dtype="float32")
    x, y = rows[:, :-1], rows[:, -1].astype("int64")
    return {"ward": (x[:30], y[:30], x[30:], y[30:])}


def build_model():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
'''
# The data and the model of all nodes, before there is a network.
REHEARSAL = """
import sys
sys.path.insert(0, "clinics")
import fedclade as fc
from clinics.task import build_model, load_data

nodes = [{"partition-id": n, "num-partitions": 2} for n in range(2)]
wards = [arrays for node in nodes for arrays in load_data(node).values()]
clients = fc.data.from_arrays(wards)
result = fc.run(fc.Clade(), clients, build_model(), rounds=3, clients_per_round=1.0)
print("clients:", len(clients), "rounds:", result.summary["rounds"])
"""


@pytest.fixture
def app(person: Call, tmp_path: Path) -> Path:
    """The app with the engineer's own data and model."""
    out = person("fedclade", "flower", "new", "clinics")
    assert "fedclade flower run clinics" in out
    task = tmp_path / "clinics/clinics/task.py"
    code = task.read_text().partition("def load_data")[0].rstrip() + "\n\n" + OWN_DATA
    task.write_text(code.replace("@FOLDER@", str(tmp_path)))
    for node in range(2):
        with (tmp_path / f"node-{node}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["a", "b", "c", "y"])
            for row in range(40):
                a, b, c = (row * 7 % 11) / 11, (row * 5 % 13) / 13, (row * 3 % 17) / 17
                writer.writerow([a, b, c, int((a + b > c + 0.4) != (node == 1))])
    return tmp_path / "clinics"


def test_the_app_and_its_rehearsal_in_the_simulator(
    app: Path, person: Call, tmp_path: Path
) -> None:
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "clinics.server_app:app",
        "clientapp": "clinics.client_app:app",
    }
    (tmp_path / "rehearse.py").write_text(REHEARSAL)
    assert "clients: 2 rounds: 3" in person("python", "rehearse.py")
    person("fedclade", "flower", "new", "clinics", code=2)  # it is never overwritten


@pytest.mark.slow
@pytest.mark.usefixtures("app")
def test_the_app_on_processes_of_flower(person: Call, tmp_path: Path) -> None:
    person("fedclade", "flower", "up", "--nodes", "2", "--port", "0")
    try:
        assert "node-1" in person("fedclade", "flower", "status")
        person("fedclade", "flower", "run", "clinics", "--set", "run.rounds=2")
        (summary,) = tmp_path.rglob("summary.json")
        assert json.loads(summary.read_text())["rounds"] == 2
    finally:
        person("fedclade", "flower", "down", "--purge")
