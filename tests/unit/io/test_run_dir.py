"""The run directory: its files, that its experiment runs again, and that it is read as it was
written.
"""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import fedclade as fc
from fedclade.data import Clients
from fedclade.io.run_dir import RunDirectory
from fedclade.registry import REGISTRY
from fedclade.training import experiment_file

KEYS = [
    *(
        "method",
        "dataset",
        "partition",
        "model",
        "engine",
        "device",
        "seed",
        "rounds",
        "clients",
        "clusters",
    ),
    *(
        "accuracy",
        "accuracy_stderr",
        "accuracy_variance",
        "accuracy_worst10",
        "ari",
        "bytes_up",
        "bytes_down",
        "seconds",
    ),
]
METHODS = pytest.mark.parametrize(
    "method", [fc.FedAvg(), fc.Local()], ids=lambda method: method.name
)


class Net(nn.Module):
    def __init__(self, hidden: int = 8, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, hidden), nn.Linear(hidden, 10)
        self.first.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.flatten(1))))


class Unlike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.only(x.flatten(1))


def do(clients: Clients, out: Path, method: fc.Method | None = None, **changed: Any) -> fc.Result:
    settings: dict[str, Any] = {
        "model": fc.models.MLP((8, 6)),
        "rounds": 3,
        "clients_per_round": 0.3,
        "lr": 0.2,
        "eval_every": 2,
    }
    return fc.run(method or fc.FedAvg(), clients, out=out, **{**settings, **changed})


def models(folder: Path) -> bytes:
    return (folder / "models" / "models.safetensors").read_bytes()


