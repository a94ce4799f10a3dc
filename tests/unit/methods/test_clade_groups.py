"""CladeGroups on small planted federations."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

import fedclade as fc
from fedclade.core import LocalTraining, ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.program_serialization import NodeContext, from_spec, to_spec
from fedclade.core.pytree import Tree, stack
from fedclade.core.rng import fold_in
from fedclade.data import (
    Clients,
    Iid,
    LabelClusters,
    LabelPermutation,
    QuantitySkew,
    RaggedIndex,
    load,
    partition,
)
from fedclade.methods._clade_groups_state import CladeGroupsState
from fedclade.models import MLP
from fedclade.programs.gradient_signature import private_signature


def bound(clients: Clients, method: fc.Method) -> tuple[fc.Method, fc.Simulator, Objective]:
    torch.manual_seed(0)
    assert clients.classes is not None
    objective = Objective(MLP(100).build(clients.shape, clients.classes))
    return (
        method.with_local_config(LocalTraining(objective)),
        fc.Simulator(clients),
        objective,
    )


def groups(clients: Clients, method: fc.Method) -> torch.Tensor:
    method, fed, objective = bound(clients, method)
    return method.init(fed, objective.params(), fold_in(0, "init")).cluster_ids


@pytest.mark.parametrize("kind", ["gradient", "features", "joint"])
def test_finds_label_clusters(kind: fc.programs.gradient_signature.SignatureKind) -> None:
    clients = partition(load("digits"), LabelClusters(clusters=5, classes=2), clients=40, seed=1)
    found = groups(clients, fc.CladeGroups(signature=kind, signature_dim=32))
    assert adjusted_rand_score(clients.groups, found) == 1.0


def test_gradients_see_permuted_labels_and_features_do_not() -> None:
    clients = partition(load("digits"), LabelPermutation(clusters=3), clients=12, seed=0, probe=0)
    assert (
        adjusted_rand_score(clients.groups, groups(clients, fc.CladeGroups(signature_dim=32)))
        == 1.0
    )
    assert (
        len(groups(clients, fc.CladeGroups(signature="features", signature_dim=32)).unique()) == 1
    )


def test_without_groups_it_is_fedavg_to_the_bit() -> None:
    clients = partition(load("digits"), Iid(), clients=20, seed=0)
    clade, fedavg = (
        fc.run(method, clients, MLP(20), rounds=3, device="cpu")
        for method in (fc.CladeGroups(), fc.FedAvg())
    )
    assert clade.summary["clusters"] == 1
    for name, value in clade.model_of(0).state_dict().items():
        assert torch.equal(value, fedavg.model_of(0).state_dict()[name])


def test_late_clients_join_their_group() -> None:
    clients = partition(load("digits"), LabelClusters(clusters=5, classes=2), clients=40, seed=0)
    early_ids = torch.tensor([client for client in range(40) if client % 8 < 6])
    early = replace(
        clients,
        train=RaggedIndex.of([clients.train[int(i)] for i in early_ids]),
        test_part_id=clients.test_part_id[early_ids],
    )
    method, fed, objective = bound(early, fc.CladeGroups(signature_dim=32))
    state = method.init(fed, objective.params(), fold_in(0, "init"))

    late_ids = torch.tensor([client for client in range(40) if client % 8 >= 6])
    order = torch.cat([early_ids, late_ids])
    everyone = replace(
        clients,
        train=RaggedIndex.of([clients.train[int(i)] for i in order]),
        test_part_id=clients.test_part_id[order],
    )
    later = fc.Simulator(everyone)
    state = method.add_clients(later, state, torch.arange(len(early_ids), 40), key=1)
    assert isinstance(state, CladeGroupsState)
    assert state.signature.shape == (40, 32)
    assert clients.groups is not None
    assert adjusted_rand_score(clients.groups[order], state.cluster_ids) == 1.0


@pytest.mark.parametrize("method", [fc.CladeGroups, fc.Clade])
def test_late_clients_are_assigned_without_labels(method: type[fc.CladeGroups]) -> None:
    clients = partition(load("digits"), LabelClusters(clusters=5, classes=2), clients=40, seed=0)
    late = [client for client in range(40) if client % 8 >= 6]
    unlabeled = clients.y.clone()
    for client in late:
        unlabeled[clients.train[client]] = 0
    absent: list[int] = []
    groups = []
    for y in (clients.y, unlabeled):
        absent[:] = late
        bound_method, _, objective = bound(clients, method(signature_dim=32, late="features"))
        fed = fc.Simulator(
            replace(clients, y=y),
            faults=lambda key, client, reply: None if client in absent else reply,
        )
        params = objective.params()
        fed.init_client_state(bound_method.initial_client_state(params))
        state = bound_method.init(fed, params, fold_in(0, "init"))
        assert (state.cluster_ids[late] == -1).all()
        absent.clear()
        state = bound_method.add_clients(fed, state, torch.tensor(late), key=1)
        groups.append(getattr(state, "group_ids", state.cluster_ids))
    assert torch.equal(*groups)
    assert adjusted_rand_score(clients.groups, groups[0]) == 1.0


@pytest.mark.parametrize("settings", [{"recluster_every": 5}, {"signature_epsilon": 1.0}])
def test_assignment_without_labels_excludes_other_options(settings: Any) -> None:
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == "method.late"):
        fc.CladeGroups(late="features", **settings)


def test_reclustering_moves_a_wrong_client_and_splits_merged_groups() -> None:
    clients = partition(load("digits"), LabelClusters(clusters=5, classes=2), clients=40, seed=0)
    method, fed, objective = bound(clients, fc.CladeGroups(signature_dim=32, recluster_every=6))
    method = method.with_local_config(LocalTraining(objective, lr=0.1, epochs=3))
    state = method.init(fed, objective.params(), fold_in(0, "init"))
    assert clients.groups is not None
    # Groups 3 and 4 as one, and client 0 with strangers.
    wrong = torch.where(state.cluster_ids == 4, 3, state.cluster_ids).index_fill(
        0, torch.tensor([0]), 2
    )
    state = replace(
        state, cluster_ids=wrong, models={name: value[:4] for name, value in state.models.items()}
    )
    for number in range(6):
        assert adjusted_rand_score(clients.groups, state.cluster_ids) < 1.0
        state = method.round(fed, state, torch.arange(40), key=number)
    assert adjusted_rand_score(clients.groups, state.cluster_ids) == 1.0
    assert len(state) == 5


def test_what_leaves_a_client_once_is_mean_and_scatter() -> None:
    clients = partition(load("digits"), Iid(), clients=10, seed=0)
    method, fed, objective = bound(clients, fc.CladeGroups())
    method.init(fed, objective.params(), 0)
    assert fed.traffic.up == 10 * 4 * (128 + 128 * 129 // 2)


def test_bad_fields_are_named() -> None:
    bad = {
        "signature": "vibes",
        "signature_dim": 1,
        "noise_ratio": 0.0,
        "recluster_every": -1,
        "signature_epsilon": 0.0,
        "signature_delta": 1.0,
        "signature_clip": 0.0,
    }
    for field, value in bad.items():
        with pytest.raises(fc.InvalidInputError) as caught:
            fc.CladeGroups(**{field: value})
        assert caught.value.field == f"method.{field}"


# --- signatures in noise


@pytest.mark.parametrize("kind", ["gradient", "joint"])
def test_finds_label_clusters_through_noise_until_there_is_too_much(
    kind: fc.programs.gradient_signature.SignatureKind,
) -> None:
    clients = partition(load("digits"), LabelClusters(clusters=5, classes=2), clients=40, seed=1)
    assert (
        adjusted_rand_score(
            clients.groups,
            groups(
                clients, fc.CladeGroups(signature=kind, signature_dim=32, signature_epsilon=3.0)
            ),
        )
        == 1.0
    )
    assert (
        len(
            groups(
                clients, fc.CladeGroups(signature=kind, signature_dim=32, signature_epsilon=0.1)
            ).unique()
        )
        == 1
    )


@pytest.mark.parametrize("epsilon", [1.0, 10.0])
def test_noise_makes_no_groups_of_clients_of_very_unequal_size(epsilon: float) -> None:
    """A small client's mean strays as 1 / n, no longer as 1 / sqrt(n)."""
    clients = partition(load("digits"), QuantitySkew(0.5), clients=40, seed=0)
    assert (
        len(groups(clients, fc.CladeGroups(signature_dim=32, signature_epsilon=epsilon)).unique())
        == 1
    )


