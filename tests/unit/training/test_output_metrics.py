"""Metrics over all outputs of a client, compared with scikit-learn client by client."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import Tensor, nn

import fedclade as fc
from fedclade.conformance.in_process_federation import COMPATIBILITY_INFO, InProcessTransport
from fedclade.core.functional_model import Objective
from fedclade.core.inputs import as_inputs
from fedclade.core.program_serialization import NodeContext
from fedclade.data import Clients
from fedclade.engines.remote.evaluation import evaluation_part
from fedclade.engines.remote.federation import RemoteFederation
from fedclade.engines.remote.node import Node
from fedclade.errors import InvalidInputError
from fedclade.training.config import EngineConfig, MetricName
from fedclade.training.output_metrics import by_name
from fedclade.training.runner import TrainingRun
from fedclade.training.setup import measured, module_for

try:
    from torchmetrics.classification import MulticlassAccuracy
except Exception as error:  # it also fails if torchvision is there and does not fit torch
    pytest.skip(f"torchmetrics cannot be imported ({error})", allow_module_level=True)

SPLITS = ("", "train_", "validation_")


@pytest.fixture(scope="module")
def clients() -> Clients:
    """Five clients of different sizes. One has more examples than a block of an evaluation."""
    scheme = fc.data.Dirichlet(alpha=0.3)
    clients = fc.data.partition(fc.data.load("digits"), scheme, 5, seed=0).with_validation(0.2)
    assert int(clients.sizes.max()) > 256
    return clients


def parts(clients: Clients, client: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The examples of a client by split."""
    assert clients.validation is not None
    held, own = clients.validation[client], clients.test[int(clients.test_part_id[client])]
    train = clients.train[client]
    return {
        "": (clients.x_test[own], clients.y_test[own]),
        "train_": (clients.x[train], clients.y[train]),
        "validation_": (clients.x[held], clients.y[held]),
    }


def one_vs_rest_auroc(y: Any, scores: Any) -> float:
    """The mean over the classes that have both positive and negative examples."""
    values = [
        sklearn_metrics.roc_auc_score(y == label, scores[:, label])
        for label in range(scores.shape[1])
        if 0 < (y == label).sum() < len(y)
    ]
    return float(np.mean(values)) if values else math.nan


def calibration_error(y: Any, scores: Any) -> float:
    """Over 15 bins of the confidence: |accuracy - confidence|, weighted by examples."""
    confidence, right = scores.max(1), scores.argmax(1) == y
    places = np.clip(np.ceil(confidence * 15) - 1, 0, 14)
    error = 0.0
    for place in range(15):
        own = places == place
        if own.any():
            error += own.mean() * abs(right[own].mean() - confidence[own].mean())
    return error


def test_metrics_of_classes_are_those_of_scikit_learn(clients: Clients) -> None:
    result = fc.run(
        fc.Local(),
        clients,
        fc.models.MLP(8),
        rounds=3,
        clients_per_round=1.0,
        eval_every=1,
        metrics=["auroc", "f1", "ece"],
    )
    for client in range(len(clients)):
        model = result.model_of(client)
        for split, (x, y) in parts(clients, client).items():
            scores, labels = model(as_inputs(x)).detach().softmax(1).numpy(), y.numpy()
            expected = {
                "auroc": one_vs_rest_auroc(labels, scores),
                "f1": sklearn_metrics.f1_score(labels, scores.argmax(1), average="macro"),
                "ece": calibration_error(labels, scores),
            }
            for name, value in expected.items():
                got = result.clients[f"{split}{name}"][client]
                assert (math.nan if got is None else got) == pytest.approx(
                    value, abs=1e-5, nan_ok=True
                ), (client, split, name)
    for name in ("auroc", "f1", "ece"):
        for split in SPLITS:
            known = [value for value in result.clients[f"{split}{name}"] if value is not None]
            got: Any = result.summary
            assert got[f"{split}{name}"] == pytest.approx(sum(known) / len(known))
            last: Any = result.history[-1]
            assert last[f"{split}{name}"] == got[f"{split}{name}"]


