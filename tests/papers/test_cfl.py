"""The main claim of CFL on MNIST: updates are enough to find groups whose labels contradict each
other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fedclade as fc
from fedclade.methods.cfl import CFL


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))]
)
def test_four_label_swaps_are_four_leaves(seed: int, real_data: Callable[[str], Path]) -> None:
    # As in the paper 20 clients in 4 groups, 3 local epochs, all clients in every round; here with
    # 200 images a client.
    data = fc.data.load("mnist", str(real_data("mnist").parent))
    clients = fc.data.partition(
        data, fc.data.LabelSwap(clusters=4, samples=200), clients=20, seed=seed
    )
    settings = {"clients_per_round": 1.0, "lr": 0.1, "batch_size": 20, "epochs": 3, "eval_every": 5}
    result = fc.run(
        CFL(), clients, fc.models.MLP(64), rounds=25, seed=seed, device="cpu", **settings
    )
    assert (result.summary["clusters"], result.summary["ari"]) == (4, 1.0)
    # Before the first split one model has to be wrong about the exchanged labels, after the last
    # none has.
    assert result.history[4]["clusters"] == 1
    assert result.history[4]["accuracy"] == pytest.approx(68.5, abs=2)
    assert result.summary["accuracy"] == pytest.approx(88.7, abs=1.5)
