"""Training in bfloat16: near float32, with float32 wherever numbers add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedclade as fc
from fedclade.core.functional_model import Batch, ClientStackedBatch, Objective
from fedclade.core.kernels import activation_taps
from fedclade.data import Clients
from fedclade.engines import device as device_module
from fedclade.engines.device import has_bf16
from fedclade.engines.simulator import Simulator
from fedclade.errors import InvalidInputError
from fedclade.training import experiment_file

CPU = torch.device("cpu")


@pytest.fixture
def with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without these instructions computes the same numbers, but slowly."""
    monkeypatch.setattr(device_module, "has_bf16", lambda device: True)


@pytest.fixture(scope="module")
def digits() -> Clients:
    scheme = fc.data.LabelClusters(clusters=5, classes=2)
    return fc.data.partition(fc.data.load("digits"), scheme, clients=20, seed=0)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x.view(-1, 1, 8, 8))).relu()
        outputs: Tensor = self.last(self.drop(y.flatten(1)))
        return outputs


@pytest.mark.parametrize("model", ["mlp", "convolutional", "columns", "client by client"])
@pytest.mark.usefixtures("with_bf16")
def test_accuracy_is_within_a_point_and_the_same_seed_gives_the_same_bytes(
    model: str, digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model in ("columns", "client by client"):  # as on CUDA
        monkeypatch.setattr(activation_taps, "in_columns", lambda x: True)
        large = model == "client by client"
        monkeypatch.setattr(activation_taps, "is_large", lambda layer, x, columns: large)

    def run(precision: Any) -> fc.Result:
        torch.manual_seed(0)
        module = fc.models.MLP(50) if model == "mlp" else Convolutional()
        settings: dict[str, Any] = {"rounds": 10, "clients_per_round": 1.0, "eval_every": 0}
        return fc.run(fc.Clade(), digits, module, precision=precision, device="cpu", **settings)

    full, half, again = run("float32"), run("bf16"), run("bf16")
    assert full.summary["accuracy"] is not None
    assert half.summary["accuracy"] == pytest.approx(full.summary["accuracy"], abs=1.0)
    states = [result.model_of(0).state_dict() for result in (full, half, again)]
    for name, value in states[1].items():
        assert value.dtype == states[0][name].dtype
        assert torch.equal(value, states[2][name])
    assert any(not torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.parametrize("vectorized", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_a_gradient_is_that_of_torchs_autocast(vectorized: bool, dense: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    x, y = torch.randn(2, 8, 6), torch.randint(0, 3, (2, 8))
    objective = Objective(module, None, x[0], bf16=True)
    if not vectorized:
        objective._not_vectorized = "it is tested"
    if not dense:
        objective._dense = None
    params = {name: torch.stack([v, v + 0.1]) for name, v in objective.params().items()}
    got = objective.gradient(params, ClientStackedBatch(x, y, torch.ones(2, 8), torch.arange(2)))
    for client in range(2):
        own = {name: value[client].clone().requires_grad_() for name, value in params.items()}
        with torch.autocast("cpu", torch.bfloat16):
            outputs = torch.func.functional_call(module, own, (x[client],))
        assert outputs.dtype == torch.bfloat16
        loss = F.cross_entropy(outputs.float(), y[client])
        for name, gradient in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
            assert got[name].dtype == torch.float32
            torch.testing.assert_close(got[name][client], gradient, atol=2e-3, rtol=2e-2)


def test_outputs_losses_and_features_are_float32() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    full, half = Objective(module, None, x), Objective(module, None, x, bf16=True)
    params, batch = full.params(), Batch(x, y, torch.ones(8), torch.tensor(0))
    for name, value in half.params().items():
        assert torch.equal(value, params[name])
    for one, two in zip(
        (*half.features(params, x), half.loss(params, batch)),
        (*full.features(params, x), full.loss(params, batch)),
        strict=True,
    ):
        assert one.dtype == torch.float32
        assert not torch.equal(one, two)
        torch.testing.assert_close(one, two, atol=1e-2, rtol=2e-2)


def test_a_device_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch, ragged: Clients) -> None:
    monkeypatch.setattr(device_module, "has_bf16", lambda device: False)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "engine.precision"):
        Simulator(ragged, precision="bf16")
    Simulator(ragged, precision="tf32")


def test_an_unknown_precision_is_refused(ragged: Clients) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "engine.precision"):
        Simulator(ragged, precision="fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize("supported", [True, False])
def test_the_cpus_instructions_decide(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module.platform, "machine", lambda: "x86_64")
    for check in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, check, lambda: supported, raising=False)
    assert has_bf16(CPU) == supported


def test_flower_refuses_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = pytest.importorskip("fedclade.integrations.flower.simulation")
    monkeypatch.setattr(device_module, "has_bf16", lambda device: False)
    tables = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "clients": 4},
        "model": {"name": "logistic"},
        "method": {"name": "fedavg"},
        "engine": {"precision": "bf16"},
    }
    clients = experiment_file.experiment(tables).clients(None)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "engine.precision"):
        simulation.simulate(tables, clients, tmp_path, nodes=2)
