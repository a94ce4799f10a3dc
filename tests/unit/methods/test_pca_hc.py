"""PCA+kM+HC: principal axes, own and shared bases on planted groups, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score

import fedclade as fc
from fedclade import FedAvg, InvalidInputError, Method, Simulator
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.data import Clients, LabelClusters, Rotation, Scheme, from_arrays, load, partition
from fedclade.io.checkpoint import Checkpoint, flatten, latest, restore, save
from fedclade.methods.base import hyperparameters
from fedclade.methods.pca_hc import PCAHC, PCAHCState
from fedclade.models import MLP
from fedclade.programs.pca_centroid_signature import pca_basis, pca_signature
from fedclade.training.setup import inject_context


def started(method: Method, clients: Clients, **options: Any) -> tuple[Method, Simulator, Any]:
    torch.manual_seed(0)
    objective = Objective(MLP(8).build(clients.shape, 10))
    method = inject_context(method, clients.metadata, seed=0).with_local_config(
        LocalTraining(objective, lr=0.1, batch_size=4)
    )
    fed = Simulator(clients, **options)
    return method, fed, method.init(fed, objective.params(), key=0)


def agreement(method: PCAHC, clients: Clients) -> float:
    return float(adjusted_rand_score(clients.groups, started(method, clients)[2].cluster_ids))


# --- principal axes


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 10), st.integers(0, 10**6))
def test_axes_are_those_of_scikit_learn(
    samples: int, dimensions: int, components: int, seed: int
) -> None:
    x = (
        np.random.default_rng(seed).normal(size=(samples, dimensions))
        * np.arange(1, dimensions + 1)
        + 7
    )
    basis = pca_basis(torch.from_numpy(x), components)
    mean, axes = basis["mean"].double().numpy(), basis["axes"].double().numpy()
    assert axes.shape == (components, dimensions)
    np.testing.assert_allclose(mean, x.mean(0), atol=1e-5)
    real = min(samples - 1, dimensions, components)
    assert not axes[real:].any()
    np.testing.assert_allclose(axes[:real] @ axes[:real].T, np.eye(real), atol=1e-5)
    assert (axes[np.arange(real), np.abs(axes[:real]).argmax(1)] > 0).all()
    if real:
        variance = ((x - mean) @ axes[:real].T).var(0, ddof=1)
        np.testing.assert_allclose(variance, PCA().fit(x).explained_variance_[:real], rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_with_all_axes_distances_between_samples_stay(seed: int) -> None:
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(9, 4))).float()
    basis = pca_basis(x, 6)
    torch.testing.assert_close(
        torch.cdist((x - basis["mean"]) @ basis["axes"].T, torch.zeros(1, 6)),
        torch.cdist(x, basis["mean"][None]),
    )


def test_a_signature_depends_on_the_client_and_the_key_alone(digits: Clients) -> None:
    fed = Simulator(digits)
    everyone = fed.map(pca_signature(4, 16), torch.arange(20), key=3).outputs["centres"]
    some = fed.map(pca_signature(4, 16), torch.tensor([12, 5]), key=3).outputs["centres"]
    assert everyone.shape == (20, 4, 16)
    assert torch.equal(some, everyone[[12, 5]])


# --- what it finds


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "scheme",
    [LabelClusters(clusters=5, classes=2), Rotation(clusters=5)],
    ids=lambda scheme: scheme.name,
)
def test_a_shared_basis_finds_groups_that_own_bases_do_not(scheme: Scheme, seed: int) -> None:
    clients = partition(load("digits"), scheme, clients=20, seed=seed, probe=None)
    assert agreement(PCAHC(basis="shared"), clients) == 1.0
    assert agreement(PCAHC(basis="own"), clients) < 0.6


def test_finds_label_clusters_of_mnist(real_data: Callable[[str], Path]) -> None:
    mnist = load("mnist", real_data("mnist").parent)
    scheme = LabelClusters(clusters=5, classes=2, samples=60)
    clients = partition(mnist, scheme, clients=20, seed=0, probe=None)
    assert agreement(PCAHC(basis="shared"), clients) == 1.0
    assert agreement(PCAHC(basis="own"), clients) < 0.6


def test_a_run_with_the_users_probe_data(digits: Clients) -> None:
    x = load("digits").x_train[:200]
    result = fc.run(
        PCAHC(basis="shared", probe=x), replace(digits, probe=None), MLP(8), rounds=1, device="cpu"
    )
    assert result.summary["ari"] == 1.0
    assert result.summary["clusters"] == 5


@pytest.mark.parametrize("basis", ["own", "shared"])
def test_with_one_group_it_is_fedavg(ragged: Clients, basis: Any) -> None:
    served = []
    for method in (PCAHC(clusters=1, basis=basis), FedAvg()):
        bound, fed, state = started(method, ragged)
        for number, cohort in enumerate([torch.arange(6), torch.tensor([4, 0, 2])]):
            state = bound.round(fed, state, cohort, key=number)
        served.append(bound.assign_models(state, torch.arange(6)).gather({}))
    assert all(torch.equal(value, served[1][name]) for name, value in served[0].items())


def test_late_clients_join_their_own_group(digits: Clients) -> None:
    late, silent = [3, 7, 8, 15, 19], True  # one or more of each group
    method, fed, state = started(
        PCAHC(basis="shared"),
        digits,
        faults=lambda key, client, reply: None if silent and client in late else reply,
    )
    assert (state.cluster_ids == UNKNOWN).nonzero().flatten().tolist() == late
    known = state.cluster_ids.clone()
    silent = False
    state = method.add_clients(fed, state, torch.tensor(late), key=1)
    assert adjusted_rand_score(digits.groups, state.cluster_ids) == 1.0
    assert torch.equal(state.cluster_ids[known != UNKNOWN], known[known != UNKNOWN])


@pytest.mark.parametrize("basis", ["own", "shared"])
def test_a_state_fits_into_a_checkpoint(digits: Clients, tmp_path: Path, basis: Any) -> None:
    state = started(PCAHC(basis=basis), digits)[2]
    save(tmp_path, Checkpoint(0, flatten(state), {}, [], ""))
    found = latest(tmp_path)
    assert found is not None
    again = restore(PCAHCState, found.state)
    assert flatten(again).keys() == flatten(state).keys()
    assert all(torch.equal(value, flatten(again)[name]) for name, value in flatten(state).items())


# --- what it refuses


def test_a_shared_basis_needs_probe_data(digits: Clients) -> None:
    with pytest.raises(InvalidInputError) as caught:
        started(PCAHC(basis="shared"), replace(digits, probe=None))
    assert caught.value.field == "method.basis"
    assert "partition(…, probe=n)" in str(caught.value)
    assert "PCAHC(probe=array)" in str(caught.value)


@pytest.mark.parametrize("basis", ["own", "shared"])
def test_tokens_have_no_principal_components(basis: Any) -> None:
    tokens = from_arrays([(torch.randint(0, 9, (5, 4)), torch.zeros(5)) for _ in range(2)])
    method = PCAHC(basis=basis, probe=torch.randint(0, 9, (5, 4)))
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "data"):
        method.init(Simulator(tokens), {"w": torch.zeros(1)}, key=0)


def test_a_reply_with_too_many_centers_does_no_harm(ragged: Clients) -> None:
    state = started(
        PCAHC(k=2), ragged, faults=lambda key, client, reply: reply | {"count": torch.tensor(10**6)}
    )[2]
    assert state.counts.tolist() == [2] * 6


def test_probe_data_are_no_hyper_parameter() -> None:
    assert [each.name for each in hyperparameters(PCAHC)] == [
        "clusters",
        "k",
        "components",
        "basis",
    ]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("clusters", 0, ("1",)),
        ("k", 13, ("1", "12")),
        ("k", "auto", ("1", "12")),
        ("components", 0, ("1",)),
        ("basis", "common", ("'own'", "'shared'")),
    ],
)
def test_hyper_parameters_are_checked(field: str, value: object, allowed: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        PCAHC(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"method.{field}"
    for part in (repr(value), *allowed):
        assert part in str(caught.value)
