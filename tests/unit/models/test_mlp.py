"""Fully connected models: numbers of parameters, layers, and checked fields."""

import pytest
import torch
from torch import nn

from fedclade.errors import InvalidInputError
from fedclade.models import MLP, Logistic


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("classes", "parameters"), [(62, 169_462), (47, 166_447)])
def test_mlp_has_the_number_of_parameters_that_flt_prints(classes: int, parameters: int) -> None:
    assert size(MLP().build((1, 28, 28), classes)) == parameters
    assert size(MLP(dropout=0.5).build((784,), classes)) == parameters


def test_logistic_is_one_linear_layer() -> None:
    module = Logistic().build((60,), 10)
    assert size(module) == 610
    assert [type(m) for m in module.children()] == [nn.Flatten, nn.Linear]


def test_layers_have_the_documented_order_and_names() -> None:
    module = MLP((6, 5), dropout=0.5).build((2, 2), 3)
    names = ["flatten", "fc1", "dropout1", "relu1", "fc2", "dropout2", "relu2", "fc3"]
    assert [name for name, _ in module.named_children()] == names


def test_parameters_have_the_same_names_with_and_without_dropout() -> None:
    assert list(MLP(5, dropout=0.5).build((4,), 3).state_dict()) == list(
        MLP(5).build((4,), 3).state_dict()
    )


@pytest.mark.parametrize("shape", [(60,), (8, 8), (1, 8, 8), torch.Size([3, 5, 7])])
@pytest.mark.parametrize("spec", [MLP(7), MLP((7, 5), 0.5), Logistic()])
def test_any_shape_gives_scores(spec: MLP | Logistic, shape: tuple[int, ...]) -> None:
    assert spec.build(shape, 11)(torch.rand(2, *shape)).shape == (2, 11)


def test_several_hidden_layers_may_be_a_list() -> None:
    assert MLP([20, 10]) == MLP((20, 10))  # type: ignore[arg-type]
    assert hash(MLP([20, 10])) == hash(MLP((20, 10)))  # type: ignore[arg-type]


@pytest.mark.parametrize("hidden", [0, -3, 2.5, True, "200", (), (200, 0), None])
def test_hidden_is_checked(hidden: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        MLP(hidden=hidden)  # type: ignore[arg-type]
    assert caught.value.field == "model.hidden"
    assert f"= {hidden!r}: " in str(caught.value)


@pytest.mark.parametrize("dropout", [1, 1.0, -0.1, float("nan"), "half", True, None])
def test_dropout_is_checked(dropout: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        MLP(dropout=dropout)  # type: ignore[arg-type]
    assert caught.value.field == "model.dropout"
    assert f"= {dropout!r}: " in str(caught.value)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (-1, 4)])
@pytest.mark.parametrize("spec", [MLP(), Logistic()])
def test_empty_samples_are_refused(spec: MLP | Logistic, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        spec.build(shape, 2)
    assert caught.value.field == "model"
    assert all(part in str(caught.value) for part in (type(spec).__name__, "(60,)", str(shape)))


@pytest.mark.parametrize("spec", [MLP(), Logistic()])
def test_classes_are_checked(spec: MLP | Logistic) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "classes"):
        spec.build((4,), 0)