def test_late_clients_join_their_group_through_noise() -> None:
    clients = partition(load("digits"), LabelClusters(clusters=5, classes=2), clients=20, seed=0)
    late, silent = [3, 7, 8, 15, 19], True
    method, _, objective = bound(clients, fc.CladeGroups(signature_dim=32, signature_epsilon=3.0))
    fed = fc.Simulator(
        clients, faults=lambda key, client, reply: None if silent and client in late else reply
    )
    state = method.init(fed, objective.params(), fold_in(0, "init"))
    silent = False
    state = method.add_clients(fed, state, torch.tensor(late), key=1)
    assert adjusted_rand_score(clients.groups, state.cluster_ids) == 1.0


def test_the_scatter_of_each_group_discloses_nothing_new() -> None:
    clients = partition(load("digits"), LabelClusters(clusters=5, classes=2), clients=20, seed=0)
    sent: list[dict[str, Any]] = [{} for _ in clients.sizes]
    calls = np.zeros(len(clients), int)

    def listen(key: int, client: int, reply: dict[str, Any]) -> dict[str, Any]:
        calls[client] += 1
        sent[client] |= {str(value.tolist()): name for name, value in reply.items()}
        return reply

    method, _, objective = bound(clients, fc.CladeGroups(signature_dim=32, signature_epsilon=3.0))
    method.init(fc.Simulator(clients, faults=listen), objective.params(), fold_in(0, "init"))
    assert calls.min() > 1
    assert all(sorted(values.values()) == ["mean", "scatter"] for values in sent)


