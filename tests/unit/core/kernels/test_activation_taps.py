"""Gradients by taps equal those of autograd for every model; which layers are tapped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedclade.core.functional_model import Batch, ClientStackedBatch, Objective
from fedclade.core.kernels import activation_taps, im2col, per_client_convolution
from fedclade.core.kernels.per_client_convolution import is_large
from fedclade.core.pytree import Tree

CLIENTS, SIZE = 3, 4


class Twice(nn.Module):
    """A layer that is used twice, one that is not used, and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused, self.tied = (
            nn.Linear(6, 6),
            nn.Linear(6, 3),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
        )
        self.tied.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.tied(torch.tanh(self.a(torch.tanh(self.a(x)))))))


class Sequences(nn.Module):
    """Linear layers on inputs with more axes, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = (
            nn.Embedding(9, 5),
            nn.Linear(5, 4),
            nn.Linear(4, 3, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.embed(x))).mean(1))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    module[0].weight.requires_grad_(False)
    module[2].bias.requires_grad_(False)
    return module


def convolutions(
    *, kernel: int = 3, channels: int = 4, padding: int = 1, stride: int = 1, groups: int = 1
) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 6, kernel, stride, padding, groups=groups, bias=False),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(24),
        nn.Linear(24, 3),
    )


VECTORS, IMAGES, WORDS = (
    torch.randn(CLIENTS, SIZE, 6),
    torch.rand(CLIENTS, SIZE, 1, 6, 7),
    torch.randint(0, 9, (CLIENTS, SIZE, 5)),
)
MODELS = {
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)),
        VECTORS,
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3)),
        VECTORS,
    ),
    "a layer twice": (Twice, VECTORS),
    "frozen": (frozen, VECTORS),
    "sequences": (Sequences, WORDS),
    "convolutions": (convolutions, IMAGES),
    "wide kernel": (lambda: convolutions(kernel=5, channels=8, padding=2), IMAGES),
    "no padding": (lambda: convolutions(padding=0), IMAGES),
    "odd channels": (lambda: convolutions(channels=3), IMAGES),
    "strides": (lambda: convolutions(stride=2), IMAGES),
    "groups": (lambda: convolutions(groups=2), IMAGES),
}


def problem(name: str) -> tuple[Objective, Tree, Tree, Tensor, ClientStackedBatch]:
    make, x = MODELS[name]
    torch.manual_seed(0)
    objective = Objective(make())
    params = {
        name: value + 0.1 * torch.randn(CLIENTS, *value.shape)
        for name, value in objective.params().items()
    }
    base = {name: torch.randn_like(value) for name, value in params.items()}
    weight = torch.ones(CLIENTS, SIZE)
    weight[1, 2:] = 0
    return (
        objective,
        base,
        params,
        torch.randn(CLIENTS),
        ClientStackedBatch(x, torch.randint(0, 3, (CLIENTS, SIZE)), weight, torch.arange(CLIENTS)),
    )


def expected_of(
    objective: Objective, base: Tree, params: Tree, scale: Tensor, batch: ClientStackedBatch
) -> Tree:
    return vmap(objective.add_scaled_gradient)(base, scale, params, Batch(*batch))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("by", ["kernels of the CPU", "columns", "client by client"])
def test_a_stack_has_the_gradients_of_each_client(
    name: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, base, params, scale, batch = problem(name)
    expected = expected_of(objective, base, params, scale, batch)
    if by != "kernels of the CPU":
        monkeypatch.setattr(activation_taps, "in_columns", lambda x: True)
    if by == "client by client":
        monkeypatch.setattr(activation_taps, "is_large", lambda layer, x, columns: True)
    got = objective.add_scaled_gradient(base, scale, params, batch)
    for parameter, value in expected.items():
        torch.testing.assert_close(got[parameter], value, rtol=1e-5, atol=1e-5)
    assert list(got) == list(base)


@pytest.mark.parametrize("name", MODELS)
def test_the_result_may_take_the_place_of_the_base_even_of_the_parameters_themselves(
    name: str,
) -> None:
    objective, _, params, scale, batch = problem(name)
    expected = expected_of(objective, params, params, scale, batch)
    kept = {name: value.clone() for name, value in params.items()}
    for overwrite in (False, True):
        got = objective.add_scaled_gradient(params, scale, params, batch, overwrite=overwrite)
        for parameter, value in expected.items():
            torch.testing.assert_close(got[parameter], value, rtol=1e-5, atol=1e-5)
            if not overwrite:
                assert torch.equal(params[parameter], kept[parameter])


@pytest.mark.parametrize("name", ["layer norm", "convolutions"])
def test_large_gradients_are_never_stored(name: str) -> None:
    """With `overwrite` the weights of tapped layers stay where they are."""
    objective, base, params, scale, batch = problem(name)
    places = {name: value.data_ptr() for name, value in base.items()}
    got = objective.add_scaled_gradient(base, scale, params, batch, overwrite=True)
    assert {name: value.data_ptr() for name, value in got.items()} == places


def test_layers_are_tapped_where_their_weight_is_trained_and_theirs_alone() -> None:
    module = frozen()
    assert activation_taps.with_taps(
        module, tuple(name for name, value in module.named_parameters() if value.requires_grad)
    ) == ("2", "4")
    module = Twice()
    assert activation_taps.with_taps(module, tuple(dict(module.named_parameters()))) == (
        "b",
        "unused",
    )
    module = convolutions(stride=2)
    assert activation_taps.with_taps(module, tuple(dict(module.named_parameters()))) == (
        "0",
        "2",
        "7",
    )


@pytest.mark.parametrize("padding", [(0, 0), (1, 2), (2, 0)])
@pytest.mark.parametrize("channels", [1, 3, 8])
def test_columns_give_the_convolution_and_the_error_of_its_input(
    padding: tuple[int, int], channels: int
) -> None:
    torch.manual_seed(1)
    x, weight = (
        torch.randn(CLIENTS, 2, 6, 7, channels, requires_grad=True),
        torch.randn(CLIENTS, 4, 3, 3, channels),
    )
    outputs, laid_out = vmap(lambda x, weight: im2col.Convolution.apply(x, weight, *padding))(
        x, weight
    )
    assert laid_out.shape == (*outputs.shape[:-1], 9 * channels)
    error = torch.randn_like(outputs)
    (got,) = torch.autograd.grad(outputs, x, error)
    for client in range(CLIENTS):
        plain = x[client].detach().movedim(-1, 1).requires_grad_()
        expected = torch.nn.functional.conv2d(plain, weight[client].movedim(-1, 1), padding=padding)
        torch.testing.assert_close(outputs[client].movedim(-1, 1), expected, rtol=1e-4, atol=1e-5)
        (back,) = torch.autograd.grad(expected, plain, error[client].movedim(-1, 1))
        torch.testing.assert_close(got[client].movedim(-1, 1), back, rtol=1e-4, atol=1e-5)


def test_a_convolution_is_large_by_its_multiplications() -> None:
    layer, x = nn.Conv2d(8, 6, 3, groups=2), torch.zeros(10, 8, 5, 5)
    multiplications = 10 * 8 * 5 * 5 * 9 * 6 / 2
    times = int(per_client_convolution._MORE_THAN_GROUPS // multiplications)
    assert not is_large(layer, x.expand(times, *x.shape), columns=False)
    assert is_large(layer, x.expand(times + 1, *x.shape), columns=False)
    assert not is_large(layer, x.expand(times + 1, *x.shape), columns=True)