def test_a_client_without_a_value_is_left_out_of_the_mean_and_counted() -> None:
    generator = torch.Generator().manual_seed(0)

    def client(labels: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = torch.tensor(labels)
        x = torch.randn(len(labels), 4, generator=generator)
        return x, y, x, y

    one_class = client([1] * 6)
    both = [client([0, 1] * 5), client([0, 0, 1] * 4)]
    untested = client([0, 1])[:2]
    clients = fc.data.from_arrays([one_class, *both, untested])
    result = fc.run(
        fc.FedAvg(), clients, nn.Linear(4, 2), rounds=1, clients_per_round=1.0, metrics=["auroc"]
    )
    summary: Any = result.summary
    values = result.clients["auroc"]
    assert (values[0], values[3]) == (None, None)
    assert summary["auroc"] == pytest.approx((values[1] + values[2]) / 2)
    assert summary["clients_without_auroc"] == 1
    assert summary["clients_without_test"] == 1


def value_of(
    name: MetricName,
    outputs: Tensor,
    y: Tensor,
    classes: int | None = None,
    loss: nn.Module | None = None,
) -> float:
    objective = Objective(nn.Linear(1, 1), loss)
    metric = by_name([name], objective, classes, outputs[:2], y[:2])[name]
    return metric.function(outputs, y)


def test_one_output_for_two_classes() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 1, generator=generator)
    y = (torch.rand(50, generator=generator) < logits[:, 0].sigmoid()).float()
    scores, labels = logits[:, 0].sigmoid().numpy(), y.int().numpy()
    for outputs in (logits, logits[:, 0]):
        assert value_of("auroc", outputs, y) == pytest.approx(
            sklearn_metrics.roc_auc_score(labels, scores)
        )
        assert value_of("f1", outputs, y) == pytest.approx(
            sklearn_metrics.f1_score(labels, scores > 0.5)
        )
    # Of nn.BCELoss the outputs are probabilities.
    assert value_of("f1", logits.sigmoid(), y, loss=nn.BCELoss()) == value_of("f1", logits, y)
    none = torch.zeros(50)
    assert math.isnan(value_of("auroc", logits, none))
    assert math.isnan(value_of("f1", -logits.abs(), none))  # no example and no prediction
    assert value_of("f1", logits, none) == 0.0


def test_several_labels_of_an_example() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(40, 3, generator=generator)
    y = (torch.rand(40, 3, generator=generator) < 0.4).float()
    y[:, 2] = 0  # a label that no example has
    aucs = [sklearn_metrics.roc_auc_score(y[:, i], logits[:, i]) for i in range(2)]
    assert value_of("auroc", logits, y) == pytest.approx(np.mean(aucs))
    f1 = sklearn_metrics.f1_score(y.numpy(), (logits > 0).numpy(), average="macro")
    assert value_of("f1", logits, y) == pytest.approx(f1)


def test_sequences_count_each_position() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(10, 5, 3, generator=generator)
    y = torch.randint(0, 3, (10, 5), generator=generator)
    flat = value_of("f1", logits.flatten(0, 1), y.flatten(), classes=3)
    assert value_of("f1", logits, y, classes=3) == pytest.approx(flat)


def test_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(4)
    outputs, y = torch.randn(30, 2, generator=generator), torch.randn(30, 2, generator=generator)
    expected = {
        "mae": sklearn_metrics.mean_absolute_error(y, outputs),
        "rmse": math.sqrt(sklearn_metrics.mean_squared_error(y, outputs)),
        "r2": sklearn_metrics.r2_score(y, outputs),
    }
    names: Sequence[MetricName] = ("mae", "rmse", "r2")
    for name in names:
        assert value_of(name, outputs, y) == pytest.approx(expected[name], abs=1e-5)
    one = sklearn_metrics.r2_score(y[:, 0], outputs[:, 0])
    assert value_of("r2", outputs[:, :1], y[:, 0]) == pytest.approx(one, abs=1e-5)
    assert math.isnan(value_of("r2", outputs[:1], y[:1]))
    assert math.isnan(value_of("r2", outputs[:, 0], torch.ones(30)))