def test_the_secret_is_not_sent_and_makes_the_noise() -> None:
    clients = partition(load("digits"), Iid(), clients=4, seed=0)
    _, fed, objective = bound(clients, fc.CladeGroups())
    secret = 987654321987654321
    program = private_signature(objective, "gradient", 8, 5, 1.0, 2.0, secret)
    words = json.dumps(to_spec(program))
    assert str(secret) not in words
    ids = torch.arange(4)
    each = ModelAssignment(stack([objective.params()]), torch.zeros_like(ids))
    original, same_secret, other_secret = (
        fed.map(variant, ids, per_client=each, key=0).outputs["mean"]
        for variant in (
            program,
            *(
                from_spec(json.loads(words), NodeContext(objective, secret=node_secret))
                for node_secret in (secret, secret + 1)
            ),
        )
    )
    assert torch.equal(original, same_secret)
    assert not torch.isclose(original, other_secret).any()
    # A method has no default secret: a node without a secret refuses the program.
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == "secret"):
        from_spec(
            json.loads(words),
            NodeContext(objective, secret=fc.CladeGroups(signature_epsilon=1.0).secret),
        )


def test_reclustering_is_refused_with_epsilon() -> None:
    with pytest.raises(
        fc.InvalidInputError,
        match="signature_epsilon",
        check=lambda error: error.field == "method.recluster_every",
    ):
        fc.CladeGroups(recluster_every=10, signature_epsilon=1.0)


@pytest.mark.parametrize("answering", [0, 10])
def test_clients_that_do_not_answer_at_a_later_level_make_no_groups(answering: int) -> None:
    """Their group has the scatter of those that answered, for all of its clients."""
    clients = partition(load("digits"), LabelPermutation(clusters=2), clients=40, seed=0, probe=0)
    method, _, objective = bound(clients, fc.CladeGroups())
    asked: Counter[int] = Counter()

    def faults(key: int, client: int, reply: Tree) -> Tree | None:
        asked[client] += 1
        return reply if asked[client] == 1 or client < answering else None

    fed = fc.Simulator(clients, faults=faults)
    found = method.init(fed, objective.params(), fold_in(0, "init")).cluster_ids
    assert max(asked.values()) > 1
    assert adjusted_rand_score(clients.groups, found) == 1.0