@METHODS
def test_a_run_directory_has_the_documented_files(
    method: fc.Method, digits: Clients, tmp_path: Path
) -> None:
    result = do(digits, tmp_path / "a" / "b c", method)
    folder = tmp_path / "a" / "b c"
    assert result.folder == folder
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "experiment.toml",
        "rounds.jsonl",
        "report.html",
        "clients.csv",
        "summary.json",
        "client_features.safetensors",
        "models",
        "checkpoint",
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert [key for key in KEYS if key not in summary] == []
    assert summary == result.summary
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert rows == result.history
    assert [row["round"] for row in rows] == [1, 2, 3]
    with (folder / "clients.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 20
    assert digits.groups is not None
    assert [int(line["true_group"]) for line in lines] == digits.groups.tolist()
    assert [int(line["cluster"]) for line in lines] == result.clusters.tolist()
    assert not list(folder.rglob("*.partial"))


def test_the_summary_describes_the_run(digits: Clients, tmp_path: Path) -> None:
    summary = do(digits, tmp_path, seed=4).summary
    identity = {
        key: summary[key]
        for key in (
            "method",
            "dataset",
            "partition",
            "model",
            "engine",
            "seed",
            "rounds",
            "clients",
        )
    }
    assert identity == {
        "method": "fedavg",
        "dataset": "digits",
        "partition": "label_clusters",
        "model": "mlp",
        "engine": "simulator",
        "seed": 4,
        "rounds": 3,
        "clients": 20,
    }
    assert summary["device"].startswith(("cpu", "cuda"))
    assert summary["seconds"] == pytest.approx(
        sum(row["seconds"] for row in fc.load(tmp_path).history), abs=0.01
    )


def test_the_models_file_has_a_row_for_each_model_and_the_row_of_each_client(
    digits: Clients, tmp_path: Path
) -> None:
    for method, rows, assignment in ((fc.FedAvg(), 1, [0] * 20), (fc.Local(), 20, list(range(20)))):
        do(digits, tmp_path / method.name, method)
        stored = load_file(tmp_path / method.name / "models" / "models.safetensors")
        assert stored["assignment"].tolist() == stored["clusters"].tolist() == assignment
        weights = {name: value for name, value in stored.items() if name.startswith("models/")}
        assert set(weights) == {
            f"models/fc{layer}.{kind}" for layer in (1, 2, 3) for kind in ("weight", "bias")
        }
        assert {len(value) for value in weights.values()} == {rows}


@METHODS
def test_a_loaded_run_equals_the_result(method: fc.Method, digits: Clients, tmp_path: Path) -> None:
    result = do(digits, tmp_path, method, personal=fc.PersonalConfig("finetune", 1))
    loaded = fc.load(tmp_path)
    assert loaded.summary == result.summary
    assert loaded.history == result.history
    assert loaded.clients == result.clients
    assert torch.equal(loaded.clusters, result.clusters)
    assert loaded.clusters.dtype == torch.int64
    for client in range(20):
        params, theirs = result.model_of(client), loaded.model_of(client)
        assert type(params) is type(theirs)
        assert not theirs.training
        assert torch.equal(params(digits.x_test), theirs(digits.x_test))


@METHODS
def test_a_module_of_the_user_is_loaded_into_a_module_of_the_same_form(
    method: fc.Method, digits: Clients, tmp_path: Path
) -> None:
    result = do(digits, tmp_path, method, model=Net())
    fresh = Net()
    loaded = fc.load(tmp_path, model=fresh)
    for client in (0, 7, 19):
        assert isinstance(loaded.model_of(client), Net)
        assert torch.equal(
            loaded.model_of(client)(digits.x_test), result.model_of(client)(digits.x_test)
        )
    assert not torch.equal(
        fresh(digits.x_test), result.model_of(0)(digits.x_test)
    )  # the module given is not written to
    with pytest.raises(fc.InvalidInputError) as caught:
        fc.load(tmp_path)
    assert all(name in str(caught.value) for name in ("'Net'", "load(…, model=…)"))


def test_a_model_that_reads_tensor_values_when_it_is_built_is_loaded(
    digits: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Graded:
        name: ClassVar[str] = "graded"

        def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
            widths = [int(width.item()) for width in torch.linspace(8, classes, 2)]
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, widths[0]), nn.ReLU(), nn.Linear(widths[0], widths[1])
            )

    monkeypatch.setitem(REGISTRY["model"], "graded", Graded)
    result = fc.run(fc.FedAvg(), digits, Graded(), rounds=1, out=tmp_path / "run")
    loaded, trained = (
        fc.load(tmp_path / "run").model_of(0).state_dict(),
        result.model_of(0).state_dict(),
    )
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())


def test_a_module_of_another_form_is_refused_when_it_is_loaded_into(
    digits: Clients, tmp_path: Path
) -> None:
    do(digits, tmp_path, model=Net())
    with pytest.raises(fc.InvalidInputError, match="model"):
        fc.load(tmp_path, model=Unlike()).model_of(0)


def test_a_module_of_another_size_is_refused_when_it_is_loaded_into(
    digits: Clients, tmp_path: Path
) -> None:
    do(digits, tmp_path, model=Net(8))
    with pytest.raises(fc.InvalidInputError, match=r"first\."):
        fc.load(tmp_path, model=Net(16)).model_of(0)


def test_a_module_with_frozen_layers_predicts_the_same_when_it_is_loaded(
    digits: Clients, tmp_path: Path
) -> None:
    result = do(digits, tmp_path, model=Net(frozen=True))
    assert torch.equal(
        fc.load(tmp_path, model=Net(frozen=True)).model_of(0)(digits.x_test),
        result.model_of(0)(digits.x_test),
    )


@METHODS
def test_two_runs_of_one_seed_give_the_same_bytes_whatever_the_chunk_and_another_seed_gives_others(
    method: fc.Method, digits: Clients, tmp_path: Path
) -> None:
    do(digits, tmp_path / "one", method)
    do(digits, tmp_path / "two", method)
    do(digits, tmp_path / "chunk", method, chunk=1)
    do(digits, tmp_path / "seed", method, seed=1)
    assert models(tmp_path / "one") == models(tmp_path / "two") == models(tmp_path / "chunk")
    assert models(tmp_path / "one") != models(tmp_path / "seed")
    assert (tmp_path / "one" / "experiment.toml").read_bytes() == (
        tmp_path / "two" / "experiment.toml"
    ).read_bytes()
    assert (tmp_path / "one" / "clients.csv").read_bytes() == (
        tmp_path / "two" / "clients.csv"
    ).read_bytes()


