"""Losses by name: their values worked by hand, and shapes that they refuse."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedclade.core.functional_model import Objective
from fedclade.core.losses import (
    LOSSES,
    ExampleLoss,
    bce,
    huber,
    label_accuracy,
    mae,
    mse,
    require_per_example,
)
from fedclade.errors import InvalidInputError


def test_errors_of_one_number_are_those_worked_by_hand() -> None:
    outputs, y = torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, 0.0])
    assert mse(outputs, y).tolist() == [0.25, 9.0]
    assert mae(outputs, y).tolist() == [0.5, 3.0]
    assert huber(outputs, y).tolist() == [0.125, 2.5]
    assert mse(outputs[:, 0], y).tolist() == [0.25, 9.0]


def test_several_numbers_give_their_mean() -> None:
    outputs, y = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [4.0, 2.0]])
    assert mse(outputs, y).tolist() == [2.5, 10.0]
    assert mae(outputs, y).tolist() == [1.5, 3.0]


def test_bce_takes_logits_and_labels_as_integers_or_floats() -> None:
    outputs = torch.tensor([[0.0, 2.0], [-1.0, 0.0]])
    labels = torch.tensor([[1, 0], [0, 1]])
    log2, softplus = math.log(2), lambda z: math.log1p(math.exp(z))
    expected = [(log2 + softplus(2.0)) / 2, (softplus(-1.0) + log2) / 2]
    for y in (labels, labels.float()):
        torch.testing.assert_close(bce(outputs, y), torch.tensor(expected))
    torch.testing.assert_close(bce(outputs[:, :1], labels[:, 0]), bce(outputs[:, 0], labels[:, 0]))


def test_the_accuracy_of_labels_is_the_share_of_right_ones() -> None:
    outputs, y = torch.tensor([[1.0, -1.0], [2.0, 3.0]]), torch.tensor([[1, 0], [0, 1]])
    assert label_accuracy(outputs, y).tolist() == [1.0, 0.5]
    assert label_accuracy(outputs[:, :1], y[:, 0].float()).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("name", ["bce", "mse", "mae", "huber"])
@pytest.mark.parametrize(
    ("outputs", "targets"), [((4, 3), (4,)), ((4, 2), (4, 3)), ((4,), (4, 1)), ((4, 1), (4, 3))]
)
def test_shapes_that_would_broadcast_are_refused(
    name: str, outputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "loss"):
        require_per_example("loss", LOSSES[name], torch.zeros(outputs), torch.zeros(targets))  # type: ignore[index]


@pytest.mark.parametrize("loss", [nn.MSELoss(), lambda z, y: ((z - y) ** 2).mean(-1)])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_of_the_user_that_broadcasts_is_refused(loss: ExampleLoss) -> None:
    objective = Objective(nn.Linear(2, 1), loss)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "loss"):
        objective.check(torch.randn(2, 2), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("sequence", [False, True])
def test_label_smoothing_is_that_of_torch(sequence: bool) -> None:
    outputs = torch.randn(4, 5, 3) if sequence else torch.randn(4, 3)
    y = torch.randint(0, 3, outputs.shape[:-1])
    loss = Objective(nn.Linear(1, 1), nn.CrossEntropyLoss(label_smoothing=0.2)).example_loss
    expected = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), label_smoothing=0.2)
    torch.testing.assert_close(loss(outputs, y).mean(), expected)


def test_a_name_of_no_loss_is_refused() -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "loss"):
        Objective(nn.Linear(1, 1), "squares")  # type: ignore[arg-type]