def test_regression_in_a_run() -> None:
    generator = torch.Generator().manual_seed(5)
    arrays = []
    for size in (5, 70):
        x = torch.randn(size, 3, generator=generator)
        arrays.append((x, x.sum(1), x, x.sum(1)))
    result = fc.run(
        fc.FedAvg(),
        fc.data.from_arrays(arrays),
        nn.Linear(3, 1),
        rounds=3,
        clients_per_round=1.0,
        loss=lambda outputs, y: (outputs[:, 0] - y).square(),
        metrics=["mae", "rmse", "r2"],
    )
    for client, (x, y, *_) in enumerate(arrays):
        outputs = result.model_of(client)(x).detach()[:, 0]
        mae = float((outputs - y).abs().mean())
        assert result.clients["mae"][client] == pytest.approx(mae, abs=1e-5)
        rmse = float((outputs - y).square().mean().sqrt())
        assert result.clients["rmse"][client] == pytest.approx(rmse, abs=1e-5)
        r2 = sklearn_metrics.r2_score(y, outputs)
        assert result.clients["r2"][client] == pytest.approx(r2, abs=1e-4)


def test_labels_of_0_and_1_and_inputs_of_two_tensors_in_a_run() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            outputs: Tensor = self.layer(torch.cat([a, b], -1))
            return outputs

    generator = torch.Generator().manual_seed(6)
    arrays = []
    for size in (20, 33):
        a, b = (torch.randn(size, width, generator=generator) for width in (2, 3))
        y = (a[:, 0] + torch.randn(size, generator=generator) > 0).long()
        arrays.append(({"a": a, "b": b}, y, {"a": a, "b": b}, y))
    result = fc.run(
        fc.FedAvg(),
        fc.data.from_arrays(arrays).with_validation(0.2),
        Two(),
        rounds=2,
        clients_per_round=1.0,
        loss="bce",
        metrics=["auroc", "f1"],
    )
    for client, (x, y, *_) in enumerate(arrays):
        scores = result.model_of(client)(**x).detach()[:, 0]
        auroc = sklearn_metrics.roc_auc_score(y, scores)
        assert result.clients["auroc"][client] == pytest.approx(auroc, abs=1e-6)
        f1 = sklearn_metrics.f1_score(y, scores > 0)
        assert result.clients["f1"][client] == pytest.approx(f1, abs=1e-6)
    assert result.clients["validation_examples"] == [4, 6]


@pytest.mark.parametrize(
    ("name", "outputs", "y"),
    [
        ("auroc", torch.zeros(2, 3), torch.zeros(2)),
        ("mae", torch.zeros(2, 3), torch.zeros(2)),
        ("f1", torch.zeros(2, 3), torch.zeros(2, 4)),
    ],
)
def test_outputs_that_do_not_fit_are_refused(name: MetricName, outputs: Tensor, y: Tensor) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "run.metrics"):
        value_of(name, outputs, y)


def test_a_model_that_gives_nan_has_no_value(ragged: Clients) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.linear(x)
            return torch.where(x[:, :1] > 1.5, torch.nan, outputs)

    result = fc.run(
        fc.Local(), ragged, Broken(), rounds=1, clients_per_round=1.0, lr=1e-9, metrics=["f1"]
    )
    for client in range(len(ragged)):
        broken = bool((ragged.x[ragged.train[client]][:, 0] > 1.5).any())
        assert (result.clients["train_f1"][client] is None) == broken
    assert None in result.clients["train_f1"]


