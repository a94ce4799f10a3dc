"""Losses by name, label smoothing and class weights in whole runs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedclade as fc
from fedclade.conformance.in_process_federation import InProcessFederation
from fedclade.core import LocalTraining
from fedclade.core.batching import Batches
from fedclade.core.federation import ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.program_serialization import NodeContext
from fedclade.core.pytree import stack
from fedclade.data import Clients, from_arrays
from fedclade.engines.device_dataset import BatchReader
from fedclade.errors import InvalidInputError
from fedclade.training import experiment_file

X = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0))
LINEAR = X @ torch.tensor([[1.0, -1.0], [0.5, 0.0], [0.0, 1.0], [0.0, 0.0]])
SETTINGS: dict[str, Any] = {"rounds": 8, "clients_per_round": 1.0, "lr": 0.1, "device": "cpu"}


def clients_of(y: Tensor) -> Clients:
    return from_arrays([(X[i], y[i], X[i], y[i]) for i in range(3)])


@pytest.mark.parametrize("name", ["mse", "mae", "huber"])
@pytest.mark.parametrize("y", [LINEAR[..., 0], LINEAR[..., :1], LINEAR], ids=["(n,)", "(n,1)", "2"])
def test_a_model_by_name_learns_numbers(name: Any, y: Tensor, tmp_path: Path) -> None:
    clients = clients_of(y)
    before, after = (
        fc.run(
            fc.FedAvg(),
            clients,
            fc.models.MLP(8),
            loss=name,
            **(SETTINGS | {"rounds": rounds}),
            out=tmp_path / str(rounds),
        )
        for rounds in (1, 20)
    )
    assert after.summary["loss"] < before.summary["loss"] * 0.7  # type: ignore[operator]
    assert after.summary["accuracy"] is None
    outputs = y[0, 0].numel()
    assert after.model_of(0)(X[0]).shape == (20, outputs)
    loaded = fc.load(after.folder)  # type: ignore[arg-type]
    assert torch.equal(loaded.model_of(0)(X[0]), after.model_of(0)(X[0]))


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("labels", [1, 2])
def test_bce_learns_several_labels(integers: bool, labels: int) -> None:
    y = (LINEAR > 0).long() if integers else (LINEAR > 0).float()
    y = y[..., 0] if labels == 1 else y
    result = fc.run(
        fc.FedAvg(),
        clients_of(y),
        fc.models.MLP(8),
        loss="bce",
        **(SETTINGS | {"rounds": 30, "lr": 0.5}),
    )
    assert result.model_of(0)(X[0]).shape == (20, labels)
    predicted = (result.model_of(0)(X.flatten(0, 1)) > 0).reshape(y.shape)
    right = (predicted == (y > 0.5)).float().mean()
    assert result.summary["accuracy"] == pytest.approx(100 * float(right))
    assert float(right) > 0.9


def test_an_experiment_file_runs_with_a_loss_by_name(tmp_path: Path) -> None:
    x, y = X.reshape(60, 4).numpy(), LINEAR.reshape(60, 2).numpy()
    np.savez(tmp_path / "numbers.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    tables = {
        "data": {"name": str(tmp_path / "numbers.npz")},
        "partition": {"name": "iid", "clients": 3},
        "model": {"name": "mlp", "hidden": 8},
        "local": {"loss": "huber"},
        "method": {"name": "fedavg"},
        "run": {"rounds": 2},
    }
    experiment = experiment_file.experiment(tables)
    result = experiment.to_run(experiment.clients(), "cpu").run(tmp_path / "run")
    assert result.model_of(0)(X[0]).shape == (20, 2)
    again = experiment_file.experiment(experiment_file.read(tmp_path / "run" / "experiment.toml"))
    assert again.local.loss == "huber"


@pytest.mark.parametrize("loss", ["bce", "mse", "mae", "huber"])
@pytest.mark.parametrize("integers", [False, True])
def test_clients_select_the_model_with_the_lowest_loss(loss: Any, integers: bool) -> None:
    """Clients follow one of two laws, so IFCA with two models separates them."""
    x = X.repeat(2, 1, 1)
    y = (x[..., 0] * torch.tensor([1.0, -1.0]).repeat(3)[:, None] > 0).float()
    y = y.long() if integers else y
    clients = from_arrays([(x[i], y[i], x[i], y[i]) for i in range(6)])
    settings = SETTINGS | {"rounds": 30, "lr": 0.3}
    method = fc.IFCA(clusters=2, num_restarts=4, trial_rounds=3)
    result = fc.run(method, clients, fc.models.MLP(8), loss=loss, **settings)
    assert result.clusters.tolist() in ([0, 1] * 3, [1, 0] * 3)


def test_a_name_and_the_function_give_the_same_run() -> None:
    clients = clients_of(LINEAR)
    model = nn.Linear(4, 2)
    by_name = fc.run(fc.FedAvg(), clients, model, loss="mse", **SETTINGS)
    by_module = fc.run(fc.FedAvg(), clients, model, loss=nn.MSELoss(), **SETTINGS)
    assert torch.equal(by_name.model_of(0).weight, by_module.model_of(0).weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("y", "model", "settings", "field"),
    [
        (LINEAR[..., 0], nn.Linear(4, 3), {"loss": "mse"}, "loss"),
        (LINEAR, nn.Linear(4, 1), {"loss": "mae"}, "loss"),
        (LINEAR[..., 0], nn.Linear(4, 1), {}, "loss"),
        (LINEAR[..., 0], fc.models.MLP(4), {}, "model"),
        ((X[..., 0] > 0).long() * 2, nn.Linear(4, 1), {"loss": "bce"}, "local.loss"),
        (LINEAR, nn.Linear(4, 2), {"loss": "bce"}, "local.loss"),
        ((LINEAR > 0).float(), nn.Linear(4, 3), {"loss": "bce"}, "loss"),
        (LINEAR[..., 0], nn.Linear(4, 1), {"loss": "squares"}, "local.loss"),
        (
            LINEAR,
            nn.Linear(4, 2),
            {"loss": "mse", "label_smoothing": 0.1},
            "local.label_smoothing",
        ),
        (
            (X[..., 0] > 0).long(),
            nn.Linear(4, 2),
            {"loss": nn.CrossEntropyLoss(), "label_smoothing": 0.1},
            "local.label_smoothing",
        ),
        (
            LINEAR,
            nn.Linear(4, 2),
            {"loss": "mse", "class_weight": "balanced"},
            "local.class_weight",
        ),
        (
            (LINEAR > 0).long(),
            nn.Linear(4, 2),
            {"loss": "bce", "class_weight": "balanced"},
            "local.class_weight",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    y: Tensor, model: Any, settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        fc.run(fc.FedAvg(), clients_of(y), model, **SETTINGS, **settings)


def test_label_smoothing_trains_as_torch() -> None:
    y = (X[..., 0] > 0).long() + (X[..., 1] > 0)
    clients, model = clients_of(y), nn.Linear(4, 3)
    settings = SETTINGS | {"rounds": 1, "batch_size": 20}
    result = fc.run(fc.Local(), clients, model, label_smoothing=0.3, **settings)
    F.cross_entropy(model(X[1]), y[1], label_smoothing=0.3).backward()
    expected = model.weight - 0.1 * model.weight.grad  # type: ignore[operator]
    torch.testing.assert_close(result.model_of(1).weight, expected)  # type: ignore[arg-type]
    with torch.no_grad():
        reported = F.cross_entropy(result.model_of(1)(X[1]), y[1], label_smoothing=0.3)
    assert result.clients["loss"][1] == pytest.approx(float(reported))


UNBALANCED = torch.tensor([0, 0, 0, 1, 2, 2])


def test_balanced_weights_are_those_worked_by_hand() -> None:
    """Three examples of class 0 and one of class 2: 4 / (2 · 3) and 4 / (2 · 1)."""
    clients = from_arrays(
        [(torch.eye(4), np.array([0, 2, 0, 0])), (torch.eye(4)[:1], np.array([1]))]
    )
    fed = fc.Simulator(clients)
    batches = Batches(4, shuffle=False, class_weight="balanced")
    everyone = torch.arange(2)
    steps = BatchReader(fed._train, batches, everyone, everyone, 0).steps()
    torch.testing.assert_close(
        steps.weight[0], torch.tensor([[2 / 3, 2.0, 2 / 3, 2 / 3], [1.0, 0.0, 0.0, 0.0]])
    )
    torch.testing.assert_close(
        steps.share[0], torch.tensor([[1 / 6, 1 / 2, 1 / 6, 1 / 6], [1.0, 0.0, 0.0, 0.0]])
    )


class Norm(nn.Module):
    """A model with BatchNorm, for which the weight of an example must not count."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        if self.branch and h.isnan().any():
            h = -h
        return self.last(h)


