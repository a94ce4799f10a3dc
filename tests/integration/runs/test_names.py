"""Names of clients, classes and features from the data to every output of a run."""

from __future__ import annotations

import csv
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedclade as fc
from fedclade.analysis import report
from fedclade.analysis.diagnose.api import Diagnosis
from fedclade.analysis.export import export
from fedclade.core.names import NO_NAMES
from fedclade.data import Clients
from fedclade.errors import InvalidInputError

EVIL = "</script><script>alert(1)</script>"
NAMES = ["north", 'a, "b"', EVIL, "../x", "/", "Süd", "007", "x" * 200]
CLASSES = ["<i>cat", "dog|", "bird", "fish"]
FEATURES = ["age", "weight", "height", "<b>", "e", "f"]


def named(**changes: Any) -> Clients:
    """Eight clients in two groups with two classes each."""
    rng = np.random.default_rng(0)
    corners = 3 * rng.normal(size=(4, 6))
    arrays = {}
    for number, name in enumerate(NAMES):
        y = 2 * (number % 2) + np.arange(24) % 2
        x = (corners[y] + rng.normal(size=(24, 6))).astype("float32")
        arrays[name] = (x[:16], y[:16], x[16:], y[16:])
    return fc.data.from_arrays(arrays, class_names=CLASSES, feature_names=FEATURES, **changes)


