"""The share of clients that a method serves worse than a baseline."""

from __future__ import annotations

import math
from typing import Any

from fedclade.analysis.clients_hurt import shares_hurt
from fedclade.analysis.significance import Measured


def run(title: str, seed: int, *values: float | None, loss: bool = False) -> Measured:
    summary: dict[str, Any] = {"method": title.split(",")[0], "accuracy": None if loss else 1.0}
    return Measured(title, seed, "clients", summary, {"loss" if loss else "accuracy": values})


def test_clients_below_the_baseline_count() -> None:
    found = shares_hurt(
        [
            run("fedavg", 0, 50, 60, 70, 80),
            run("clade", 0, 90, 59, 70, 10),
            run("local", 0, 0, 0, 99, 99),
        ]
    )
    assert found == {"fedavg": {"clade": 50, "local": 50}, "local": {"fedavg": 50, "clade": 50}}


def test_it_is_the_mean_over_seeds_of_the_same_clients() -> None:
    runs = [run("fedavg", 0, 50, 50), run("fedavg", 1, 50, 50)]
    found = shares_hurt(
        [*runs, run("clade", 0, 40, 60), run("clade", 1, 60, 60), run("clade", 2, 0, 0)]
    )
    assert found == {"fedavg": {"clade": 25}}


def test_a_higher_loss_is_worse() -> None:
    runs = [run("fedavg", 0, 1.0, 1.0, loss=True), run("clade", 0, 0.5, 2.0, loss=True)]
    assert shares_hurt(runs) == {"fedavg": {"clade": 50}}


def test_clients_without_a_value_do_not_count() -> None:
    runs = [run("fedavg", 0, 50, None, 50), run("clade", 0, 40, 10, math.nan)]
    assert shares_hurt(runs) == {"fedavg": {"clade": 100}}


def test_a_baseline_with_several_settings_is_left_out() -> None:
    runs = [run("fedavg, lr=0.1", 0, 50), run("fedavg, lr=0.2", 0, 50), run("clade", 0, 40)]
    assert shares_hurt(runs) == {}
