"""The clients' optimizers against torch.optim, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedclade as fc
from fedclade.core import Batch, ClientStackedBatch, LocalTraining, Objective, stack, tree_index
from fedclade.core.local_sgd import initial_optimizer_state, optimizer_step
from fedclade.data import Clients

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 20, 8, 5, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (3, 20, 8), generator=GENERATOR)
STEPS = 20

OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({}, torch.optim.SGD),
    "sgd with momentum and decay": (
        {"momentum": 0.9, "weight_decay": 0.01},
        lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, weight_decay=0.01),
    ),
    "adam": ({"optimizer": "adam"}, torch.optim.Adam),
    "adam with decay": (
        {"optimizer": "adam", "weight_decay": 0.1},
        lambda params, lr: torch.optim.Adam(params, lr, weight_decay=0.1),
    ),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.1},
        lambda params, lr: torch.optim.AdamW(params, lr, weight_decay=0.1),
    ),
}


def net(client: int) -> nn.Module:
    torch.manual_seed(client)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def by_torch(
    client: int,
    make: Callable[..., torch.optim.Optimizer],
    clip: float,
    only: tuple[str, ...] | None,
) -> nn.Module:
    module = net(client)
    for name, value in module.named_parameters():
        value.requires_grad_(only is None or name in only)
    optimizer = make([value for value in module.parameters() if value.requires_grad], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(module(X[client, step]), Y[client, step]).backward()  # type: ignore[no-untyped-call]
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return module


@pytest.mark.parametrize("only", [None, ("2.weight", "2.bias")], ids=["all", "the head"])
@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_those_of_torch(
    name: str, clip: float, only: tuple[str, ...] | None
) -> None:
    settings, make = OPTIMIZERS[name]
    local = LocalTraining(Objective(net(0)), clip_norm=clip, **settings)
    params = stack([dict(net(client).named_parameters()) for client in range(3)])
    params = {key: value.detach() for key, value in params.items()}
    state = initial_optimizer_state(local, params, only)
    lr = torch.tensor(0.05, dtype=torch.float64)
    weight = torch.ones(3, 8, dtype=torch.float64)
    for step in range(STEPS):
        batch = ClientStackedBatch(X[:, step], Y[:, step], weight, torch.arange(3))
        params, state = optimizer_step(local, params, state, batch, lr, only=only)
    for client in range(3):
        for key, value in by_torch(client, make, clip, only).named_parameters():
            torch.testing.assert_close(params[key][client], value.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_client_alone_makes_the_same_steps_as_in_a_stack(name: str) -> None:
    local = LocalTraining(Objective(net(0)), clip_norm=0.3, **OPTIMIZERS[name][0])
    alone = local.objective.params()
    stacked = stack([alone, alone])
    state_alone, state = (initial_optimizer_state(local, tree) for tree in (alone, stacked))
    lr, weight = torch.tensor(0.05, dtype=torch.float64), torch.ones(2, 8, dtype=torch.float64)
    for step in range(3):
        both = ClientStackedBatch(X[:2, step], Y[:2, step], weight, torch.arange(2))
        own = Batch(X[0, step], Y[0, step], weight[0], torch.tensor(0))
        alone, state_alone = optimizer_step(local, alone, state_alone, own, lr)
        stacked, state = optimizer_step(local, stacked, state, both, lr)
    for key, value in tree_index(stacked, torch.tensor(0)).items():
        torch.testing.assert_close(alone[key], value)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("method", [fc.FedAvg(), fc.FedProx(), fc.Clade(), fc.IFCA(clusters=2)])
def test_methods_train_with_adam(method: fc.Method, optimizer: Any, digits: Clients) -> None:
    result = fc.run(
        method, digits, fc.models.MLP(16), rounds=5, lr=0.002, optimizer=optimizer, clip_norm=1.0
    )
    first = fc.run(method, digits, fc.models.MLP(16), rounds=1, lr=1e-9)
    assert result.summary["train_loss"] < first.summary["train_loss"]


def test_adam_starts_with_a_new_state_in_every_call(digits: Clients) -> None:
    """Two rounds in one run are two runs of one round."""
    module = net(0).float()

    class Flat(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.inner(x)
            return outputs

    x, y = X[0, :, 0].float(), Y[0, :, 0]
    clients = fc.data.from_arrays([(x, y)])
    settings: dict[str, Any] = {"lr": 0.01, "optimizer": "adam", "batch_size": 100}
    twice = fc.run(fc.FedAvg(), clients, Flat(module), rounds=2, **settings)
    once = fc.run(fc.FedAvg(), clients, Flat(copy.deepcopy(module)), rounds=1, **settings)
    again = fc.run(fc.FedAvg(), clients, once.model_of(0), rounds=1, **settings)
    for first, second in zip(
        twice.model_of(0).parameters(), again.model_of(0).parameters(), strict=True
    ):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("method", [fc.SCAFFOLD(), fc.FedNova(), fc.PerFedAvg()])
def test_methods_that_need_sgd_refuse_adam(method: fc.Method, digits: Clients) -> None:
    with pytest.raises(
        fc.InvalidInputError, check=lambda e: e.field == "local.optimizer"
    ) as caught:
        fc.run(method, digits, fc.models.MLP(4), rounds=1, optimizer="adam")
    assert caught.value.field == "local.optimizer"
    assert method.name in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"optimizer": "lion"}, "local.optimizer"),
        ({"optimizer": "adam", "momentum": 0.9}, "local.momentum"),
        ({"clip_norm": -1.0}, "local.clip_norm"),
    ],
)
def test_settings_that_do_not_exist_are_refused(
    settings: dict[str, Any], field: str, digits: Clients
) -> None:
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == field):
        fc.run(fc.FedAvg(), digits, fc.models.MLP(4), rounds=1, **settings)
