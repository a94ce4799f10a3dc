"""A newcomer with a CSV file: from the file to predictions, on the command line and in Python."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., str]
CLINICS = ("Bern", "Chur", "Genf", "Olten", "Sion", "Uster")
IN_PYTHON = """
import fedclade as fc

clients = fc.data.from_csv("visits.csv", client="clinic", target="ill", test=0.25)
print(clients.describe())
diagnosis = fc.diagnose(clients, fc.models.MLP(8), probe_rounds=0)
print(diagnosis)
comparison = fc.compare(["fedavg", "clade"], clients, fc.models.MLP(8), rounds=10,
                        clients_per_round=1.0, epochs=2, out="compared", progress=True)
print(comparison)
best = comparison.results["clade"][0]
print("groups:", best.groups)
labels = best.predict(clients.arrays(0)[0], client="Bern")
print("predicted:", len(labels))
best.plot().savefig("figure.png")
"""


@pytest.fixture
def visits(tmp_path: Path) -> Path:
    """Six clinics; three of them code the diagnosis the other way round."""
    draw = random.Random(0)
    path = tmp_path / "visits.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["clinic", "age", "pressure", "sex", "ill"])
        for number, clinic in enumerate(CLINICS):
            for _ in range(60):
                age, pressure = draw.randint(20, 90), draw.gauss(130, 15)
                ill = (age + pressure > 185) != (number % 2 == 1)
                writer.writerow([clinic, age, f"{pressure:.1f}", draw.choice("fm"), int(ill)])
    return path


def test_on_the_command_line(visits: Path, person: Call, tmp_path: Path) -> None:
    out = person("fedclade", "init", "visits.csv", "--client", "clinic", "--target", "ill")
    assert "visits.toml" in out
    out = person("fedclade", "diagnose", "visits.toml", "--probe-rounds", "0", "--json")
    assert json.loads(out)["groups"] == 2
    out = person(
        *("fedclade", "compare", "visits.toml", "--methods", "fedavg,clade", "--rounds", "10"),
        *("--seeds", "1,2", "--out", "runs/two", "--json"),
    )
    accuracy = {row["method"]: row["accuracy"] for row in json.loads(out)["rows"]}
    assert accuracy["clade"] > accuracy["fedavg"] + 10
    assert "visits" in (tmp_path / "runs/two/report.html").read_text()
    person("fedclade", "report", "runs/two", "--out", "page.html")
    assert (tmp_path / "page.html").exists()
    out = person("fedclade", "predict", "runs/two/clade-seed1", "visits.csv")
    rows = list(csv.reader(out.splitlines()))
    assert len(rows) == 1 + 6 * 60


@pytest.mark.usefixtures("visits")
def test_in_python(person: Call, tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(IN_PYTHON)
    out = person("python", "first.py")
    assert "6 clients" in out
    assert "2 groups" in out
    assert "predicted: " in out
    assert (tmp_path / "compared/report.html").exists()
    assert (tmp_path / "figure.png").stat().st_size > 1000