SCHEMES = [
    fc.data.Iid(),
    fc.data.Dirichlet(0.3),
    fc.data.Pathological(3),
    fc.data.LabelClusters(clusters=3, classes=2, samples=20),
    fc.data.PowerLawClusters(clusters=2, classes=5),
    fc.data.LabelSwap(clusters=2),
    fc.data.LabelPermutation(clusters=2),
    fc.data.Rotation(clusters=2),
    fc.data.QuantitySkew(0.5),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_the_experiment_that_was_written_runs_again_to_the_same_bytes(
    scheme: Any, tmp_path: Path
) -> None:
    clients = fc.data.partition(fc.data.load("digits"), scheme, clients=8, seed=5, probe=17)
    do(
        clients,
        tmp_path / "first",
        momentum=0.5,
        clients_per_round=3,
        seed=6,
        chunk=3,
        personal=fc.PersonalConfig("finetune", 1),
    )
    again = experiment_file.experiment(experiment_file.read(tmp_path / "first" / "experiment.toml"))
    again.to_run(again.clients(), "auto").run(tmp_path / "second")
    for name in ("experiment.toml", "clients.csv", "models/models.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (
            tmp_path / "second" / name
        ).read_bytes(), name


def test_the_experiment_that_was_written_has_every_default_but_the_methods_own(
    digits: Clients, tmp_path: Path
) -> None:
    do(digits, tmp_path)
    tables = tomllib.loads((tmp_path / "experiment.toml").read_text())
    assert tables == {
        "data": {"name": "digits"},
        "partition": {
            "name": "label_clusters",
            "clients": 20,
            "clusters": 5,
            "classes": 2,
            "overlap": 0,
            "shuffle": True,
            "reuse": False,
            "seed": 0,
            "probe": 143,
        },
        "model": {"name": "mlp", "hidden": [8, 6], "dropout": 0.0},
        "local": {
            "lr": 0.2,
            "batch_size": 10,
            "epochs": 1,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "optimizer": "sgd",
            "clip_norm": 0.0,
            "schedule": "constant",
            "decay": 1.0,
            "decay_every": 1,
            "warmup_rounds": 0,
            "loss": "cross_entropy",
            "label_smoothing": 0.0,
            "class_weight": "none",
            "batch_norm": "average",
            "steps": 0,
        },
        "method": {"name": "fedavg"},
        "run": {
            "rounds": 3,
            "clients_per_round": 0.3,
            "seed": 0,
            "eval_every": 2,
            "eval_clients": 1.0,
            "checkpoint_every": 10,
            "max_rejections": 3,
            "patience": 0,
            "select": "last",
            "metrics": [],
        },
        "personal": {"epochs": 5, "every": 0},
        "server": {"aggregator": "mean"},
        "engine": {"precision": "tf32"},
    }


def test_a_checkpoint_is_safetensors_with_state_memory_and_history(
    digits: Clients, tmp_path: Path
) -> None:
    result = do(digits, tmp_path, fc.Local(), clients_per_round=4)
    with safe_open(tmp_path / "checkpoint" / "round-000003.safetensors", framework="pt") as file:
        names = set(file.keys())
        about = json.loads(json.loads(file.metadata()["fedclade"])["about"])
        ids = file.get_tensor("memory/ids").tolist()
    assert {
        "state/cluster_ids",
        "state/models/fc1.weight",
        "memory/ids",
        "memory/rows/fc1.weight",
    } <= names
    assert about["round"] == 3
    assert about["history"] == result.history
    assert 4 <= len(ids) <= 12
    assert len(set(ids)) == len(ids)


def test_loading_a_folder_without_a_finished_run_is_an_error_about_it(
    digits: Clients, tmp_path: Path
) -> None:
    def stop(row: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == "folder"):
        fc.load(tmp_path / "nowhere")
    with pytest.raises(KeyboardInterrupt):
        do(digits, tmp_path / "half", on_round=stop)
    for folder in (tmp_path, tmp_path / "half"):
        with pytest.raises(fc.InvalidInputError, match="--resume") as caught:
            fc.load(folder)
        assert caught.value.field == str(folder)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "name",
    ["models/models.safetensors", "summary.json", "rounds.jsonl", "clients.csv", "experiment.toml"],
)
def test_a_damaged_file_of_a_run_is_named_when_it_is_loaded(
    name: str, digits: Clients, tmp_path: Path
) -> None:
    do(digits, tmp_path)
    _cut(tmp_path / name)
    with pytest.raises(fc.InvalidInputError) as caught:
        fc.load(tmp_path)
    assert caught.value.field == str(tmp_path / name)


