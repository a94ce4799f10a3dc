"""Clade: class priors, candidates and their comparison on small federations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from torch import nn

import fedclade as fc
from fedclade.aggregation.federation_view import FederationView
from fedclade.core import LocalTraining
from fedclade.core.federation import ClientResults
from fedclade.core.functional_model import Objective
from fedclade.core.program import AnyProgram
from fedclade.core.rng import fold_in
from fedclade.data import (
    Clients,
    Dirichlet,
    Iid,
    LabelClusters,
    LabelPermutation,
    RaggedIndex,
    Rotation,
    Scheme,
    from_arrays,
    load,
    partition,
)
from fedclade.methods._candidates import CladeState
from fedclade.methods._class_prior import keep_offsets

FAST: dict[str, Any] = {"device": "cpu", "eval_every": 0, "lr": 0.1, "epochs": 2}


def digits(scheme: Scheme, clients: int = 20, seed: int = 0) -> Clients:
    return partition(load("digits"), scheme, clients=clients, seed=seed, probe=0)


def started(
    clients: Clients, module: nn.Module | None = None, **settings: Any
) -> tuple[fc.Clade, fc.Simulator, CladeState]:
    torch.manual_seed(0)
    if module is None:
        assert clients.classes is not None
        module = fc.models.MLP(32).build(clients.shape, clients.classes)
    objective = Objective(module, settings.pop("loss", None))
    method = fc.Clade(**settings).with_local_config(LocalTraining(objective, epochs=2))
    fed = fc.Simulator(clients)
    fed.init_client_state(method.initial_client_state(objective.params()))
    return method, fed, method.init(fed, objective.params(), fold_in(0, "init"))


def trained(method: fc.Clade, fed: fc.Simulator, state: CladeState, rounds: int) -> CladeState:
    everyone = torch.arange(len(fed.sizes))
    for number in range(rounds):
        state = method.round(fed, state, everyone, key=fold_in(1, number))
    return state


def test_without_differences_it_is_fedavg_with_its_server_to_the_bit() -> None:
    clients = digits(Iid())
    clade = fc.run(
        fc.Clade(), clients, fc.models.MLP(16), rounds=3, personal=fc.PersonalConfig("none"), **FAST
    )
    fedavg = fc.run(
        fc.FedAvg(),
        clients,
        fc.models.MLP(16),
        rounds=3,
        server_optimizer="nesterov",
        serve="mean",
        **FAST,
    )
    assert clade.summary["clusters"] == 1
    for name, value in clade.model_of(0).state_dict().items():
        assert torch.equal(value, fedavg.model_of(0).state_dict()[name])


def test_groups_with_permuted_labels_share_all_layers_but_the_last() -> None:
    clients = digits(LabelPermutation(clusters=3), clients=12)
    method, fed, state = started(clients)
    assert adjusted_rand_score(clients.groups, state.group_ids) == 1.0
    state = trained(method, fed, state, rounds=1)
    groups, first = state.candidates[0], state.models
    hidden, head = first["fc1.weight"][groups], first["fc2.weight"][groups]
    assert all(torch.equal(hidden[0], other) for other in hidden)
    assert not any(torch.equal(head[0], other) for other in head[1:])


def test_rotated_groups_share_no_layer() -> None:
    method, fed, state = started(digits(Rotation(clusters=2), clients=12))
    state = trained(method, fed, state, rounds=1)
    groups = state.candidates[0]
    assert len(groups) == 2
    for name in ("fc1.weight", "fc2.weight"):
        first, second = state.models[name][groups]
        assert not torch.equal(first, second)


def test_groups_that_differ_in_class_shares_alone_may_be_merged() -> None:
    clients = digits(LabelClusters(clusters=5, classes=2))
    _, _, state = started(clients)
    assert math.isfinite(float(state.kappa))
    assert adjusted_rand_score(clients.groups, state.group_ids) == 1.0
    # One model for all, and one for each group; merging all groups is one model for all.
    assert [len(set(candidate.tolist())) for candidate in state.candidates] == [1, 5]


def test_candidates_are_compared_after_ten_and_twenty_rounds() -> None:
    method, fed, state = started(digits(LabelPermutation(clusters=3), clients=12))
    open_candidates = []
    for number in range(20):
        state = method.round(fed, state, torch.arange(12), key=fold_in(1, number))
        open_candidates.append(len(state.candidates))
    assert open_candidates[:9] == [2] * 9
    assert open_candidates[-1] == 1
    assert len(state.candidates[0].unique()) == 3  # one model for all is much worse
    assert len(state) == 3


def test_clients_do_not_train_on_held_out_samples_while_candidates_are_compared() -> None:
    clients = digits(LabelPermutation(clusters=2), clients=6)
    place = torch.cat([torch.arange(len(clients.train[client])) for client in range(6)])
    rows = torch.cat([clients.train[client] for client in range(6)])
    labels = clients.y.clone()
    labels[rows[place % 5 == 4]] = 0
    method, fed, state = started(clients)
    assert len(state.candidates) == 2
    other = fc.Simulator(replace(clients, y=labels))
    other.init_client_state(method.initial_client_state(method.local.objective.params()))
    models, changed = (
        method.round(engine, state, torch.arange(6), key=5).models for engine in (fed, other)
    )
    assert all(torch.equal(models[name], changed[name]) for name in models)
    closed = state.with_candidates([0])
    models, changed = (
        method.round(engine, closed, torch.arange(6), key=5).models for engine in (fed, other)
    )
    assert not torch.equal(models["fc1.weight"], changed["fc1.weight"])


def test_a_class_prior_helps_one_model_for_clients_with_few_classes() -> None:
    clients = digits(Dirichlet(alpha=0.1))
    clade, fedavg = (
        fc.run(method, clients, fc.models.MLP(32), rounds=15, **FAST).summary["accuracy"]
        for method in (fc.Clade(), fc.FedAvg())
    )
    assert clade > fedavg + 5


def numbers(clients: int = 6) -> Clients:
    generator = torch.Generator().manual_seed(0)
    slopes = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0][:clients]
    parts = []
    for slope in slopes:
        x = torch.randn(60, 2, generator=generator)
        parts.append((x[:40], slope * x[:40, :1], x[40:], slope * x[40:, :1]))
    return from_arrays(parts)


def test_numbers_have_no_class_prior_and_groups_are_found() -> None:
    clients, model = numbers(), nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    method, _, state = started(clients, model, loss=_squared)
    assert method.initial_client_state(method.local.objective.params()) == {}
    assert method.personalization_program() is None
    assert float(state.kappa) == math.inf
    result = fc.run(
        fc.Clade(),
        clients,
        model,
        rounds=22,
        clients_per_round=1.0,
        loss="mse",
        device="cpu",
        lr=0.1,
    )
    assert result.clusters.tolist() == [0, 0, 0, 1, 1, 1]


def _squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().sum(-1)


def test_a_head_without_bias_has_no_class_prior() -> None:
    clients = digits(LabelClusters(clusters=2, classes=2), clients=8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10, bias=False))
    method, fed, state = started(clients, model)
    assert float(state.kappa) == math.inf
    assert len(trained(method, fed, state, rounds=2).models) == 3


def test_late_clients_join_their_group_and_keep_an_offset() -> None:
    clients = digits(LabelClusters(clusters=5, classes=2))
    late, silent = [3, 7, 8, 15, 19], True
    method, _, _ = started(clients)
    fed = fc.Simulator(
        clients, faults=lambda key, client, reply: None if silent and client in late else reply
    )
    params = method.local.objective.params()
    fed.init_client_state(method.initial_client_state(params))
    state = method.init(fed, params, fold_in(0, "init"))
    assert (state.cluster_ids[late] == -1).all()
    silent = False
    state = method.add_clients(fed, state, torch.tensor(late), key=1)
    assert adjusted_rand_score(clients.groups, state.group_ids) == 1.0
    offsets = fed.client_state.read(torch.tensor(late))["class_offset"]
    assert (offsets.amax(1) > 0.5).all()


def test_reclustering_splits_groups_that_were_not_seen_and_compares_again() -> None:
    clients = digits(LabelPermutation(clusters=2), clients=8)
    # No ratio finds a group at first; afterwards the usual one does.
    method, fed, state = started(clients, noise_ratio=1e9)
    assert len(state) == 1
    state = trained(method, fed, state, rounds=4)
    method = replace(method, noise_ratio=2.0, recluster_every=5)
    state = method.round(fed, state, torch.arange(8), key=9)
    assert adjusted_rand_score(clients.groups, state.group_ids) == 1.0
    assert state.is_open
    assert int(state.opened_in) == 5
    state = trained(replace(method, recluster_every=0), fed, state, rounds=20)
    assert adjusted_rand_score(clients.groups, state.cluster_ids) == 1.0


def test_groups_that_a_comparison_confirmed_change_without_another_one() -> None:
    clients = digits(LabelPermutation(clusters=2), clients=8)
    method, fed, state = started(clients)
    state = trained(method, fed, state, rounds=20)
    assert not state.is_open
    assert state.grouped
    wrong = state.cluster_ids.clone()
    wrong[0] = 1 - wrong[0]
    state = replace(state, cluster_ids=wrong, group_ids=wrong)
    method = replace(method, recluster_every=7)
    state = method.round(fed, state, torch.arange(8), key=9)  # round 21
    assert adjusted_rand_score(clients.groups, state.cluster_ids) == 1.0
    assert not state.is_open
    assert state.grouped


def test_signatures_with_noise_are_refused() -> None:
    with pytest.raises(fc.InvalidInputError) as caught:
        fc.Clade(signature_epsilon=1.0)
    assert caught.value.field == "method.signature_epsilon"


@dataclass(frozen=True)
class _Silent(FederationView):
    """The same clients, who do not answer these programs."""

    programs: set[str] = field(default_factory=set)

    def map(self, program: AnyProgram, ids: torch.Tensor, **rest: Any) -> ClientResults:
        results = super().map(program, ids, **rest)
        return replace(results, sums={}) if program.name in self.programs else results


def test_a_comparison_that_nobody_answers_is_repeated_in_the_next_round() -> None:
    method, fed, state = started(digits(LabelPermutation(clusters=2), clients=6))
    silent = _Silent(fed)
    for number in range(22):
        silent.programs.clear()
        if 9 < number < 20:
            silent.programs.update(trial.name for trial in method._trials(state))
        state = method.round(silent, state, torch.arange(6), key=fold_in(1, number))
        assert state.is_open == (number < 20)  # round 21 is the first after the last check
    assert len(state) == 2


def test_without_held_out_samples_the_first_candidate_remains() -> None:
    clients = digits(LabelPermutation(clusters=2), clients=6)
    method, _, state = started(clients)
    few = RaggedIndex.of([clients.train[client][:4] for client in range(6)])
    fed = fc.Simulator(replace(clients, train=few))
    fed.init_client_state(method.initial_client_state(method.local.objective.params()))
    state = trained(method, fed, state, rounds=19)
    assert state.is_open
    state = trained(method, fed, state, rounds=1)
    assert not state.is_open
    assert adjusted_rand_score(clients.groups, state.cluster_ids) == 1.0


def test_offsets_are_zero_again_once_class_shares_differ_by_chance() -> None:
    _, fed, state = started(digits(LabelClusters(clusters=5, classes=2)))
    ids = torch.arange(len(fed.sizes))
    assert bool((fed.client_state.read(ids)["class_offset"] != 0).any())
    keep_offsets(fed, ids, state.prior, math.inf, key=0, had_offsets=True)
    assert bool((fed.client_state.read(ids)["class_offset"] == 0).all())
