"""FedSEM beyond cases by hand: planted groups, its special case, and what it promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor, nn

import fedclade as fc
from fedclade import FedAvg, InvalidInputError, Method, Simulator
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.data import Clients, LabelClusters, Rotation, load, partition
from fedclade.io.checkpoint import Checkpoint, flatten, latest, restore, save
from fedclade.methods.fedsem import FedSEM, FedSEMState
from fedclade.models import MLP

QUICKSTART: dict[str, Any] = {
    "lr": 0.1,
    "batch_size": 10,
    "epochs": 2,
    "eval_every": 0,
    "device": "cpu",
}


class Case:
    def __init__(self, method: Method, clients: Clients, absent: Sequence[int] = ()) -> None:
        torch.manual_seed(0)
        objective = Objective(MLP(16).build(clients.shape, 10))
        self.params = objective.params()
        self.method = method.with_local_config(
            LocalTraining(objective, lr=0.1, batch_size=10, epochs=2)
        )
        self.absent = set(absent)
        self.fed = Simulator(
            clients, faults=lambda key, client, reply: None if client in self.absent else reply
        )

    def init(self) -> Any:
        return self.method.init(self.fed, self.params, key=0)

    def served(self, state: Any) -> Tree:
        return self.method.assign_models(state, torch.arange(len(self.fed.sizes))).gather({})


def same(one: Tree, other: Tree) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_finds_label_clusters(layers: Any, seed: int, share: float) -> None:
    clients = partition(load("digits"), LabelClusters(clusters=5, classes=2), clients=40, seed=seed)
    result = fc.run(
        FedSEM(5, layers),
        clients,
        MLP(64),
        rounds=8,
        clients_per_round=share,
        seed=seed,
        **QUICKSTART,
    )
    assert result.summary["ari"] == 1.0
    assert result.summary["clusters"] == 5
    # With one model for all, five groups of two digits cannot be separated so early.
    average = fc.run(
        FedAvg(), clients, MLP(64), rounds=8, clients_per_round=share, seed=seed, **QUICKSTART
    )
    assert result.summary["accuracy"] > average.summary["accuracy"] + 5


def test_finds_rotations_where_clients_have_trained_enough() -> None:
    # With the tenth of the samples that the probe takes, two passes are not enough.
    clients = partition(load("digits"), Rotation(clusters=4), clients=40, seed=0, probe=None)
    short, long = (
        fc.run(FedSEM(4), clients, MLP(64), rounds=1, **{**QUICKSTART, "epochs": epochs}).summary
        for epochs in (2, 10)
    )
    assert long["ari"] == 1.0
    assert short["ari"] < 0.9  # 32 images and two passes over them: docs/methods/fedsem.md


def test_with_one_centre_it_is_fedavg(ragged: Clients) -> None:
    many, average = Case(FedSEM(1), ragged), Case(FedAvg(), ragged)
    cohorts = [torch.arange(6), torch.tensor([4, 0, 2]), torch.arange(1, 6)]
    state, other = many.init(), average.init()
    other = average.method.round(
        average.fed, other, torch.arange(6), key=0
    )  # the one-off phase is a first round
    for number, cohort in enumerate(cohorts, start=1):
        state = many.method.round(many.fed, state, cohort, key=number)
        other = average.method.round(average.fed, other, cohort, key=number)
    for name, value in average.served(other).items():
        torch.testing.assert_close(many.served(state)[name], value, atol=1e-6, rtol=0)


def test_late_clients_join_their_own_group(digits: Clients) -> None:
    late = [3, 7, 8, 15, 19]  # one or more of each group
    case = Case(FedSEM(5), digits, absent=late)
    state = case.init()
    assert (state.cluster_ids == UNKNOWN).nonzero().flatten().tolist() == late
    for number in range(1, 4):  # the centers change, but the cluster of a new client does not
        state = case.method.round(
            case.fed, state, (state.cluster_ids != UNKNOWN).nonzero().flatten(), key=number
        )
    known = state.cluster_ids.clone()
    case.absent = set()
    state, cohort = case.method.prepare_cohort(
        case.fed, state, torch.tensor([19, 3, 0, 7, 15, 8]), key=4
    )
    assert len(cohort) == 6
    assert adjusted_rand_score(digits.groups, state.cluster_ids) == 1.0
    assert torch.equal(state.cluster_ids[known != UNKNOWN], known[known != UNKNOWN])


@pytest.mark.parametrize("absent", [range(20), ()])
def test_a_state_fits_into_a_checkpoint_at_once(
    digits: Clients, tmp_path: Path, absent: Sequence[int]
) -> None:
    """Models, first model and first centres are equal at first, but not the same memory: a file of
    tensors would refuse that.
    """
    state = Case(FedSEM(5), digits, absent).init()
    save(tmp_path, Checkpoint(0, flatten(state), {}, [], ""))
    found = latest(tmp_path)
    assert found is not None
    assert same(flatten(restore(FedSEMState, found.state)), flatten(state))


def test_the_order_of_parameters_in_a_state_has_no_influence(digits: Clients) -> None:
    case = Case(FedSEM(5), digits, absent=[0, 19])
    state = case.init()
    case.absent = set()
    turned = replace(state, first=dict(reversed(state.first.items())))
    one, other = (
        case.method.add_clients(case.fed, each, torch.tensor([0, 19]), key=1)
        for each in (state, turned)
    )
    assert torch.equal(one.cluster_ids, other.cluster_ids)


def test_a_model_without_a_linear_layer_has_no_head(ragged: Clients) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w

    objective = Objective(Scale())
    for layers in ("all", "last"):
        method = FedSEM(2, layers).with_local_config(LocalTraining(objective))  # type: ignore[arg-type]
        if layers == "all":
            assert len(method.init(Simulator(ragged), objective.params(), key=0)) == 2
        else:
            with pytest.raises(InvalidInputError, check=lambda error: error.field == "model"):
                method.init(Simulator(ragged), objective.params(), key=0)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("clusters", 0, ("1",)),
        ("clusters", 2.5, ("1",)),
        ("layers", "first", ("'all'", "'last'")),
    ],
)
def test_hyper_parameters_are_checked(field: str, value: object, allowed: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        FedSEM(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"method.{field}"
    for part in (repr(value), *allowed):
        assert part in str(caught.value)
