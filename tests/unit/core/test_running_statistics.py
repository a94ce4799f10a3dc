"""BatchNorm and other buffers that change in training, against plain loops of torch modules."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedclade as fc
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.running_statistics import batch_norm_names, statistic_names
from fedclade.data import Clients, from_arrays

SIZES = (9, 5, 7)  # clients of different sizes, so that batches are padded


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 6),
        nn.BatchNorm1d(6, momentum=0.3),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


@pytest.fixture
def images() -> Clients:
    generator = torch.Generator().manual_seed(1)
    parts = []
    for number, size in enumerate(SIZES):
        x = torch.randn(size, 2, 6, 6, generator=generator) * (number + 1) + number
        y = torch.randint(0, 3, (size,), generator=generator)
        parts.append((x, y, x, y))
    return replace(from_arrays(parts), probe=torch.randn(6, 2, 6, 6, generator=generator))


def trained(module: nn.Module, clients: Clients, client: int, momentum: float) -> nn.Module:
    """Three epochs of one full batch with torch alone."""
    module = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)
    rows = clients.train[client]
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(module(clients.x[rows]), clients.y[rows]).backward()
        optimizer.step()
    return module


def mean_of(modules: list[nn.Module]) -> dict[str, Tensor]:
    states = [module.state_dict() for module in modules]
    total = sum(SIZES)
    return {
        name: sum(
            (n / total * state[name].double() for n, state in zip(SIZES, states, strict=True)),
            torch.zeros(()),
        )
        for name in states[0]
    }


SETTINGS = {"clients_per_round": 1.0, "lr": 0.1, "batch_size": 100, "epochs": 3}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedavg_with_batch_norm_is_a_loop_of_torch_modules(
    images: Clients, momentum: float
) -> None:
    expected = net()
    for _ in range(2):
        modules = [trained(expected, images, client, momentum) for client in range(3)]
        expected.load_state_dict(mean_of(modules))
    result = fc.run(fc.FedAvg(), images, net(), rounds=2, momentum=momentum, **SETTINGS)
    state = result.model_of(0).state_dict()
    assert list(state) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)
    assert state["1.num_batches_tracked"] == 6


def test_chunks_do_not_mix_the_statistics_of_clients(images: Clients) -> None:
    alone = fc.run(fc.Local(), images, net(), rounds=1, chunk=1, **SETTINGS)
    together = fc.run(fc.Local(), images, net(), rounds=1, chunk=3, **SETTINGS)
    for client in range(3):
        first, second = (result.model_of(client).state_dict() for result in (alone, together))
        for name, value in first.items():
            torch.testing.assert_close(second[name], value, rtol=1e-5, atol=1e-6)
    assert alone.summary["loss"] == pytest.approx(together.summary["loss"], rel=1e-5)


def test_a_batch_of_one_example_leaves_the_statistics_as_they_are() -> None:
    objective = Objective(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    params = objective.params()
    batch = Batch(
        torch.ones(3, 2),
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([1.0, 0, 0]),
        torch.tensor(0),
    )
    _, statistics = objective.training_outputs(params, batch.x, batch.key, batch.weight)
    assert torch.equal(statistics["0.running_mean"], params["0.running_mean"])
    assert torch.equal(statistics["0.running_var"], params["0.running_var"])
    assert torch.isfinite(objective.loss(params, batch))


def test_statistics_are_found_by_the_type_of_the_layer_or_because_they_change() -> None:
    class Running(nn.Module):
        """Keeps a running mean of its inputs, and a table that never changes."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("center", torch.zeros(4))
            self.register_buffer("table", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.center = 0.5 * self.center + 0.5 * x.mean(0).detach()
            return self.layer((x - self.center) * self.table)

    assert statistic_names(net()) == tuple(name for name, _ in net().named_buffers())
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert statistic_names(Running(), x) == ("center",)
    assert statistic_names(Running()) == ()
    clients = from_arrays([(x, torch.tensor([0, 1, 0])), (x + 1, torch.tensor([0, 1, 0]))])
    result = fc.run(fc.FedAvg(), clients, Running(), rounds=1, lr=0.1, clients_per_round=1.0)
    torch.testing.assert_close(result.model_of(0).state_dict()["center"], 0.5 * (x.mean(0) + 0.5))


def test_the_names_of_batch_norm_layers_do_not_depend_on_how_they_are_called() -> None:
    module = nn.ModuleDict({"down": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))})
    names = batch_norm_names(module, tuple(dict(module.named_parameters())))
    assert names == tuple(
        f"down.1.{name}"
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    )


METHODS = [
    fc.FedAvg(),
    fc.FedProx(),
    fc.SCAFFOLD(),
    fc.SCAFFOLD(server_lr=0.5),
    fc.SCAFFOLD(option=1),
    fc.FedNova(),
    fc.PerFedAvg(),
    fc.PerFedAvg(variant="hessian-free"),
    fc.LGFedAvg(),
    fc.Local(),
    fc.IFCA(clusters=2),
    fc.FedSEM(clusters=2),
    fc.CFL(),
    fc.CFL(permute=True),
    fc.PCAHC(clusters=2),
    fc.Clade(),
    fc.FLISHC(),
    fc.FLISDC(),
    fc.FedGMCC(),
    fc.FedAvgFineTune(fine_tune_epochs=1),
    fc.FedPer(),
    fc.FedRep(head_epochs=1, final_head_epochs=1),
    fc.FedBABU(fine_tune_epochs=1),
    fc.Ditto(),
    fc.APFL(),
    fc.FedALA(first_passes=2),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_trains_a_model_with_batch_norm(method: fc.Method, images: Clients) -> None:
    result = fc.run(
        method, images, net(), rounds=2, clients_per_round=1.0, batch_size=3, momentum=0.5
    )
    for client in range(3):
        state = result.model_of(client).state_dict()
        assert all(torch.isfinite(value).all() for value in state.values())
        assert (state["1.running_var"] > 0).all()
        assert not torch.equal(state["1.running_mean"], torch.zeros(4))
        assert state["1.num_batches_tracked"] > 0
