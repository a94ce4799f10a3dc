"""Dense networks: which modules are recognized, and that the steps equal those of autograd."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap

from fedclade.core.functional_model import Batch, ClientStackedBatch, Objective
from fedclade.core.kernels.mlp import Dense, Layer, dense_form
from fedclade.core.pytree import Tree, tree_map
from fedclade.models import MLP, LeNet5, Logistic


class Own(nn.Module):
    """A user's network, with functions instead of layers."""

    def __init__(self, after: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.a, self.b, self.after = nn.Linear(6, 5), nn.Linear(5, 3, bias=False), after

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.after(self.a(x.flatten(1))))


class Residual(Own):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h + h.relu())


class Branching(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Twice(Own):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.a(x)))


def form(module: nn.Module) -> Dense | None:
    return dense_form(
        module, tuple(name for name, value in module.named_parameters() if value.requires_grad)
    )


def test_a_plain_chain_is_recognised() -> None:
    expected = Dense(
        (Layer("a.weight", "a.bias", relu=True), Layer("b.weight", None, relu=False)), flattens=True
    )
    assert form(Own()) == form(Own(torch.relu)) == form(Own(lambda x: x.relu())) == expected
    assert form(nn.Linear(2, 3)) is None  # it has no name under which its parameters could be found
    assert form(nn.Sequential(nn.Linear(2, 3))) == Dense(
        (Layer("0.weight", "0.bias", relu=False),), flattens=False
    )
    assert form(MLP((5, 4)).build((1, 4, 4), 3)) is not None
    assert form(Logistic().build((7,), 3)) is not None


@pytest.mark.parametrize(
    "module",
    [
        Own(torch.tanh),
        Residual(),
        Branching(),
        Twice(),
        LeNet5().build((1, 28, 28), 3),
        nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_any_other_module_is_left_to_autograd(module: nn.Module) -> None:
    assert form(module) is None


def test_a_frozen_layer_is_left_to_autograd() -> None:
    module = Own()
    module.a.weight.requires_grad_(False)
    assert form(module) is None


def test_dropout_is_left_to_autograd() -> None:
    assert Objective(MLP(5, dropout=0.5).build((6,), 3))._dense is None
    assert Objective(MLP(5).build((6,), 3))._dense is not None


def absolute(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.sum(1) - y).abs()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 7), max_size=2),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["cross-entropy", "own loss"]),
    st.integers(0, 1000),
)
def test_its_steps_are_those_of_autograd(
    hidden: list[int], clients: int, size: int, bias: bool, padded: bool, loss: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    widths = [6, *hidden, 3]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [[nn.Linear(a, b, bias=bias), nn.ReLU()] for a, b in pairwise(widths)]
        module = nn.Sequential(nn.Flatten(), *[layer for pair in layers for layer in pair][:-1])
    objective = Objective(module, absolute) if loss == "own loss" else Objective(module)
    assert objective._dense is not None
    params = {
        name: value + 0.1 * torch.randn(clients, *value.shape, generator=generator)
        for name, value in objective.params().items()
    }
    base = tree_map(lambda value: torch.randn(value.shape, generator=generator), params)
    weight = torch.ones(clients, size)
    if padded:
        weight[:, size // 2 :] = 0
    x, y = (
        torch.randn(clients, size, 2, 3, generator=generator),
        torch.randint(0, 3, (clients, size), generator=generator),
    )
    batch = ClientStackedBatch(x, y, weight, torch.arange(clients))
    scale = torch.randn(clients, generator=generator)

    def by_autograd(base: Tree, scale: Tensor, params: Tree, batch: Batch) -> Tree:
        return tree_map(lambda base, g: base + scale * g, base, grad(objective.loss)(params, batch))

    expected = vmap(by_autograd)(base, scale, params, Batch(*batch))
    for overwrite in (False, True):
        got = objective.add_scaled_gradient(base, scale, params, batch, overwrite)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-6)
            assert (got[name].data_ptr() == base[name].data_ptr()) == overwrite


def test_the_weights_themselves_may_be_overwritten() -> None:
    torch.manual_seed(0)
    objective = Objective(Own())
    params = {
        name: value + 0.1 * torch.randn(3, *value.shape)
        for name, value in objective.params().items()
    }
    batch = ClientStackedBatch(
        torch.randn(3, 5, 6), torch.randint(0, 3, (3, 5)), torch.ones(3, 5), torch.arange(3)
    )
    expected = objective.add_scaled_gradient(params, torch.tensor(-0.1), params, batch)
    got = objective.add_scaled_gradient(params, torch.tensor(-0.1), params, batch, overwrite=True)
    for name in expected:
        assert torch.equal(got[name], expected[name])


def test_inputs_with_more_axes_that_are_not_flattened_are_left_to_autograd() -> None:
    objective = Objective(nn.Sequential(nn.Linear(6, 3)), lambda outputs, y: outputs.sum((1, 2)))
    batch = ClientStackedBatch(
        torch.randn(1, 4, 2, 6), torch.zeros(1, 4), torch.ones(1, 4), torch.tensor([0])
    )
    w = {name: value[None] for name, value in objective.params().items()}
    got = objective.add_scaled_gradient(w, torch.tensor(1.0), w, batch)
    assert got["0.weight"].shape == (1, 3, 6)
    torch.testing.assert_close(
        got["0.weight"], w["0.weight"] + batch.x.sum((0, 1, 2)).expand(1, 3, 6) / 4
    )
