"""FLT's claim on MNIST, Scenario 1 (arXiv 2103.15947): with k = 2 the thresholded graph on UMAP's
plane has the five groups.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from fedclade import Simulator
from fedclade.core.rng import fold_in
from fedclade.data import LabelClusters, load, partition
from fedclade.methods.flt import FLT
from fedclade.training.setup import inject_context


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))]
)
def test_scenario_1_has_five_groups(real_data: Callable[[str], Path], seed: int) -> None:
    clients = partition(
        load("mnist", real_data("mnist").parent),
        LabelClusters(clusters=5, classes=2),
        clients=100,
        seed=seed,
    )
    method = inject_context(FLT(k=2), clients.metadata, seed)
    state = method.init(Simulator(clients), {"w": torch.zeros(1)}, key=fold_in(seed, "init"))
    assert len(state.cluster_ids.unique()) == 5
    assert adjusted_rand_score(clients.groups, state.cluster_ids) == 1.0
