"""CladeGroups on real data: the right groups without hyper-parameters, and none if there are none.
`benchmarks/clade_groups.py` has them all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

import fedclade as fc
from fedclade.core.functional_model import Objective
from fedclade.core.rng import fold_in
from fedclade.data import (
    Clients,
    Iid,
    LabelClusters,
    LabelPermutation,
    LabelSwap,
    PowerLawClusters,
    Rotation,
    Scheme,
    load,
    partition,
)

PLANTED: list[tuple[Scheme, int]] = [
    (LabelClusters(5, 2, samples=30), 100),
    (LabelClusters(5, 3, overlap=1, samples=30), 100),
    (LabelPermutation(4, samples=100), 40),
    (Rotation(4, samples=50), 40),
    (LabelSwap(4, samples=100), 40),
]


def groups(clients: Clients, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    assert clients.classes is not None
    objective = Objective(fc.models.MLP(200).build(clients.shape, clients.classes))
    method = fc.CladeGroups().with_local_config(fc.core.LocalTraining(objective))
    return method.init(fc.Simulator(clients), objective.params(), fold_in(seed, "init")).cluster_ids


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("scheme", "count"), PLANTED, ids=lambda value: getattr(value, "name", None)
)
def test_finds_planted_groups_on_mnist(
    real_data: Callable[[str], Path], scheme: Scheme, count: int, seed: int
) -> None:
    clients = partition(load("mnist", real_data("mnist").parent), scheme, count, seed)
    assert adjusted_rand_score(clients.groups, groups(clients, seed)) >= 0.99


@pytest.mark.parametrize("seed", range(5))
def test_finds_no_groups_if_there_are_none(real_data: Callable[[str], Path], seed: int) -> None:
    mnist = load("mnist", real_data("mnist").parent)
    rows = torch.randperm(60_000, generator=torch.Generator().manual_seed(seed))[:1200]
    few = fc.data.dataset(mnist.x_train[rows], mnist.y_train[rows], mnist.x_test, mnist.y_test)
    assert not groups(partition(few, Iid(), 40, seed, probe=0), seed).any()


@pytest.mark.slow
def test_finds_the_ten_groups_of_scenario_4(real_data: Callable[[str], Path]) -> None:
    clients = partition(
        load("emnist47", real_data("emnist47").parent), PowerLawClusters(), 2400, seed=0
    )
    assert adjusted_rand_score(clients.groups, groups(clients, 0)) == 1.0
