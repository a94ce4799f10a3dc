"""SCAFFOLD on real MNIST in the setting in which it collapses to 10 % in published tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fedclade as fc


@pytest.mark.slow
def test_scaffold_does_not_collapse_under_dirichlet_label_skew(
    real_data: Callable[[str], Path],
) -> None:
    data = fc.data.load("mnist", root=real_data("mnist").parent)
    clients = fc.data.partition(data, fc.data.Dirichlet(alpha=0.1), clients=100, seed=0)
    ends = {}
    for method in (fc.FedAvg(), fc.SCAFFOLD()):
        result = fc.run(
            method,
            clients,
            fc.models.MLP(100),
            rounds=60,
            clients_per_round=10,
            lr=0.05,
            batch_size=32,
            eval_every=0,
        )
        ends[method.name] = result.summary["accuracy"]
    assert ends["fedavg"] > 75
    assert ends["scaffold"] > ends["fedavg"] - 3