@pytest.mark.parametrize("model", ["mlp", "norm", "one by one"])
@pytest.mark.filterwarnings("ignore::fedclade.FedcladeWarning")
def test_class_weights_train_as_torch(model: str) -> None:
    torch.manual_seed(0)
    module: nn.Module = (
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        if model == "mlp"
        else Norm(model == "one by one")
    )
    x, few = X[0, :6], X[1, :3]
    clients = from_arrays([(x, UNBALANCED), (few, torch.tensor([1, 1, 0]))])
    settings = SETTINGS | {"rounds": 1, "batch_size": 6}
    result = fc.run(fc.Local(), clients, module, class_weight="balanced", **settings)
    for client, samples, y, weight in (
        (0, x, UNBALANCED, torch.tensor([6 / 9, 2.0, 1.0])),
        (1, few, torch.tensor([1, 1, 0]), torch.tensor([1.5, 0.75, 1.0])),
    ):
        alone = copy.deepcopy(module).train()
        nn.CrossEntropyLoss(weight=weight)(alone(samples), y).backward()
        trained = dict(result.model_of(client).named_parameters())
        for name, value in alone.named_parameters():
            expected = value - 0.1 * value.grad  # type: ignore[operator]
            torch.testing.assert_close(trained[name], expected, atol=1e-5, rtol=1e-4)
        for name, value in alone.named_buffers():
            got = dict(result.model_of(client).named_buffers())[name]
            torch.testing.assert_close(got, value, atol=1e-5, rtol=1e-4)
        plain = F.cross_entropy(result.model_of(client)(samples), y)
        assert result.clients["train_loss"][client] == pytest.approx(
            float(plain.detach()), rel=1e-5
        )


