"""Traced steps give the same bytes as the original steps, for every method."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedclade import SCAFFOLD, FedAvg, LGFedAvg, Method, PerFedAvg, run
from fedclade.data import Clients
from fedclade.engines import fx_tracing
from fedclade.methods import METHODS
from fedclade.models import MLP
from fedclade.training.result import Result

OPTIONS: list[Method] = [SCAFFOLD(option=1), PerFedAvg(variant="hessian-free")]
# FedBN needs a model with BatchNorm.
EVERY = [*(method() for name, method in METHODS.items() if name != "fedbn"), *OPTIONS]


def trained(
    monkeypatch: pytest.MonkeyPatch,
    trace_after: int,
    method: Method,
    clients: Clients,
    model: object,
    **settings: object,
) -> Result:
    monkeypatch.setattr(fx_tracing, "TRACE_AFTER", trace_after)
    return run(
        method,
        clients,
        model,
        rounds=3,
        clients_per_round=0.5,
        seed=3,
        device="cpu",
        batch_size=4,
        **settings,
    )  # type: ignore[arg-type]


def same(a: Result, b: Result) -> bool:
    models = [
        [result.model_of(client).state_dict() for client in range(len(result.clusters))]
        for result in (a, b)
    ]
    return a.summary["train_loss"] == b.summary["train_loss"] and all(
        torch.equal(first[name], second[name])
        for first, second in zip(*models, strict=True)
        for name in first
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", EVERY, ids=lambda method: method.name)
def test_a_traced_step_gives_the_same_bytes(
    method: Method, small_digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, traced = (
        trained(monkeypatch, trace_after, method, small_digits, MLP(8, dropout=0.3), momentum=0.5)
        for trace_after in (10**9, 0)
    )
    assert same(plain, traced)


@pytest.mark.parametrize(
    ("method", "batch_norm"), [(FedAvg(), "own"), (LGFedAvg(local_layers=("7",)), "average")]
)
def test_a_traced_step_may_get_its_carry_in_another_order(
    method: Method, batch_norm: str, small_digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first carry has the client's own layers last, later ones have statistics last."""
    torch.manual_seed(0)
    norms = (nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), *norms, nn.Tanh(), nn.Linear(8, 10)
    )
    plain, traced = (
        trained(monkeypatch, trace_after, method, small_digits, model, batch_norm=batch_norm)
        for trace_after in (10**9, 0)
    )
    assert same(plain, traced)


def test_a_traced_hand_written_step_gives_the_same_bytes(
    digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(monkeypatch, 10**9, FedAvg(), digits, MLP(8), weight_decay=0.1)
    assert same(plain, trained(monkeypatch, 0, FedAvg(), digits, MLP(8), weight_decay=0.1))


def test_a_step_is_traced_after_many_runs(digits: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[object] = []
    real = fx_tracing._trace
    monkeypatch.setattr(fx_tracing, "_trace", lambda *args: traced.append(args[0]) or real(*args))
    steps = 0
    for trace_after, expected in ((10**6, 0), (20, 1)):
        monkeypatch.setattr(fx_tracing, "TRACE_AFTER", trace_after)
        result = run(
            FedAvg(),
            digits,
            MLP(8),
            rounds=2,
            clients_per_round=1,
            device="cpu",
            batch_size=1,
            threads=1,
            profile=True,
        )
        assert result.profile is not None
        steps += result.profile.asked
        assert len(traced) >= expected
        assert (len(traced) > 0) == (expected > 0)
    assert steps > 40


class Untraceable(nn.Module):
    """Raises an error when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise NotImplementedError("not under a dispatch mode")
        return self.layer(x.flatten(1))


def test_a_model_that_cannot_be_traced_runs(
    digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Untraceable()
    assert same(
        trained(monkeypatch, 10**9, FedAvg(), digits, model),
        trained(monkeypatch, 0, FedAvg(), digits, model),
    )