def test_metric_objects_of_torchmetrics(clients: Clients) -> None:
    accuracy = MulticlassAccuracy(10, average="micro")
    result = fc.run(
        fc.FedAvg(),
        clients,
        fc.models.MLP(8),
        rounds=1,
        metrics={"micro": accuracy, "half": lambda outputs, y: (outputs.argmax(1) == y) / 2},
    )
    for micro, half, percent in zip(
        *(result.clients[name] for name in ("micro", "half", "accuracy")), strict=True
    ):
        assert 100 * micro == pytest.approx(percent, abs=1e-4)
        assert 200 * half == pytest.approx(percent, abs=1e-4)
    assert accuracy.update_count == 0  # the user's object is not changed
    summary: Any = result.summary
    assert summary["clients_without_micro"] == 0
    assert "clients_without_half" not in summary


@pytest.mark.parametrize(
    ("metrics", "field"),
    [
        (
            {"each": MulticlassAccuracy(10, average="none")},
            "metrics.each",
        ),
        ({"other": MulticlassAccuracy(3)}, "metrics.other"),
        ({"validation_x": lambda outputs, y: y.float()}, "metrics.validation_x"),
        ({"clients_without_x": lambda outputs, y: y.float()}, "metrics.clients_without_x"),
        (["accuracy"], "run.metrics"),
        (["f1", "f1"], "run.metrics"),
        ("f1", "run.metrics"),
        (["r2"], "run.metrics"),
    ],
)
def test_metrics_that_cannot_be_used_are_refused(
    metrics: Any, field: str, clients: Clients
) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        fc.run(fc.FedAvg(), clients, fc.models.MLP(8), rounds=1, metrics=metrics)


def test_without_torchmetrics_one_line_names_the_extra(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., Any] = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("torchmetrics"):
            raise ModuleNotFoundError("No module named 'torchmetrics'")
        return original(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidInputError, match=r"fedclade\[metrics\]") as caught:
        fc.run(fc.FedAvg(), clients, fc.models.MLP(8), rounds=1, metrics=["f1"])
    assert caught.value.field == "run.metrics"
    fc.run(fc.FedAvg(), clients, fc.models.MLP(8), rounds=1)


def test_clients_on_other_machines_have_the_same_values(clients: Clients) -> None:
    names: tuple[MetricName, ...] = ("auroc", "f1", "ece")
    training = fc.TrainingConfig(rounds=2, clients_per_round=1.0, eval_every=1, metrics=names)
    model = fc.models.MLP(8)
    expected = fc.run(fc.FedAvg(), clients, model, training=training)
    metadata = clients.metadata
    objective = Objective(module_for(model, metadata, 0), x=as_inputs(metadata.x))
    metrics = measured(objective, metadata, None, torch.device("cpu"), names)
    nodes = {
        f"node-{number}": Node(
            clients.only(ids),
            [str(client) for client in ids],
            NodeContext(objective),
            metrics,
            COMPATIBILITY_INFO,
        )
        for number, ids in enumerate(([0, 1], [2, 3, 4]))
    }
    transport = InProcessTransport(nodes)
    result = TrainingRun(
        fc.FedAvg(),
        None,
        model,
        fc.LocalConfig(),
        training,
        EngineConfig(),
        federation=RemoteFederation(transport, COMPATIBILITY_INFO),
    ).run()
    for name in (f"{split}{name}" for split in SPLITS for name in names):
        assert result.clients[name] == pytest.approx(expected.clients[name], abs=1e-6)
    # Of an evaluation only numbers leave a node: one per client, request and metric.
    messages = [message for sent in transport.sent for message in sent.values()]
    joined = [evaluation_part(m) for m in messages if m.header["kind"] == "map"]
    with_next = [message for message in joined if message is not None]
    last = [message for message in messages if message.header["kind"] == "evaluate"]
    assert (len(with_next), len(last)) == (2, 2)
    answer = nodes["node-0"].answer(last[0])
    assert {tuple(value.shape) for value in answer.tensors.values()} == {(2,)}
