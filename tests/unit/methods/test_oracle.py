"""Oracle: FedAvg inside the true groups."""

import pytest
import torch

import fedclade as fc


@pytest.fixture(scope="module")
def clients() -> fc.data.Clients:
    return fc.data.partition(
        fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=5), clients=8, seed=0
    )


def test_its_clusters_are_the_true_groups(clients: fc.data.Clients) -> None:
    result = fc.run(fc.Oracle(), clients, fc.models.MLP(8), rounds=2, clients_per_round=1.0)
    assert result.summary["ari"] == 1.0
    assert torch.equal(result.clusters, clients.groups)


def test_a_group_trains_like_a_separate_federation(clients: fc.data.Clients) -> None:
    """With all clients in one group it is FedAvg, to the bit."""
    together = fc.data.from_arrays(
        [(clients.x[rows], clients.y[rows]) for rows in map(clients.train.__getitem__, range(4))],
        groups=[7] * 4,
    )
    oracle, fedavg = (
        fc.run(method, together, fc.models.MLP(8), rounds=2)
        for method in (fc.Oracle(), fc.FedAvg())
    )
    for name, weights in oracle.model_of(0).state_dict().items():
        assert torch.equal(weights, fedavg.model_of(0).state_dict()[name])


def test_it_needs_true_groups() -> None:
    clients = fc.data.from_arrays([(torch.rand(4, 2), torch.tensor([0, 1, 0, 1]))] * 3)
    with pytest.raises(fc.InvalidInputError, match="'oracle'"):
        fc.run(fc.Oracle(), clients, fc.models.MLP(8), rounds=1)