@pytest.mark.parametrize("method", [fc.PerFedAvg(), fc.SCAFFOLD(), fc.FedNova(), fc.Clade()])
def test_class_weights_change_training_and_not_the_number_of_examples(method: fc.Method) -> None:
    y = torch.stack([UNBALANCED.repeat(4)[:20]] * 3)
    clients = clients_of(y)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    plain, weighted = (
        fc.run(method, clients, model, class_weight=kind, **SETTINGS)
        for kind in ("none", "balanced")
    )
    assert not torch.equal(plain.model_of(0).weight, weighted.model_of(0).weight)  # type: ignore[arg-type]
    equal = clients_of(torch.stack([torch.arange(20) % 2] * 3))
    plain, weighted = (
        fc.run(method, equal, model, class_weight=kind, **SETTINGS) for kind in ("none", "balanced")
    )
    torch.testing.assert_close(plain.model_of(0).weight, weighted.model_of(0).weight)


def test_class_weights_are_the_same_on_remote_nodes() -> None:
    y = torch.stack([UNBALANCED.repeat(4)[:20]] * 3)
    clients = clients_of(y)
    torch.manual_seed(0)
    objective = Objective(nn.Linear(4, 3))
    local = LocalTraining(objective, batch_size=4, class_weight="balanced")
    everyone = torch.arange(3)
    models = ModelAssignment.all_same(stack([objective.params()]), 3)
    here = fc.Simulator(clients).map(sgd(local), everyone, per_client=models, key=1)
    remote = InProcessFederation(clients, NodeContext(objective))
    there = remote.map(sgd(local), everyone, per_client=models, key=1)
    plain = remote.map(sgd(replace(local, class_weight="none")), everyone, per_client=models, key=1)
    torch.testing.assert_close(here.outputs["weight"], there.outputs["weight"])
    assert not torch.equal(plain.outputs["weight"], there.outputs["weight"])