def test_the_error_of_a_run_of_version_0_1_names_its_old_column_first(
    digits: Clients, tmp_path: Path
) -> None:
    do(digits, tmp_path)
    path = tmp_path / "clients.csv"
    path.write_text(path.read_text().replace("true_group", "group", 1))
    with pytest.raises(fc.InvalidInputError, match=r"'group'.*'true_group'") as caught:
        fc.load(tmp_path)
    assert caught.value.field == str(path)
    assert "damaged" not in str(caught.value)


def test_a_table_of_clients_that_ends_with_a_whole_line_is_damaged_too(
    digits: Clients, tmp_path: Path
) -> None:
    do(digits, tmp_path)
    lines = (tmp_path / "clients.csv").read_text().splitlines(keepends=True)
    (tmp_path / "clients.csv").write_text("".join(lines[:8]))
    with pytest.raises(fc.InvalidInputError, match=r"7 clients.*20") as caught:
        fc.load(tmp_path)
    assert caught.value.field == str(tmp_path / "clients.csv")


@pytest.mark.parametrize("client", [-1, 20, 1000])
def test_a_client_that_is_not_there_is_refused(
    client: int, digits: Clients, tmp_path: Path
) -> None:
    result = do(digits, tmp_path)
    for run in (result, fc.load(tmp_path)):
        with pytest.raises(fc.InvalidInputError, match=f"= {client}: .* 0 to 19") as caught:
            run.model_of(client)
        assert caught.value.field == "client"


def test_a_client_may_be_given_as_a_tensor_such_as_comes_from_clusters(
    digits: Clients, tmp_path: Path
) -> None:
    result = do(digits, tmp_path)
    for client in torch.nonzero(result.clusters == 0).flatten()[:2]:
        assert isinstance(result.model_of(client), nn.Module)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda folder: folder.write_text("x"), "file"),
        (
            lambda folder: [folder.mkdir(), (folder / "summary.json").write_text("{}")],
            "--resume",
        ),
        (
            lambda folder: [folder.mkdir(), (folder / "experiment.toml").write_text("")],
            "--resume",
        ),
        (lambda folder: [folder.mkdir(), (folder / "checkpoint").mkdir()], "--resume"),
    ],
    ids=["file", "summary", "experiment", "checkpoint"],
)
def test_a_folder_that_cannot_be_used_is_an_error_about_out(
    make: Callable[[Path], object], advice: str, tmp_path: Path
) -> None:
    make(tmp_path / "out")
    with pytest.raises(fc.InvalidInputError, match=advice) as caught:
        RunDirectory.open(tmp_path / "out", resume=False)
    assert caught.value.field == "out"
    assert f"'{tmp_path / 'out'}'" in str(caught.value)


def test_other_files_in_the_folder_stay(digits: Clients, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    do(digits, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
