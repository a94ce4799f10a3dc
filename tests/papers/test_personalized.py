"""What the papers on personalized methods claim, on small federations of digits: with few classes
per client they are far above FedAvg; with data that are nearly alike, FedRep falls below it and
FedALA does not.
"""

from __future__ import annotations

from functools import cache

import pytest

import fedclade as fc
from fedclade.data.partitioning.base import Scheme
from fedclade.methods import METHODS

SCHEMES: dict[str, Scheme] = {
    "two classes": fc.data.Pathological(classes_per_client=2),
    "Dirichlet(0.1)": fc.data.Dirichlet(alpha=0.1),
    "Dirichlet(5)": fc.data.Dirichlet(alpha=5.0),
}
PERSONALIZED = ("fedavg_finetune", "ditto", "fedrep", "fedbabu", "fedala", "knn_per")


@cache
def accuracy(name: str, scheme: str) -> float:
    """The mean of two seeds."""
    results = []
    for seed in (0, 1):
        clients = fc.data.partition(fc.data.load("digits"), SCHEMES[scheme], clients=20, seed=seed)
        result = fc.run(
            METHODS[name](),
            clients,
            fc.models.MLP(64),
            rounds=20,
            clients_per_round=0.5,
            lr=0.1,
            batch_size=10,
            epochs=2,
            eval_every=0,
            seed=seed,
            device="cpu",
        )
        results.append(result.summary["accuracy"] or 0.0)
    return sum(results) / len(results)


@pytest.mark.parametrize("scheme", ["two classes", "Dirichlet(0.1)"])
@pytest.mark.parametrize("name", PERSONALIZED)
def test_personalized_methods_are_above_fedavg_where_clients_have_few_classes(
    name: str, scheme: str
) -> None:
    fedavg = accuracy("fedavg", scheme)
    half_of_the_gap = (accuracy("local", scheme) - fedavg) / 2
    assert accuracy(name, scheme) - fedavg >= min(5.0, half_of_the_gap)


def test_fedrep_falls_below_fedavg_where_clients_are_alike() -> None:
    assert accuracy("fedrep", "Dirichlet(5)") < accuracy("fedavg", "Dirichlet(5)")


def test_fedala_stays_near_fedavg_where_clients_are_alike() -> None:
    assert abs(accuracy("fedala", "Dirichlet(5)") - accuracy("fedavg", "Dirichlet(5)")) < 2
