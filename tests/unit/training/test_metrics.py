"""The numbers of a summary, against those computed by hand and from the models of a run."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedclade as fc
from fedclade.data import Clients
from fedclade.training.metrics import accuracy_summary, adjusted_rand, mean_over_clients


def test_mean_error_variance_and_worst_tenth_of_three_clients_by_hand() -> None:
    # 50, 70 and 90 percent: mean 70, variance (400 + 0 + 400) / 3, the worst tenth of three is one
    # client.
    got = accuracy_summary(torch.tensor([90.0, 50.0, 70.0], dtype=torch.float64), test_samples=84)
    assert got["accuracy"] == pytest.approx(70)
    assert (
        got["accuracy_stderr"] == pytest.approx(100 * math.sqrt(0.7 * 0.3 / 84)) == pytest.approx(5)
    )
    assert got["accuracy_variance"] == pytest.approx(800 / 3)
    assert got["accuracy_worst10"] == pytest.approx(50)


@pytest.mark.parametrize(
    ("clients", "worst"), [(1, 0.0), (9, 0.0), (10, 0.0), (11, 0.5), (20, 0.5), (40, 1.5)]
)
def test_the_worst_tenth_is_rounded_up_to_whole_clients(clients: int, worst: float) -> None:
    assert (
        accuracy_summary(torch.arange(clients, dtype=torch.float64), 10)["accuracy_worst10"]
        == worst
    )


@pytest.mark.parametrize("value", [0.0, 100.0])
def test_all_correct_or_all_wrong_has_no_standard_error(value: float) -> None:
    got = accuracy_summary(torch.full((4,), value, dtype=torch.float64), 10)
    assert got == {
        "accuracy": value,
        "accuracy_stderr": 0.0,
        "accuracy_variance": 0.0,
        "accuracy_worst10": value,
    }


def test_clients_without_a_value_are_not_in_the_mean() -> None:
    some, none = torch.tensor([math.nan, 40.0, math.nan, 60.0]), torch.full((2,), math.nan)
    assert mean_over_clients(some) == 50
    assert accuracy_summary(some, 5)["accuracy"] == 50
    assert mean_over_clients(none) is None
    assert set(accuracy_summary(none, 0).values()) == {None}


def test_agreement_with_the_true_groups() -> None:
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    assert adjusted_rand(groups, torch.tensor([5, 5, 0, 0, 3, 3])) == 1
    assert adjusted_rand(groups, torch.zeros(6, dtype=torch.int64)) == 0
    # By hand: pairs together in both 1; sums of pairs 3 and 2 of 15; expected 3 * 2 / 15, largest
    # (3 + 2) / 2.
    assert adjusted_rand(groups, torch.tensor([0, 0, 1, 2, 1, 3])) == pytest.approx(
        (1 - 6 / 15) / (2.5 - 6 / 15)
    )
    assert adjusted_rand(None, groups) is None
    # Clients without a model (-1) are no group: of the clients 0, 2, 3 and 4 the groups are
    # a | b b | c and the clusters 0 0 | 1 1. No pair is together in both; sums of pairs 1 and 2
    # of 6.
    assert adjusted_rand(groups, torch.tensor([0, -1, 0, 1, 1, -1])) == pytest.approx(
        (0 - 2 / 6) / (1.5 - 2 / 6)
    )
    assert adjusted_rand(groups, torch.tensor([0, 0, -1, -1, -1, -1])) == 1
    assert adjusted_rand(groups, torch.full((6,), -1)) is None


def test_a_test_sample_of_several_clients_counts_once() -> None:
    data = fc.data.load("digits")
    everything = len(data.y_test)
    broadcast = fc.data.partition(
        data, fc.data.LabelClusters(clusters=5, classes=2), clients=20, seed=0
    )
    assert broadcast.metadata.test_samples == everything
    turned = fc.data.partition(data, fc.data.Rotation(clusters=4), clients=20, seed=0)
    assert sum(len(part) for part in turned.test) == 4 * everything
    assert turned.metadata.test_samples == everything
    own = fc.data.from_arrays(
        [
            (torch.ones(3, 2), torch.zeros(3).long(), torch.ones(n, 2), torch.zeros(n).long())
            for n in (2, 5)
        ]
    )
    assert own.metadata.test_samples == 7
    # A part without a client does not count.
    assert replace(own, test_part_id=torch.tensor([1, -1])).metadata.test_samples == 5
    assert (
        fc.data.from_arrays([(torch.ones(3, 2), torch.zeros(3).long())]).metadata.test_samples == 0
    )


def train_part(clients: Clients, client: int) -> tuple[Tensor, Tensor]:
    rows = clients.train[client]
    return clients.x[rows], clients.y[rows]


def test_part(clients: Clients, client: int) -> tuple[Tensor, Tensor]:
    rows = clients.test[int(clients.test_part_id[client])]
    return clients.x_test[rows], clients.y_test[rows]


test_part.__test__ = False  # type: ignore[attr-defined]


@torch.no_grad()
def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    outputs = model(x.float() / 255 if x.dtype == torch.uint8 else x)
    return 100 * float((outputs.argmax(1) == y).double().mean()), float(
        nn.functional.cross_entropy(outputs, y)
    )


def by_hand_on_all(result: fc.Result, clients: Clients) -> dict[str, Tensor]:
    rows = []
    for client in range(len(clients)):
        model = result.model_of(client)
        rows.append(
            [
                *by_hand(model, *test_part(clients, client)),
                *by_hand(model, *train_part(clients, client)),
            ]
        )
    columns = torch.tensor(rows, dtype=torch.float64).T
    return dict(zip(("accuracy", "loss", "train_accuracy", "train_loss"), columns, strict=True))


SCHEMES = [
    fc.data.LabelClusters(clusters=5, classes=2),
    fc.data.Rotation(clusters=2),
    fc.data.Dirichlet(0.3),
]


@pytest.mark.parametrize("method", [fc.FedAvg(), fc.Local()], ids=lambda method: method.name)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_every_number_equals_the_one_computed_from_the_loaded_models(
    method: fc.Method, scheme: Any, tmp_path: Path
) -> None:
    clients = fc.data.partition(fc.data.load("digits"), scheme, clients=12, seed=1)
    fc.run(
        method,
        clients,
        fc.models.MLP(12),
        rounds=3,
        clients_per_round=0.5,
        lr=0.2,
        out=tmp_path / "run",
    )
    expected = by_hand_on_all(fc.load(tmp_path / "run"), clients)

    with (tmp_path / "run" / "clients.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["client"] for line in lines] == [str(client) for client in range(12)]
    assert [int(line["examples"]) for line in lines] == clients.sizes.tolist()
    for name, values in expected.items():
        assert [float(line[name]) for line in lines] == pytest.approx(values.tolist(), abs=1e-5), (
            name
        )

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for name, values in expected.items():
        assert summary[name] == pytest.approx(float(values.mean()), abs=1e-5), name
    p, used = float(expected["accuracy"].mean()) / 100, {int(part) for part in clients.test_part_id}
    distinct = len(
        {int(clients.test_sample_id[row]) for part in used for row in clients.test[part]}
    )
    assert summary["accuracy_stderr"] == pytest.approx(100 * math.sqrt(p * (1 - p) / distinct))
    assert summary["accuracy_variance"] == pytest.approx(
        float(expected["accuracy"].var(correction=0))
    )
    assert summary["accuracy_worst10"] == pytest.approx(
        float(expected["accuracy"].sort().values[:2].mean())
    )  # a tenth of 12, rounded up
    assert (summary["ari"] is None) == (clients.groups is None)


def test_images_of_bytes_are_divided_by_255_in_training_and_evaluation() -> None:
    data = fc.data.load("digits")
    in_bytes = fc.data.dataset(
        (data.x_train * 255).byte(), data.y_train, (data.x_test * 255).byte(), data.y_test
    )
    clients = fc.data.partition(in_bytes, fc.data.Iid(), clients=6, seed=0)
    result = fc.run(
        fc.FedAvg(), clients, fc.models.MLP(12), rounds=3, clients_per_round=1.0, lr=0.2
    )
    for name, values in by_hand_on_all(result, clients).items():
        assert result.clients[name] == pytest.approx(values.tolist(), abs=1e-5)
    assert result.summary["accuracy"] > 30


def parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(("share", "cohort"), [(0.25, 5), (7, 7), (1.0, 20)])
def test_bytes_are_cohort_times_parameters_times_four_for_fedavg(
    digits: Clients, share: int | float, cohort: int
) -> None:
    result = fc.run(
        fc.FedAvg(),
        digits,
        fc.models.MLP(8),
        rounds=3,
        clients_per_round=share,
        eval_every=1,
        personal=fc.PersonalConfig("finetune", 1, every=1),
    )
    size = 4 * (64 * 8 + 8 + 8 * 10 + 10)
    assert size == 4 * parameters(result.model_of(0))
    assert (
        [row["bytes_up"] for row in result.history]
        == [row["bytes_down"] for row in result.history]
        == 3 * [cohort * size]
    )
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == 3 * cohort * size
    assert [row["clients"] for row in result.history] == 3 * [cohort]


def test_local_training_sends_no_bytes(digits: Clients) -> None:
    result = fc.run(
        fc.Local(), digits, fc.models.MLP(8), rounds=2, clients_per_round=1.0, eval_every=1
    )
    assert (result.summary["bytes_up"], result.summary["bytes_down"]) == (0, 0)
    assert {row["bytes_up"] + row["bytes_down"] for row in result.history} == {0}


def test_frozen_weights_are_not_sent(digits: Clients) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    model[1].requires_grad_(False)
    result = fc.run(fc.FedAvg(), digits, model, rounds=1, clients_per_round=5)
    assert result.summary["bytes_up"] == 5 * 4 * (8 * 10 + 10)
    assert torch.equal(result.model_of(0)[1].weight, model[1].weight)  # type: ignore[index]


def test_clusters_and_agreement_of_one_model_for_all_and_of_one_each(digits: Clients) -> None:
    broadcast = fc.run(fc.FedAvg(), digits, fc.models.MLP(8), rounds=1)
    alone = fc.run(fc.Local(), digits, fc.models.MLP(8), rounds=1)
    assert (broadcast.summary["clusters"], broadcast.summary["ari"]) == (1, 0.0)
    assert (alone.summary["clusters"], alone.summary["ari"]) == (20, 0.0)
    assert broadcast.clusters.tolist() == [0] * 20
    assert alone.clusters.tolist() == list(range(20))


def test_the_rand_index_is_none_without_true_groups_and_one_if_they_are_found() -> None:
    data = fc.data.load("digits")
    unknown = fc.data.partition(data, fc.data.Dirichlet(0.5), clients=6, seed=0)
    assert fc.run(fc.FedAvg(), unknown, fc.models.MLP(8), rounds=1).summary["ari"] is None
    pairs = [(data.x_train[rows], data.y_train[rows]) for rows in torch.arange(60).view(6, 10)]
    planted = fc.data.from_arrays(pairs, groups=[2, 2, 2, 2, 2, 2])
    assert fc.run(fc.FedAvg(), planted, fc.models.MLP(8), rounds=1).summary["ari"] == 1
