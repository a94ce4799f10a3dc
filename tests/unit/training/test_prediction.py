"""Predictions of a result for new rows: by a client's model, and for a client that is new."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedclade as fc
from fedclade.data import Clients
from fedclade.errors import InvalidInputError
from fedclade.training.prediction import ROWS, TaskSpec
from fedclade.training.result import FinalModels

METHODS = pytest.mark.parametrize(
    "method",
    [
        fc.FedAvg(),
        fc.Local(),
        fc.LGFedAvg(),
        fc.PerFedAvg(alpha=0.05),
        fc.IFCA(clusters=2),
        fc.Clade(),
    ],
    ids=lambda method: method.name,
)


def small_run(clients: Clients, method: fc.Method, **changes: Any) -> fc.Result:
    settings: dict[str, Any] = {"model": fc.models.MLP(8), "rounds": 2, "device": "cpu"}
    return fc.run(method, clients, **(settings | changes))


def named_clients(names: tuple[str, ...] = ("north", "south", "west")) -> Clients:
    rng = np.random.default_rng(0)
    data = {}
    for place, name in enumerate(names):
        x = rng.normal(size=(20, 3)).astype("float32")
        y = (x[:, 0] > 0).astype("int64") ^ (place == 1)
        data[name] = (x[:15], y[:15], x[15:], y[15:])
    return fc.data.from_arrays(data, class_names=["no", "yes"])


def scalars(weights: list[float], model_ids: list[int], **changes: Any) -> fc.Result:
    """A regression result of three named clients with models y = w x."""
    x = np.ones((4, 1), "float32")
    clients = fc.data.from_arrays(dict.fromkeys(("north", "south", "west"), (x, x[:, 0])))
    result = fc.run(
        fc.FedAvg(), clients, nn.Linear(1, 1, bias=False), rounds=1, loss="mse", device="cpu"
    )
    stack = torch.tensor(weights).reshape(-1, 1, 1)
    ids = torch.tensor(model_ids)
    models = FinalModels({"weight": stack}, ids, torch.zeros(3, dtype=torch.bool))
    return replace(result, models=models, clusters=ids, **changes)


@METHODS
@pytest.mark.parametrize("to_disk", [False, True], ids=["in memory", "from a folder"])
def test_predictions_give_the_reported_accuracy(
    digits: Clients, tmp_path: Path, method: fc.Method, to_disk: bool
) -> None:
    """So personalization and layers that clients keep are part of a prediction."""
    result = small_run(digits, method, out=tmp_path / "run" if to_disk else None)
    result = fc.load(tmp_path / "run") if to_disk else pickle.loads(pickle.dumps(result))
    for client in range(3):
        _, _, x, y = digits.arrays(client)
        right = (result.predict(x, client) == y).double().mean()
        assert 100 * float(right) == pytest.approx(result.clients["accuracy"][client], abs=1e-3)


def test_own_batch_norm_is_part_of_a_prediction(digits: Clients) -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    )
    result = small_run(digits, fc.FedAvg(), model=model, batch_norm="own", clients_per_round=1.0)
    x = digits.arrays(0)[0]
    first, second = (result.predict(x, client, kind="output") for client in (0, 1))
    assert not torch.equal(first, second)
    for client in (0, 1):
        _, _, x, y = digits.arrays(client)
        right = (result.predict(x, client) == y).double().mean()
        assert 100 * float(right) == pytest.approx(result.clients["accuracy"][client], abs=1e-3)


def test_kinds_of_predictions_of_a_classifier() -> None:
    result = small_run(named_clients(), fc.Local(), model=nn.Linear(3, 2))
    x = np.random.default_rng(1).normal(size=(ROWS + 3, 3))  # more rows than one call takes
    outputs = result.predict(x, "south", kind="output")
    with torch.no_grad():
        expected = result.model_of("south")(torch.tensor(x, dtype=torch.float32))
    assert torch.allclose(outputs, expected, atol=1e-6)
    probability = result.predict(x, client=1, kind="probability")
    assert torch.allclose(probability, outputs.softmax(1))
    labels = result.predict(x, client="south")
    assert torch.equal(labels, outputs.argmax(1))
    assert {result.names.class_name(int(label)) for label in labels} == {"no", "yes"}


@pytest.mark.parametrize(
    ("task", "outputs", "kind", "expected"),
    [
        (TaskSpec((1,), 3, "cross_entropy"), [[0.0, 2.0, 1.0]], "label", [1]),
        (TaskSpec((1,), 2, "bce"), [[-1.0], [1.0]], "label", [0, 1]),
        (TaskSpec((1,), 2, "bce"), [[0.0], [0.0]], "probability", [0.5, 0.5]),
        (TaskSpec((1,), None, "bce"), [[-1.0, 1.0]], "label", [[0, 1]]),
        (TaskSpec((1,), None, "mse"), [[2.5], [1.0]], "label", [2.5, 1.0]),
        (TaskSpec((1,), None, "mse"), [[2.5], [1.0]], "output", [[2.5], [1.0]]),
        # whole numbers as targets of a regression are not classes
        (TaskSpec((1,), 4, "huber"), [[2.5, 1.0]], "label", [[2.5, 1.0]]),
        # a loss function of the user
        (TaskSpec((1,), None, "cross_entropy"), [[2.5]], "label", [2.5]),
    ],
)
def test_outputs_become_predictions(
    task: TaskSpec, outputs: list[list[float]], kind: Any, expected: list[Any]
) -> None:
    assert task.decode(torch.tensor(outputs), kind).tolist() == expected


def test_a_new_client_joins_the_group_whose_model_has_the_least_loss() -> None:
    # y = x for north, y = -x for south and west; on x = 2, y = -1.5 the errors are 3.5 and 0.5
    result = scalars([1.0, -1.0], [0, 1, 1])
    labeled = ([[2.0]], [-1.5])
    assert result.closest_client(*labeled) == "south"
    assert result.cluster_of(result.closest_client(*labeled)) == 1
    assert result.predict([[3.0]], labeled=labeled).tolist() == [-3.0]
    assert result.closest_client([[2.0]], [1.0]) == "north"


def test_of_equal_models_the_first_is_taken_and_a_diverged_one_is_never_preferred() -> None:
    equal = scalars([1.0, 1.0], [1, 0, 0])
    assert equal.closest_client([[1.0]], [0.0]) == "north"
    diverged = scalars([float("nan"), 5.0], [0, 1, 1])
    assert diverged.closest_client([[1.0]], [0.0]) == "south"


def test_clients_without_a_model_are_no_candidates() -> None:
    result = scalars([1.0], [-1, -1, 0])
    assert result.closest_client([[1.0]], [9.0]) == "west"
    assert result.groups == {-1: ["north", "south"], 0: ["west"]}
    with pytest.raises(InvalidInputError) as caught:
        scalars([1.0], [-1, -1, -1]).predict([[1.0]], labeled=([[1.0]], [9.0]))
    assert caught.value.field == "labeled"


def test_groups_have_the_names_of_clients() -> None:
    result = scalars([1.0, -1.0], [1, 0, 1])
    assert result.groups == {0: ["south"], 1: ["north", "west"]}
    assert [result.cluster_of(client) for client in ("north", "south", 2)] == [1, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "client"),
        ({"client": "north", "labeled": ([[1.0]], [1.0])}, "client"),
        ({"client": "nort"}, "client"),
        ({"client": 3}, "client"),
        ({"client": "north", "kind": "logits"}, "kind"),
        ({"client": "north", "kind": "probability"}, "kind"),
        ({"labeled": ([[1.0, 2.0]], [1.0])}, "labeled"),
        ({"labeled": ([[1.0]], [[1.0, 2.0]])}, "labeled"),
        ({"labeled": ([[1.0]], [1.0, 2.0])}, "labeled: x"),
    ],
)
def test_what_cannot_be_predicted_is_refused(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        scalars([1.0], [0, 0, 0]).predict([[1.0]], **arguments)
    assert caught.value.field == field


def test_an_unknown_client_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidInputError, match="'north'"):
        scalars([1.0], [0, 0, 0]).predict([[1.0]], "nort")


@pytest.mark.parametrize("x", [[[1.0, 2.0]], [[float("nan")]], [["a"]], [1.0], [[1]]])
def test_rows_that_the_model_cannot_read_are_refused(x: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        scalars([1.0], [0, 0, 0]).predict(x, "north")
    assert caught.value.field == "x"


def test_a_class_that_the_run_does_not_know_is_refused() -> None:
    result = small_run(named_clients(), fc.FedAvg(), model=nn.Linear(3, 2))
    for y in ([2], [0.5]):
        with pytest.raises(InvalidInputError) as caught:
            result.closest_client([[1.0, 2.0, 3.0]], y)
        assert caught.value.field == "labeled"


def test_a_loss_of_the_user_predicts_but_places_no_new_client() -> None:
    result = scalars([2.0], [0, 0, 0], task=TaskSpec((1,), None, "cross_entropy"))
    assert result.predict([[3.0]], "north").tolist() == [6.0]
    with pytest.raises(InvalidInputError) as caught:
        result.closest_client([[1.0]], [1.0])
    assert caught.value.field == "labeled"


def test_images_of_bytes_are_read_as_in_training(digits: Clients) -> None:
    result = small_run(digits, fc.FedAvg())
    x = digits.arrays(0)[0]
    assert isinstance(x, torch.Tensor)
    bytes_of = (255 * torch.rand(x.shape)).to(torch.uint8)
    first = result.predict(bytes_of, 0, kind="output")
    assert torch.equal(first, result.predict(bytes_of.float() / 255, 0, kind="output"))