def run(clients: Clients, out: Path | None, rounds: int = 2, **options: Any) -> Any:
    method = options.pop("method", fc.Clade())
    return fc.run(
        method,
        clients,
        fc.models.Logistic(),
        rounds=rounds,
        clients_per_round=1.0,
        out=out,
        threads=1,
        **options,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("names") / "run"
    run(named(), out)
    return out


def test_clients_csv_has_the_names(folder: Path) -> None:
    with (folder / "clients.csv").open(newline="") as file:
        assert [row["client"] for row in csv.DictReader(file)] == NAMES


def test_a_result_finds_a_client_by_name_or_number(folder: Path) -> None:
    fresh = run(named(), None)
    for result in (fresh, pickle.loads(pickle.dumps(fresh)), fc.load(folder)):
        assert result.clients["client"] == NAMES
        assert result.names == named().names
        for number in (0, 6):
            by_name, by_number = result.model_of(NAMES[number]), result.model_of(number)
            for key, value in by_number.state_dict().items():
                assert torch.equal(value, by_name.state_dict()[key])
        with pytest.raises(InvalidInputError, match="'north'") as caught:
            result.model_of("nroth")
        assert caught.value.field == "client"


def test_names_change_no_number_and_no_file_without_names(folder: Path, tmp_path: Path) -> None:
    run(replace(named(), names=NO_NAMES), tmp_path)
    assert not (tmp_path / "names.json").exists()
    for file in ("models/models.safetensors", "experiment.toml", "client_features.safetensors"):
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()
    numbers = (tmp_path / "clients.csv").read_text().splitlines()
    names = (folder / "clients.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in numbers[1:]] == [str(n) for n in range(len(NAMES))]
    assert [line.split(",", 1)[1] for line in numbers] == [
        re.sub(r'^(?:"(?:[^"]|"")*"|[^,]*),', "", line) for line in names
    ]


def test_a_run_resumes_under_other_names(folder: Path, tmp_path: Path) -> None:
    """Names are no part of the fingerprint: a renamed client is the same client."""
    run(named(), tmp_path, rounds=1)
    other = replace(named().names, clients=tuple(f"site {n}" for n in range(len(NAMES))))
    result = run(replace(named(), names=other), tmp_path, rounds=2, resume=True)
    assert [row["round"] for row in result.history] == [1, 2]
    assert fc.load(tmp_path).clients["client"] == list(other.clients or ())
    file = "models/models.safetensors"
    assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()


def test_a_run_that_loses_its_names_has_none(tmp_path: Path) -> None:
    run(named(), tmp_path, rounds=1)
    run(replace(named(), names=NO_NAMES), tmp_path, rounds=2, resume=True)
    assert not (tmp_path / "names.json").exists()
    assert fc.load(tmp_path).clients["client"] == list(range(len(NAMES)))


@pytest.mark.parametrize(
    "names",
    [
        {"clients": NAMES[:-1]},
        {"clients": NAMES[::-1]},
        {"clients": ["north"] * len(NAMES)},
        {"clients": 3},
        {"classes": [1, 2]},
        ["north"],
    ],
)
def test_damaged_names_are_refused(folder: Path, tmp_path: Path, names: Any) -> None:
    for file in ("clients.csv", "summary.json", "rounds.jsonl", "experiment.toml"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "models").symlink_to(folder / "models")
    (tmp_path / "names.json").write_text(json.dumps(names))
    with pytest.raises(InvalidInputError, match=r"names\.json|clients\.csv"):
        fc.load(tmp_path)


def test_the_report_shows_names_as_text(folder: Path, tmp_path: Path) -> None:
    data = report.collect([folder])
    (shown,) = data["runs"]
    assert list(shown["names"].values()) == NAMES
    assert shown["classNames"] == CLASSES
    for path in (
        report.write_report([folder], tmp_path / "one.html"),
        run(named(), None).report(tmp_path / "two.html"),
    ):
        text = path.read_text()
        assert text.count("<script") == 2
        assert "alert(1)</script>" not in text
        assert "<i>cat" not in text
        assert "S\\u00fcd" in text


def test_failures_of_a_running_run_have_names(folder: Path, tmp_path: Path) -> None:
    for file in ("names.json", "experiment.toml"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    first = json.loads((folder / "rounds.jsonl").read_text().splitlines()[0])
    first["failures"] = [{"client": 5, "reason": "late", "rejected": False}]
    (tmp_path / "rounds.jsonl").write_text(json.dumps(first) + "\n")
    (shown,) = report.collect([tmp_path])["runs"]
    assert shown["names"] == {"5": "Süd"}


def test_the_model_card_has_names(folder: Path, tmp_path: Path) -> None:
    exported = export(folder, tmp_path / "out", formats=("safetensors",))
    clients = [name for card in exported.cards for name in card["clients"]]
    assert sorted(clients) == sorted(NAMES)
    for card in exported.cards:
        assert card["model"]["class_names"] == CLASSES
        assert card["model"]["feature_names"] == FEATURES
        text = (exported.folder / card["name"] / "card.md").read_text()
        assert "<" not in text
        assert "age, weight, height, &lt;b&gt;, e, f" in text
    models = json.loads((exported.folder / "models.json").read_text())["model_of_client"]
    assert models.keys() == set(NAMES)
    mixes = [
        line
        for card in exported.cards
        for line in (exported.folder / card["name"] / "card.md").read_text().splitlines()
        if line.startswith("| label distribution")
    ]
    assert any("class dog\\|: 50.0%" in line for line in mixes)


def test_a_model_for_each_client_is_in_a_folder_of_its_name(tmp_path: Path) -> None:
    run(named(), tmp_path / "run", method=fc.Local())
    out = tmp_path / "out"
    exported = export(tmp_path / "run", out, formats=("safetensors",))
    folders = [card["name"] for card in exported.cards]
    assert folders[0] == "north"
    assert len(set(folders)) == len(NAMES)
    for card in exported.cards:
        assert (out / card["name"]).resolve().parent == out.resolve()
        assert (out / card["name"] / "model.safetensors").is_file()
    assert {path.name for path in out.iterdir()} == {*folders, "models.json"}


def test_the_diagnosis_has_names(tmp_path: Path) -> None:
    found = fc.diagnose(named(), probe_rounds=0, threads=1)
    assert found.groups == 2
    assert [row["names"] for row in found.members] == [
        ", ".join(NAMES[0::2]),
        ", ".join(NAMES[1::2]),
    ]
    assert any("dog| (50 %)" in row["classes"] for row in found.members)
    assert any(sentence.startswith("Group 0: north") for sentence in found.sentences())
    assert Diagnosis.from_json(json.loads(json.dumps(found.to_json()))) == found
    without = fc.diagnose(replace(named(), names=NO_NAMES), probe_rounds=0, threads=1)
    assert [place["name"] for place in found.map] == NAMES
    places = tuple({key: place[key] for key in ("client", "x", "y")} for place in found.map)
    assert replace(found, members=(), map=places) == without
    assert "members" not in without.to_json()


def test_a_diagnosis_calls_a_client_without_data_by_its_name() -> None:
    clients = named()
    lost = replace(
        clients,
        train=fc.data.RaggedIndex.of([[], *(clients.train[n] for n in range(1, len(NAMES)))]),
    )
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "north"):
        fc.diagnose(lost, probe_rounds=0)
