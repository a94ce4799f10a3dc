"""Torch's loss modules as losses, and losses that mix examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

import fedclade as fc
from fedclade.core.functional_model import Objective
from fedclade.core.losses import cross_entropy, require_per_example
from fedclade.core.torch_loss import TorchLoss
from fedclade.data import Clients, from_arrays
from fedclade.errors import InvalidInputError

CPU = torch.device("cpu")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([2, 0, 1, 1])
CASES = [
    (nn.MSELoss(), randn(4), randn(4) + 1),
    (nn.MSELoss(), randn(4, 3), randn(4, 3) + 1),
    (nn.L1Loss(reduction="none"), randn(4, 1), randn(4, 1) + 1),
    (nn.HuberLoss(delta=0.5), randn(4, 2, 2), randn(4, 2, 2) + 1),
    (nn.BCEWithLogitsLoss(), randn(4, 3), torch.ones(4, 3)),
    (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0])), randn(4), torch.tensor([0.0, 1, 1, 0])),
    (nn.CrossEntropyLoss(label_smoothing=0.1), randn(4, 3), LABELS),
    (nn.NLLLoss(), randn(4, 3).log_softmax(1), LABELS),
    (nn.PoissonNLLLoss(), randn(4), torch.tensor([1.0, 0, 2, 3])),
]


@pytest.mark.parametrize(("module", "outputs", "y"), CASES, ids=lambda case: type(case).__name__)
def test_the_mean_over_examples_is_torchs_own(
    module: nn.Module, outputs: Tensor, y: Tensor
) -> None:
    loss = TorchLoss(module, CPU)
    values = loss(outputs, y)
    assert values.shape == (4,)
    assert values.mean() == pytest.approx(float(module(outputs, y).mean()), rel=1e-6)
    require_per_example("loss", loss, outputs, y)
    stacked = vmap(loss)(torch.stack([outputs, outputs]), torch.stack([y, y]))
    torch.testing.assert_close(stacked, torch.stack([values, values]))


def test_the_module_of_the_user_does_not_change() -> None:
    module = nn.MSELoss()
    TorchLoss(module, CPU)
    assert module.reduction == "mean"


def test_class_weights_are_per_example() -> None:
    weight = torch.tensor([1.0, 2.0, 4.0])
    outputs = randn(4, 3)
    values = TorchLoss(nn.CrossEntropyLoss(weight=weight), CPU)(outputs, LABELS)
    torch.testing.assert_close(values, cross_entropy(outputs, LABELS) * weight[LABELS])


def test_labels_of_a_sequence() -> None:
    outputs, y = randn(4, 5, 3), torch.arange(20).view(4, 5) % 3
    values = TorchLoss(nn.CrossEntropyLoss(label_smoothing=1e-12), CPU)(outputs, y)
    torch.testing.assert_close(values, cross_entropy(outputs, y))


def test_plain_cross_entropy_is_fedclades_own_which_is_faster() -> None:
    for loss in (None, nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="none")):
        assert Objective(nn.Linear(2, 3), loss).example_loss is cross_entropy
    for loss in (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(ignore_index=0)):
        assert isinstance(Objective(nn.Linear(2, 3), loss).example_loss, TorchLoss)


def test_two_losses_with_different_settings_have_different_names() -> None:
    names = {
        TorchLoss(module, CPU).__qualname__
        for module in (nn.HuberLoss(), nn.HuberLoss(delta=0.5), nn.MSELoss())
    }
    assert len(names) == 3


def test_a_sum_is_refused() -> None:
    with pytest.raises(InvalidInputError, check=lambda e: e.field == "loss.reduction"):
        TorchLoss(nn.MSELoss(reduction="sum"), CPU)


@pytest.mark.parametrize("loss", [nn.MSELoss, "mse", 3])
def test_what_is_no_loss_is_refused(loss: object) -> None:
    with pytest.raises(InvalidInputError, check=lambda e: e.field == "loss"):
        Objective(nn.Linear(2, 3), loss)  # type: ignore[arg-type]


# --- losses that mix examples


@pytest.fixture
def numbers() -> Clients:
    """Four clients with one number per example, of which the first ten are equal."""
    x = randn(4, 20, 6)
    y = x.sum(-1)
    y[:, :10] = 1.0
    return from_arrays([(x[i], y[i], x[i, :5], y[i, :5]) for i in range(4)])


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs - y) ** 2).mean(1)


def centered(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, 0] - outputs[:, 0].mean() - y) ** 2


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [squared, centered, nn.MSELoss(), nn.L1Loss()])
def test_a_loss_that_broadcasts_is_refused_at_the_start(
    loss: Callable[[Tensor, Tensor], Tensor], numbers: Clients
) -> None:
    """Outputs (n, 1) minus targets (n,) is (n, n): a wrong model, without an error of torch."""
    with pytest.raises(InvalidInputError, check=lambda e: e.field == "loss"):
        fc.run(fc.FedAvg(), numbers, nn.Linear(6, 1), rounds=1, loss=loss)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("outputs", "loss", "field"),
    [
        (2, None, "model"),  # labels go up to 9
        (10, nn.BCEWithLogitsLoss(), "loss"),  # one label for ten outputs
        (10, lambda outputs, y: (outputs[:, 10] - y) ** 2, "loss"),  # there is no output 10
    ],
)
def test_a_model_whose_outputs_do_not_fit_the_loss_is_refused_at_the_start(
    outputs: int, loss: Callable[[Tensor, Tensor], Tensor] | None, field: str, digits: Clients
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
    with pytest.raises(InvalidInputError, check=lambda e: e.field == field):
        fc.run(fc.FedAvg(), digits, model, rounds=1, loss=loss)


@pytest.mark.parametrize("inner", [nn.Unflatten(1, (2, 5)), nn.Unflatten(1, (10, 1))])
def test_outputs_of_more_than_one_dimension_need_a_loss(inner: nn.Module, digits: Clients) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), inner)
    with pytest.raises(InvalidInputError, check=lambda e: e.field == "loss"):
        fc.run(fc.FedAvg(), digits, model, rounds=1)


def test_a_metric_that_broadcasts_is_refused_at_the_start(numbers: Clients) -> None:
    with pytest.raises(InvalidInputError, check=lambda e: e.field == "metrics.error"):
        fc.run(
            fc.FedAvg(),
            numbers,
            nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)),
            rounds=1,
            loss=nn.MSELoss(),
            metrics={"error": lambda outputs, y: (outputs[:, None] - y).abs().mean(1)},
        )


@pytest.mark.parametrize(
    "loss", [lambda o, y: (o[:, 0] - y).mean(), lambda o, y: 1.0, lambda o, y: o.wrong]
)
def test_a_loss_without_one_value_per_example_is_refused(
    loss: Callable[[Tensor, Tensor], Tensor], numbers: Clients
) -> None:
    with pytest.raises(InvalidInputError, check=lambda e: e.field == "loss"):
        fc.run(fc.FedAvg(), numbers, nn.Linear(6, 1), rounds=1, loss=loss)


def test_a_torch_loss_trains_as_the_same_function_does(numbers: Clients) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    own = fc.run(fc.FedAvg(), numbers, model, rounds=3, loss=lambda o, y: (o - y) ** 2)
    torchs = fc.run(fc.FedAvg(), numbers, model, rounds=3, loss=nn.MSELoss())
    assert torchs.summary["loss"] == own.summary["loss"]
    assert torchs.summary["accuracy"] is None


def test_torchs_cross_entropy_gives_the_same_bytes_as_the_default(digits: Clients) -> None:
    first = fc.run(fc.FedAvg(), digits, fc.models.MLP(8), rounds=2)
    second = fc.run(fc.FedAvg(), digits, fc.models.MLP(8), rounds=2, loss=nn.CrossEntropyLoss())
    assert first.summary["accuracy"] == second.summary["accuracy"]
    for a, b in zip(first.model_of(0).parameters(), second.model_of(0).parameters(), strict=True):
        assert torch.equal(a, b)
