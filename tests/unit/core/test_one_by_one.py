"""Models that vmap refuses: the same results, client by client."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedclade as fc
from fedclade.core import functional_model
from fedclade.core.functional_model import Objective
from fedclade.data import Clients, from_arrays

X = torch.randn(4, 12, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(48).view(4, 12) % 3


@pytest.fixture
def clients() -> Clients:
    parts = [(X[i, : 12 - i], Y[i, : 12 - i], X[i], Y[i]) for i in range(4)]
    return replace(from_arrays(parts), probe=X[0])


class Branch(nn.Module):
    """Two layers, of which the second is used only where the first gives a positive mean."""

    def __init__(self, vectorized: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.vectorized = vectorized

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        if self.vectorized:
            return self.last(torch.where(x.isnan().any(), -h, h))
        return self.last(-h if x.isnan().any() else h)


class Noise(nn.Module):
    """Adds random numbers of torch's generator to its inputs in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.rand_like(x) if self.training else x)


class Item(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1.0 + 0.0 * x.sum().item())


METHODS = [
    fc.FedAvg(),
    fc.FedProx(),
    fc.SCAFFOLD(),
    fc.PerFedAvg(),
    fc.IFCA(clusters=2),
    fc.CFL(),
    fc.Clade(),
    fc.FLISDC(),
    fc.FedGMCC(curve_steps=2),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_branch_on_values_gives_the_results_of_the_same_model_without_one(
    method: fc.Method, clients: Clients
) -> None:
    settings = {"rounds": 2, "clients_per_round": 1.0, "batch_size": 5, "momentum": 0.5}
    with pytest.warns(fc.FedcladeWarning) as caught:
        result = fc.run(method, clients, Branch(), **settings)
    assert {warning.message.field for warning in caught} == {"model"}  # type: ignore[union-attr]
    expected = fc.run(method, clients, Branch(vectorized=True), **settings)
    for client in range(4):
        first, second = (r.model_of(client).state_dict() for r in (result, expected))
        for name, value in second.items():
            torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)
    assert result.summary["loss"] == pytest.approx(expected.summary["loss"], rel=1e-4)


@pytest.mark.filterwarnings("ignore::fedclade.FedcladeWarning")
@pytest.mark.parametrize("model", [Noise(), Item(), Branch()])
def test_the_same_seed_gives_the_same_bytes_and_resumes_to_them(
    model: nn.Module, clients: Clients, tmp_path: object
) -> None:
    def run(rounds: int, out: str, resume: bool = False) -> list[Tensor]:
        torch.manual_seed(rounds)  # the state of torch's own generator does not matter
        result = fc.run(
            fc.SCAFFOLD(),
            clients,
            model,
            rounds=rounds,
            clients_per_round=0.5,
            out=f"{tmp_path}/{out}",
            resume=resume,
        )
        return list(result.model_of(0).state_dict().values())

    whole = run(4, "whole")
    run(2, "parts")
    assert all(map(torch.equal, run(4, "parts", resume=True), whole))


def test_random_numbers_of_a_model_come_from_the_key() -> None:
    objective = Objective(Noise(), x=X[0])
    assert not objective.vectorized
    params, x = objective.params(), X[0]
    first, again, other = (objective.outputs(params, x, torch.tensor(key)) for key in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(objective.outputs(params, x), copy.deepcopy(Noise()).eval()(x))


def test_a_model_that_cannot_be_traced_is_never_traced(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace would hold the branch of one batch."""
    from fedclade.engines import fx_tracing

    monkeypatch.setattr(fx_tracing, "WARMUP_STEPS", 0)
    monkeypatch.setattr(fx_tracing, "TRACE_AFTER", 0)

    class Sign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.mean() > 0 else self.layer(-x)

    with pytest.warns(fc.FedcladeWarning):
        traced = fc.run(fc.FedAvg(), clients, Sign(), rounds=3, epochs=20, batch_size=2)
    monkeypatch.undo()
    with pytest.warns(fc.FedcladeWarning):
        plain = fc.run(fc.FedAvg(), clients, Sign(), rounds=3, epochs=20, batch_size=2)
    assert all(map(torch.equal, traced.model_of(0).parameters(), plain.model_of(0).parameters()))


class Mixed(nn.Module):
    """Attention, dropout and BatchNorm, which run differently with and without vmap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(5)
        self.up = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.up(self.norm(x)[..., None])).mean(1))


@pytest.mark.parametrize("batch_size", [4, 1])
def test_large_models_run_alone_on_the_cpu_with_the_same_results(
    batch_size: int, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> fc.Result:
        return fc.run(
            fc.FedAvg(),
            clients,
            Mixed(),
            rounds=3,
            clients_per_round=1.0,
            batch_size=batch_size,
            device="cpu",
            profile=True,
        )

    together = run()
    monkeypatch.setattr(functional_model, "CPU_STACK_FLOPS", 1.0)
    alone = run()
    assert together.profile is not None
    assert alone.profile is not None
    assert "together" in together.profile.execution
    assert "one by one" in alone.profile.execution
    models = zip(
        together.model_of(0).state_dict().values(),
        alone.model_of(0).state_dict().values(),
        strict=True,
    )
    for first, second in models:
        assert torch.allclose(first, second, atol=1e-5)
    assert together.summary["loss"] == pytest.approx(alone.summary["loss"], abs=1e-5)


def test_the_choice_depends_on_the_operations_of_a_batch() -> None:
    objective = Objective(nn.Sequential(nn.Conv2d(1, 10, 3, padding=1), nn.Flatten()), x=X[:, None])
    flops = 2 * 10 * 9 * 12 * 5  # of an example
    most = int(functional_model.CPU_STACK_FLOPS // flops)
    assert not objective.runs_alone(most, torch.device("cpu"))
    assert objective.runs_alone(most + 1, torch.device("cpu"))
    assert not objective.runs_alone(most + 1, torch.device("cuda"))
