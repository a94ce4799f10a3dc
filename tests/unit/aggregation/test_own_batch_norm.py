"""`local.batch_norm = "own"` (FedBN), against plain loops of torch modules."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedclade as fc
from fedclade.conformance.in_process_federation import InProcessFederation
from fedclade.data import Clients, from_arrays
from fedclade.io import checkpoint
from fedclade.training.config import EngineConfig
from fedclade.training.runner import TrainingRun

SIZES = (9, 5, 7)  # clients of different sizes, so that batches are padded
OWN = {
    f"{layer}.{name}"
    for layer in ("bn1", "bn2", "downsample.1")
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}
SETTINGS: dict[str, Any] = {
    "clients_per_round": 1.0,
    "lr": 0.1,
    "batch_size": 100,
    "epochs": 2,
    "batch_norm": "own",
}


class Residual(nn.Module):
    """A residual block with the names of torchvision's, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(2, 4, 1, stride=2, bias=False), nn.BatchNorm2d(4))
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        h = F.relu(h + self.downsample(x))
        outputs: Tensor = self.fc(h.mean((2, 3)))
        return outputs


@pytest.fixture
def images() -> Clients:
    generator = torch.Generator().manual_seed(1)
    parts = []
    for number, size in enumerate(SIZES):
        x = torch.randn(size, 2, 6, 6, generator=generator) * (number + 1) + number
        y = torch.randint(0, 3, (size,), generator=generator)
        parts.append((x, y, x, y))
    return replace(from_arrays(parts), probe=torch.randn(6, 2, 6, 6, generator=generator))


def train(module: nn.Module, clients: Clients, client: int, momentum: float) -> None:
    optimizer = torch.optim.SGD(module.train().parameters(), lr=0.1, momentum=momentum)
    rows = clients.train[client]
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(module(clients.x[rows]), clients.y[rows]).backward()
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedbn_is_a_loop_of_torch_modules(images: Clients, momentum: float) -> None:
    modules = [Residual() for _ in SIZES]
    for _ in range(3):
        for client, module in enumerate(modules):
            train(module, images, client, momentum)
        states = [copy.deepcopy(module.state_dict()) for module in modules]
        for name in states[0].keys() - OWN:
            weighted = [n / sum(SIZES) * s[name] for n, s in zip(SIZES, states, strict=True)]
            mean = torch.stack(weighted).sum(0)
            for module in modules:
                module.state_dict()[name].copy_(mean)
    result = fc.run(
        fc.FedAvg(), images, Residual(), rounds=3, momentum=momentum, **SETTINGS, eval_every=0
    )
    for client, module in enumerate(modules):
        got = result.model_of(client).state_dict()
        for name, value in module.state_dict().items():
            assert torch.allclose(got[name].double(), value.double(), atol=1e-5), name
    first, second = (result.model_of(client).state_dict() for client in (0, 1))
    assert {name for name in first if not torch.equal(first[name], second[name])} == OWN - {
        f"{layer}.num_batches_tracked" for layer in ("bn1", "bn2", "downsample.1")
    }


def test_a_client_is_evaluated_with_its_own_layers(images: Clients) -> None:
    result = fc.run(fc.FedAvg(), images, Residual(), rounds=2, **SETTINGS)
    for client, accuracy in enumerate(result.clients["accuracy"]):
        rows = images.train[client]
        module = result.model_of(client).eval()
        right = (module(images.x[rows]).argmax(1) == images.y[rows]).double().mean()
        assert 100 * float(right) == pytest.approx(accuracy)


def test_the_layers_stay_out_of_models_and_messages(images: Clients, tmp_path: Path) -> None:
    result = fc.run(
        fc.FedAvg(), images, Residual(), rounds=2, **SETTINGS, checkpoint_every=1, out=tmp_path
    )
    last = checkpoint.latest(tmp_path / "checkpoint")
    assert last is not None
    models = {name.removeprefix("models/") for name in last.state if name.startswith("models/")}
    params = dict(Residual().named_parameters())
    assert models == params.keys() - OWN
    shared = sum(params[name].numel() * 4 for name in models)
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == 2 * len(SIZES) * shared
    stored = {name.removeprefix("rows/batch_norm/") for name in last.memory}
    assert stored - {"ids"} == OWN


