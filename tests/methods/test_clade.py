"""Clade on small planted federations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

import fedclade as fc
from fedclade.client.keys import fold
from fedclade.client.objective import Objective
from fedclade.data import Clients, Iid, LabelClusters, LabelPermutation, Parts, load, partition
from fedclade.methods.clade import CladeState
from fedclade.models import MLP


def bound(clients: Clients, method: fc.Method) -> tuple[fc.Method, fc.Simulator, Objective]:
    torch.manual_seed(0)
    assert clients.classes is not None
    objective = Objective(MLP(100).build(clients.shape, clients.classes))
    return method.bind(fc.LocalTraining(objective)), fc.Simulator(clients), objective


def groups(clients: Clients, method: fc.Method) -> torch.Tensor:
    method, fed, objective = bound(clients, method)
    return method.init(fed, objective.params(), fold(0, "init")).cluster


@pytest.mark.parametrize("kind", ["gradient", "features", "joint"])
def test_finds_label_clusters(kind: fc.methods.clade.SignatureKind) -> None:
    clients = partition(load("digits"), LabelClusters(clusters=5, classes=2), clients=40, seed=1)
    found = groups(clients, fc.Clade(signature=kind, size=32))
    assert adjusted_rand_score(clients.groups, found) == 1.0


def test_gradients_see_permuted_labels_and_features_do_not() -> None:
    clients = partition(load("digits"), LabelPermutation(clusters=3), clients=12, seed=0, probe=0)
    assert adjusted_rand_score(clients.groups, groups(clients, fc.Clade(size=32))) == 1.0
    assert len(groups(clients, fc.Clade(signature="features", size=32)).unique()) == 1


def test_without_groups_it_is_fedavg_to_the_bit() -> None:
    clients = partition(load("digits"), Iid(), clients=20, seed=0)
    clade, fedavg = (fc.run(method, clients, MLP(20), rounds=3, device="cpu") for method in (fc.Clade(), fc.FedAvg()))
    assert clade.summary["clusters"] == 1
    for name, value in clade.model_of(0).state_dict().items():
        assert torch.equal(value, fedavg.model_of(0).state_dict()[name])


def test_late_clients_join_their_group() -> None:
    clients = partition(load("digits"), LabelClusters(clusters=5, classes=2), clients=40, seed=0)
    early_ids = torch.tensor([client for client in range(40) if client % 8 < 6])
    early = replace(clients, train=Parts.of([clients.train[int(i)] for i in early_ids]), test_of=clients.test_of[early_ids])
    method, fed, objective = bound(early, fc.Clade(size=32))
    state = method.init(fed, objective.params(), fold(0, "init"))

    late_ids = torch.tensor([client for client in range(40) if client % 8 >= 6])
    order = torch.cat([early_ids, late_ids])
    everyone = replace(clients, train=Parts.of([clients.train[int(i)] for i in order]), test_of=clients.test_of[order])
    later = fc.Simulator(everyone)
    state = method.admit(later, state, torch.arange(len(early_ids), 40), key=1)
    assert isinstance(state, CladeState)
    assert state.signature.shape == (40, 32)
    assert clients.groups is not None
    assert adjusted_rand_score(clients.groups[order], state.cluster) == 1.0


def test_confirmation_mends_a_client_in_the_wrong_group_and_splits_what_was_merged() -> None:
    clients = partition(load("digits"), LabelClusters(clusters=5, classes=2), clients=40, seed=0)
    method, fed, objective = bound(clients, fc.Clade(size=32, confirm=6))
    method = method.bind(fc.LocalTraining(objective, lr=0.1, epochs=3))
    state = method.init(fed, objective.params(), fold(0, "init"))
    assert clients.groups is not None
    # Groups 3 and 4 as one, and client 0 with strangers.
    wrong = torch.where(state.cluster == 4, 3, state.cluster).index_fill(0, torch.tensor([0]), 2)
    state = replace(state, cluster=wrong, models={name: value[:4] for name, value in state.models.items()})
    for number in range(6):
        assert adjusted_rand_score(clients.groups, state.cluster) < 1.0
        state = method.round(fed, state, torch.arange(40), key=number)
    assert adjusted_rand_score(clients.groups, state.cluster) == 1.0
    assert len(state) == 5


def test_what_leaves_a_client_once_is_mean_and_scatter() -> None:
    clients = partition(load("digits"), Iid(), clients=10, seed=0)
    method, fed, objective = bound(clients, fc.Clade())
    method.init(fed, objective.params(), 0)
    assert fed.traffic.up == 10 * 4 * (128 + 128 * 129 // 2)


def test_bad_fields_are_named() -> None:
    for field, value in (("signature", "vibes"), ("size", 1), ("factor", 0.0), ("confirm", -1)):
        with pytest.raises(fc.InvalidInput, match=f"method.{field}"):
            fc.Clade(**{field: value})
