"""The learning rate over the rounds, compared with torch's schedulers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer, lr_scheduler

import fedclade as fc
from fedclade.data import Clients
from fedclade.errors import DifferentExperimentError, InvalidInputError

Scheduler = lr_scheduler.LRScheduler
ROUNDS, LR = 12, 0.3


def torch_rates(make: Callable[[Optimizer], Scheduler]) -> list[float]:
    """The learning rate of each epoch, as a scheduler of torch sets it."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler = make(optimizer)
    rates = []
    for _ in range(ROUNDS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rates(**settings: Any) -> list[float]:
    local = fc.LocalConfig(lr=LR, **settings)
    return [local.lr_in_round(number, ROUNDS) for number in range(1, ROUNDS + 1)]


SCHEDULES: list[tuple[dict[str, Any], Callable[[Optimizer, int], Scheduler]]] = [
    ({}, lambda optimizer, rounds: lr_scheduler.ConstantLR(optimizer, 1.0)),
    (
        {"schedule": "exponential", "decay": 0.8},
        lambda optimizer, rounds: lr_scheduler.ExponentialLR(optimizer, 0.8),
    ),
    (
        {"schedule": "step", "decay": 0.5, "decay_every": 3},
        lambda optimizer, rounds: lr_scheduler.StepLR(optimizer, 3, 0.5),
    ),
    (
        {"schedule": "cosine"},
        lambda optimizer, rounds: lr_scheduler.CosineAnnealingLR(optimizer, rounds),
    ),
]
BY_NAME = pytest.mark.parametrize(
    ("settings", "make"), SCHEDULES, ids=["constant", "exponential", "step", "cosine"]
)


@BY_NAME
def test_the_learning_rates_are_those_of_torch(
    settings: dict[str, Any], make: Callable[[Optimizer, int], Scheduler]
) -> None:
    assert rates(**settings) == pytest.approx(torch_rates(lambda sgd: make(sgd, ROUNDS)))


@BY_NAME
def test_the_schedule_starts_after_the_warm_up(
    settings: dict[str, Any], make: Callable[[Optimizer, int], Scheduler]
) -> None:
    warmup = 4

    def sequence(sgd: Optimizer) -> Scheduler:
        first = lr_scheduler.LinearLR(sgd, 1 / (warmup + 1), total_iters=warmup)
        parts: list[Scheduler] = [first, make(sgd, ROUNDS - warmup)]
        return lr_scheduler.SequentialLR(sgd, parts, [warmup])

    assert rates(**settings, warmup_rounds=warmup) == pytest.approx(torch_rates(sequence))


def test_the_rates_of_the_warm_up_grow_by_equal_steps() -> None:
    assert rates(warmup_rounds=2)[:4] == pytest.approx([0.1, 0.2, 0.3, 0.3])


def test_a_warm_up_may_be_longer_than_the_run() -> None:
    assert rates(schedule="cosine", warmup_rounds=20)[-1] == pytest.approx(LR * 12 / 21)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"schedule": "linear"}, "local.schedule"),
        ({"decay": 0.5}, "local.decay"),
        ({"decay": 0.5, "schedule": "cosine"}, "local.decay"),
        ({"decay_every": 2}, "local.decay_every"),
        ({"decay_every": 2, "schedule": "exponential"}, "local.decay_every"),
        ({"warmup_rounds": -1}, "local.warmup_rounds"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        fc.LocalConfig(**settings)


def test_a_run_uses_the_rate_of_each_round(ragged: Clients) -> None:
    # In the limit of small steps a model moves by the sum of the learning rates.
    def moved(**settings: Any) -> float:
        model = torch.nn.Linear(6, 3)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        result = fc.run(
            fc.FedAvg(), ragged, model, rounds=3, clients_per_round=1.0, batch_size=100, **settings
        )
        return float(result.model_of(0).weight.detach().norm())

    constant = moved(lr=1e-4)
    assert moved(lr=1e-4, schedule="step", decay=0.1) == pytest.approx(
        constant * 1.11 / 3, rel=1e-3
    )
    assert moved(lr=1e-4, schedule="cosine") == pytest.approx(constant * 2 / 3, rel=1e-3)
    assert moved(lr=1e-4, warmup_rounds=2) == pytest.approx(constant * 2 / 3, rel=1e-3)


def test_a_run_with_cosine_cannot_be_made_longer(ragged: Clients, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": torch.nn.Linear(6, 3), "clients_per_round": 1.0}
    for schedule in ("cosine", "step"):
        out = tmp_path / schedule
        settings |= {"schedule": schedule, "out": out}
        fc.run(fc.FedAvg(), ragged, rounds=2, **settings)
        again = fc.run(fc.FedAvg(), ragged, rounds=2, resume=True, **settings)
        assert again.already_finished
    assert fc.run(fc.FedAvg(), ragged, rounds=3, resume=True, **settings).summary["rounds"] == 3
    settings |= {"schedule": "cosine", "out": tmp_path / "cosine"}
    with pytest.raises(DifferentExperimentError, match=r"run\.rounds was 2, now 3"):
        fc.run(fc.FedAvg(), ragged, rounds=3, resume=True, **settings)
