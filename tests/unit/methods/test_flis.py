"""FLIS beyond cases by hand: FedAvg as a limit, label clusters of real data, whole runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedclade as fc
from fedclade import FedAvg, Method, Simulator
from fedclade.aggregation.mean import unique_rows
from fedclade.core import LocalTraining, State
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.core.rng import fold_in
from fedclade.data import Clients, from_arrays
from fedclade.io.checkpoint import flatten
from fedclade.methods import flis
from fedclade.methods.flis import FLISDC, FLISHC, FLISHCState
from fedclade.models import MLP
from fedclade.training.metrics import adjusted_rand
from fedclade.training.setup import inject_context

LONG = {"lr": 0.1, "epochs": 10}  # ten local epochs, as in the paper


class Case:
    """A method on clients, driven as the runner drives it."""

    def __init__(self, method: Method, clients: Clients, hidden: int = 8, **local: float) -> None:
        torch.manual_seed(0)
        objective = Objective(MLP(hidden).build(clients.shape, 10))
        self.params, self.fed = objective.params(), Simulator(clients)
        self.method = inject_context(method, clients.metadata, seed=0).with_local_config(
            LocalTraining(objective, batch_size=10, **local)
        )  # type: ignore[arg-type]
        self.state = self.method.init(self.fed, self.params, key=fold_in(0, "init"))

    def rounds(self, cohorts: Sequence[Tensor]) -> State:
        for number, cohort in enumerate(cohorts):
            self.state, cohort = self.method.prepare_cohort(
                self.fed, self.state, cohort, fold_in(0, "admit", number)
            )
            self.state = self.method.round(
                self.fed, self.state, cohort, fold_in(0, "round", number)
            )
        return self.state

    def served(self) -> tuple[Tensor, Tree]:
        """Which model each client uses, and these models."""
        unknown = torch.nonzero(self.state.cluster_ids == UNKNOWN).flatten()
        state = (
            self.method.add_clients(self.fed, self.state, unknown, key=fold_in(0, "serve"))
            if len(unknown)
            else self.state
        )
        return state.cluster_ids, self.method.assign_models(
            state, torch.arange(len(self.fed.sizes))
        ).gather({})


def apart(one: Tree, other: Tree) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# ---- FedAvg as a limit


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=7),
    st.integers(0, 10**6),
    st.sampled_from(["onehot", "soft"]),
)
def test_with_beta_0_it_is_fedavg(sizes: list[int], seed: int, labels: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    data = [
        (torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in sizes
    ]
    clients, probe = from_arrays(data), torch.randn(20, 4, generator=generator)
    cohorts = [
        torch.randperm(len(sizes), generator=generator)[: 1 + seed % len(sizes)] for _ in range(3)
    ]
    plain = Case(FedAvg(), clients, lr=0.1, epochs=2)
    plain.rounds(cohorts)
    for method in (
        FLISDC(beta=0.0, labels=labels, probe=probe),
        FLISHC(beta=0.0, labels=labels, probe=probe),
    ):
        case = Case(method, clients, lr=0.1, epochs=2)
        case.rounds(cohorts)
        assert apart(case.served()[1], plain.served()[1]) < 1e-6
    assert apart(case.served()[1], plain.served()[1]) == 0  # HC: its one-off round leaves no trace


def test_with_beta_1_only_clients_with_equal_predictions_share(ragged: Clients) -> None:
    case = Case(FLISDC(beta=1.0), ragged, lr=0.1)
    state = case.rounds([torch.arange(6)])
    alone = Case(FedAvg(), ragged, lr=0.1)
    first = alone.state
    predicted: list[Tensor] = []
    for client in range(6):
        trained = alone.method.round(
            alone.fed, first, torch.tensor([client]), fold_in(0, "round", 0)
        ).models
        assert ragged.probe is not None
        predicted.append(
            alone.method.local.objective.outputs(
                {name: value[0] for name, value in trained.items()}, ragged.probe
            ).argmax(1)
        )
    predictions = torch.stack(predicted)
    assert torch.equal(
        state.cluster_ids[:, None] == state.cluster_ids,
        (predictions[:, None] == predictions).all(2),
    )
    assert len(state) > 1


# ---- label clusters


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The distinct rows of Ã in every round."""
    rows: list[Tensor] = []
    original = unique_rows

    def spy(matrix: Tensor) -> tuple[Tensor, Tensor]:
        distinct, own = original(matrix)
        rows.append(distinct)
        return distinct, own

    monkeypatch.setattr(flis, "unique_rows", spy)
    return rows


