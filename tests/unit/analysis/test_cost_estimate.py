"""The estimated cost of a run."""

from __future__ import annotations

import pytest

import fedclade as fc
from fedclade.analysis import cost_estimate
from fedclade.analysis.cost_estimate import estimate_cost
from fedclade.training.config import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.runner import TrainingRun


def run_of(clients: fc.data.Clients, method: fc.Method, rounds: int, every: int) -> TrainingRun:
    return TrainingRun(
        method,
        clients,
        fc.models.MLP(8),
        LocalConfig(),
        TrainingConfig(rounds, 4, eval_every=every),
        EngineConfig(),
        "cpu",
    )


@pytest.mark.parametrize("rounds", [1, 2, 3, 30])
@pytest.mark.parametrize("every", [0, 1, 4])
def test_traffic_of_rounds_that_cost_the_same_is_exact(
    rounds: int, every: int, small_digits: fc.data.Clients
) -> None:
    run = run_of(small_digits, fc.FedAvg(), rounds, every)
    summary = run.run().summary
    estimate = estimate_cost(run)
    assert (estimate.bytes_up, estimate.bytes_down) == (
        summary["bytes_up"],
        summary["bytes_down"],
    )
    assert estimate.timed_rounds == min(rounds, cost_estimate.TIMED_ROUNDS)


def test_slow_rounds_are_few(
    small_digits: fc.data.Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_estimate, "TIMED_SECONDS", 0.0)
    run = run_of(small_digits, fc.FedAvg(), 50, 10)
    estimate = estimate_cost(run)
    assert (estimate.rounds, estimate.timed_rounds) == (50, 1)
    assert estimate.bytes_up == run.run().summary["bytes_up"]