def test_a_client_that_never_trained_has_the_initial_layers(images: Clients) -> None:
    engine = fc.Simulator(images, faults=lambda key, client, reply: reply if client else None)
    result = TrainingRun(
        fc.FedAvg(),
        images,
        Residual(),
        fc.LocalConfig(batch_norm="own"),
        fc.TrainingConfig(rounds=2, clients_per_round=1.0),
        EngineConfig(),
        federation=engine,
    ).run()
    absent, present = (result.model_of(client).state_dict() for client in (0, 1))
    initial = Residual().state_dict()
    for name in initial:
        if name in OWN:
            assert torch.equal(absent[name], initial[name])
            assert not torch.equal(present[name], initial[name])
        else:
            assert torch.equal(absent[name], present[name])


class StopError(Exception):
    pass


@pytest.mark.parametrize(
    "method",
    [fc.SCAFFOLD(), fc.IFCA(clusters=2), fc.CFL(eps1=10.0, eps2=0.0, gamma_max=0.0), fc.Clade()],
    ids=lambda method: method.name,
)
def test_a_run_with_all_settings_of_the_server_resumes_to_the_same_bytes(
    method: fc.Method, images: Clients, tmp_path: Path
) -> None:
    def run(folder: str, stop: int = 0) -> fc.Result:
        def on_round(row: Any) -> None:
            if row["round"] == stop:
                raise StopError

        return fc.run(
            method,
            images,
            Residual(),
            rounds=3,
            **SETTINGS,
            aggregator="median",
            server_optimizer="fedyogi",
            serve="mean",
            checkpoint_every=1,
            out=tmp_path / folder,
            resume=(tmp_path / folder).exists(),
            on_round=on_round,
        )

    run("whole")
    with pytest.raises(StopError):
        run("stopped", stop=2)
    run("stopped")
    whole, stopped = (
        (tmp_path / folder / "models" / "models.safetensors").read_bytes()
        for folder in ("whole", "stopped")
    )
    assert whole == stopped


def test_local_training_is_the_same_with_both_settings(images: Clients) -> None:
    settings = {**SETTINGS, "rounds": 2}
    own = fc.run(fc.Local(), images, Residual(), **settings)
    average = fc.run(fc.Local(), images, Residual(), **{**settings, "batch_norm": "average"})
    for client in range(len(SIZES)):
        one, other = (run.model_of(client).state_dict() for run in (own, average))
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "method",
    [fc.FLISDC(), fc.FLISHC(), fc.FedGMCC(), fc.CFL(permute=True)],
    ids=lambda method: method.name,
)
def test_methods_whose_server_needs_the_layers_refuse(method: fc.Method, images: Clients) -> None:
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == "local.batch_norm"):
        fc.run(method, images, Residual(), **SETTINGS)


def test_a_model_without_batch_norm_is_refused(images: Clients) -> None:
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == "local.batch_norm"):
        fc.run(fc.FedAvg(), images, fc.models.MLP(4), **SETTINGS)


def test_nodes_give_the_models_and_metrics_of_the_simulator(images: Clients) -> None:
    local = fc.LocalConfig(lr=0.1, batch_size=100, batch_norm="own")
    settings = fc.TrainingConfig(rounds=2, clients_per_round=1.0)
    objective = fc.core.Objective(Residual(), x=images.x[:2])
    nodes = InProcessFederation(images, fc.core.program_serialization.NodeContext(objective))
    for node in nodes.in_process.connected.values():
        node.metrics = {"accuracy": fc.core.accuracy}
    simulated, remote = (
        TrainingRun(
            fc.PerFedAvg(),
            images,
            Residual(),
            local,
            settings,
            EngineConfig(),
            federation=engine,
            personal=fc.PersonalConfig("finetune", 1),
        ).run()
        for engine in (fc.Simulator(images), nodes)
    )
    for name in ("accuracy", "loss", "accuracy_shared"):
        assert remote.summary[name] == pytest.approx(simulated.summary[name], rel=1e-5)
    saved = {
        name: model
        for node in nodes.in_process.connected.values()
        for name, model in node.state_store.models.items()  # type: ignore[attr-defined]
    }
    for client in range(len(SIZES)):
        for name, value in simulated.model_of(client).state_dict().items():
            stored = saved[str(client)][name]
            assert torch.allclose(stored.double(), value.double(), atol=1e-5), name