def test_dc_serves_every_client_a_model_of_its_own_group(
    digits: Clients, joint: list[Tensor]
) -> None:
    assert digits.groups is not None
    case = Case(FLISDC(), digits, hidden=64, **LONG)
    cohorts = [
        torch.arange(len(digits))[number % 2 :: 2] for number in range(4)
    ]  # every group has clients in both halves
    case.rounds(cohorts)
    cluster, _ = case.served()
    for client in range(len(digits)):
        behind = cohorts[-1][joint[-1][cluster[client]]]  # whose models its own is made of
        assert set(digits.groups[behind].tolist()) == {int(digits.groups[client])}
    assert adjusted_rand(digits.groups, cluster) == 1


def test_hc_finds_the_groups_and_puts_late_clients_into_them(digits: Clients) -> None:
    assert digits.groups is not None
    late = torch.tensor([2, 7, 11])
    case = Case(FLISHC(), digits, hidden=64, **LONG)
    assert adjusted_rand(digits.groups, case.state.cluster_ids) == 1
    found = case.state.cluster_ids
    case.rounds([torch.arange(len(digits))])
    case.state = replace(case.state, cluster_ids=found.index_fill(0, late, UNKNOWN))
    assert torch.equal(case.served()[0], found)


@pytest.mark.parametrize("linkage", ["average", "single", "complete"])
@pytest.mark.parametrize("labels", ["onehot", "soft"])
def test_all_kinds_of_hc_find_clear_groups(digits: Clients, linkage: Any, labels: Any) -> None:
    case = Case(FLISHC(labels=labels, linkage=linkage), digits, hidden=64, lr=0.1, epochs=20)
    assert adjusted_rand(digits.groups, case.state.cluster_ids) == 1


# ---- how it is computed


def test_the_stack_of_all_models_is_never_built(
    digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Case(FLISHC(), digits, lr=0.1)
    monkeypatch.setattr(flis, "BLOCK", 3)
    sizes: list[int] = []
    original = Simulator.map

    def spy(self: Simulator, program: Any, ids: Tensor, **options: Any) -> Any:
        sizes.append(len(ids))
        return original(self, program, ids, **options)

    monkeypatch.setattr(Simulator, "map", spy)
    blocks = Case(FLISHC(), digits, lr=0.1)
    assert sizes == [3] * 6 + [2]
    one, other = flatten(whole.state), flatten(blocks.state)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_order_and_options_change_no_bit(digits: Clients) -> None:
    for method in (
        FLISDC(labels="soft", beta=0.9),
        FLISHC(labels="soft", linkage="single", beta=0.95),
    ):
        one, other = (Case(method, digits, lr=0.1) for _ in range(2))
        cohorts = [torch.arange(20), torch.arange(0, 20, 3), torch.arange(5, 20)]
        one.rounds(cohorts)
        other.rounds([cohort.flip(0) for cohort in cohorts])
        assert len(one.state) > 1
        first, second = flatten(one.state), flatten(other.state)
        assert all(torch.equal(first[name], second[name]) for name in first)


# ---- whole runs


@pytest.mark.parametrize("method", [FLISDC(), FLISHC()], ids=lambda method: method.name)
def test_a_run_beats_fedavg_and_can_be_resumed(
    method: Method, digits: Clients, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"clients_per_round": 0.8, "device": "cpu", **LONG}
    whole = fc.run(method, digits, MLP(32), rounds=3, **options)
    assert whole.summary["ari"] == 1
    assert (
        whole.summary["accuracy"]
        > fc.run(FedAvg(), digits, MLP(32), rounds=3, **options).summary["accuracy"] + 5
    )
    fc.run(method, digits, MLP(32), rounds=1, out=tmp_path / "run", **options)
    resumed = fc.run(
        method, digits, MLP(32), rounds=3, out=tmp_path / "run", resume=True, **options
    )
    assert torch.equal(resumed.clusters, whole.clusters)
    for one, other in zip(
        resumed.model_of(3).parameters(), whole.model_of(3).parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_any_unlabeled_array_can_be_the_probe(digits: Clients) -> None:
    options: dict[str, Any] = {"rounds": 1, "device": "cpu", "lr": 0.1, "epochs": 3}
    dark = np.zeros(
        (5, *digits.shape), dtype=np.uint8
    )  # for dark images every model predicts one class
    one, other = (
        fc.run(FLISHC(probe=probe, beta=0.5), digits, MLP(16), **options).clusters
        for probe in (dark, None)
    )  # type: ignore[arg-type]
    assert not torch.equal(one, other)


def test_profiles_are_of_the_probe_and_the_classes(digits: Clients) -> None:
    state = Case(FLISHC(), digits, lr=0.1).state
    assert isinstance(state, FLISHCState)
    assert digits.probe is not None
    assert state.profiles.shape == (len(state), len(digits.probe) * 10)
