"""FLUX with three clients worked by hand.

The model is one linear layer of two outputs, so its features are the inputs: one number x. It is
projected to two numbers, ±x/√2 each. Clients 0 and 1 have both labels and nearly the same inputs,
client 2 has one label and others:

client 0: 0 and 2 of both labels     mean 1, deviation 1, for each label too
client 1: 0.2 and 2.2 of both        mean 1.2, deviation 1
client 2: 8 and 12 of label 0        mean 10, deviation 2; label 1 has no samples
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import DBSCAN
from torch import Tensor, nn

from fedclade import FLUX, InvalidInputError, Simulator
from fedclade.clustering.nearest_neighbor_knee import group_by_knee, knee
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.data import from_arrays
from fedclade.programs.latent_descriptor import latent_descriptor

Samples = tuple[list[float], list[int]]
SAMPLES: list[Samples] = [
    ([0, 2, 0, 2], [0, 0, 1, 1]),
    ([0.2, 2.2, 0.2, 2.2], [0, 0, 1, 1]),
    ([8, 12], [0, 0]),
]
NOW: dict[str, Any] = {"first_round": 1, "last_round": 1}
W = 4 * 4  # bytes of a model


class Case:
    def __init__(self, absent: Sequence[int] = (), lr: float = 0.1, **settings: Any) -> None:
        model = nn.Linear(1, 2)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        self.objective = Objective(model)
        local = LocalTraining(self.objective, lr=lr, batch_size=10)
        self.method = FLUX(**settings).with_local_config(local)
        self.absent = set(absent)
        self.join(SAMPLES)
        self.state: Any = self.method.init(self.fed, self.objective.params(), key=0)

    def join(self, samples: Sequence[Samples]) -> None:
        rows = [(torch.tensor(x)[:, None].float(), torch.tensor(y)) for x, y in samples]
        self.fed = Simulator(from_arrays(rows), faults=self._answer)

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def round(self, *cohort: int) -> list[int]:
        self.state = self.method.round(self.fed, self.state, torch.tensor(cohort), key=1)
        return self.groups()

    def add_clients(self, *ids: int) -> list[int]:
        self.state = self.method.add_clients(self.fed, self.state, torch.tensor(ids), key=2)
        return self.groups()

    def groups(self) -> list[int]:
        return self.state.cluster_ids.tolist()


def replies(labelled: bool) -> Tree:
    case = Case()
    program = latent_descriptor(case.objective, key=7, labelled=labelled)
    models = case.method.assign_models(case.state, torch.arange(3))
    return case.fed.map(program, torch.arange(3), per_client=models, key=0).outputs


def rows(values: Tensor) -> Any:
    """Each number without the random sign of its projection, times √2."""
    return (values.abs() * sqrt(2)).tolist()


def test_means_and_deviations_of_all_samples_and_of_each_label() -> None:
    inputs, labels = replies(labelled=True)["inputs"], replies(labelled=True)["labels"]
    assert rows(inputs[:, 0, 0]) == pytest.approx([1, 1.2, 10], abs=1e-5)
    assert rows(inputs[:, 1, 1]) == pytest.approx([1, 1, 2], abs=1e-5)
    assert rows(labels[0]) == [[pytest.approx([1, 1], abs=1e-5)] * 2] * 2
    assert rows(labels[2, :, 0]) == [pytest.approx(two, abs=1e-5) for two in ([10, 10], [2, 2])]
    assert labels[2, :, 1].tolist() == [[-1, -1], [-1, -1]]
    assert list(replies(labelled=False)) == ["inputs"]


def test_similar_clients_are_one_group_and_another_one_is_alone() -> None:
    case = Case(**NOW)
    case.round(0, 1, 2)
    # The distances of nearest neighbors are a, a and b > a: the knee is a.
    assert case.round(0, 1, 2) == [0, 0, 1]
    traffic = case.fed.traffic
    # Weights and the accuracy, then the descriptors, 4 (2 C + 2 C²) bytes, and the weights.
    assert (traffic.up, traffic.down) == (3 * (W + 4 + 48 + W), 3 * 3 * W)
    case.round(0, 2)
    assert (traffic.up, traffic.down) == (3 * (W + 4 + 48 + W) + 2 * W, 3 * 3 * W + 2 * W)
    models = case.method.assign_models(case.state, torch.arange(3)).gather({})["weight"]
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


def test_blocks_of_numbers_are_scaled_together() -> None:
    case = Case(**NOW)
    case.round(0, 1, 2)
    case.round(0, 1, 2)
    # Means from -10/√2 or 1/√2 to 10/√2 by the signs; deviations from 1/√2 to 2/√2.
    assert case.state.descriptor[:, 2:].tolist() == [
        pytest.approx([0, 0], abs=1e-5),
        pytest.approx([0, 0], abs=1e-5),
        pytest.approx([1, 1], abs=1e-5),
    ]
    assert float(case.state.descriptor.min()) == 0
    assert float(case.state.descriptor.max()) == 1


def test_the_search_begins_when_the_accuracy_is_flat() -> None:
    # Without steps the accuracy of the second round is that of the first.
    case = Case(lr=0.0, first_round=1)
    case.round(0, 1, 2)
    assert not bool(case.state.is_flat)
    # Label 0 is always predicted: 2 of 4, 2 of 4 and 2 of 2 samples.
    assert float(case.state.accuracy) == pytest.approx(0.6)
    assert [case.round(0, 1, 2) for _ in range(2)] == [[0, 0, 0], [0, 0, 1]]
    later = Case(lr=0.0, first_round=3)
    assert [later.round(0, 1, 2)[2] for _ in range(4)] == [0, 0, 0, 1]
    never = Case(lr=0.0, gain=0.0, first_round=1, last_round=4)
    assert [never.round(0, 1, 2)[2] for _ in range(5)] == [0, 0, 0, 0, 1]


def test_a_late_client_is_assigned_without_its_labels() -> None:
    for labels in ([0, 1], [1, 1]):
        case = Case(**NOW)
        case.round(0, 1, 2)
        case.round(0, 1, 2)
        case.join([*SAMPLES, ([8.5, 12], labels), ([0.5, 2.5], labels)])
        assert case.add_clients(3, 4) == [0, 0, 1, 1, 0]


def test_a_client_that_missed_the_search_is_assigned_when_it_is_back() -> None:
    case = Case(absent=[1], **NOW)
    case.round(0, 1, 2)
    assert case.round(0, 1, 2) == [0, UNKNOWN, 0]
    case.absent = set()
    assert case.add_clients(1) == [0, 0, 0]


def test_if_nobody_replies_the_search_is_tried_again() -> None:
    case = Case(absent=[0, 1, 2], **NOW)
    case.state = replace(case.state, rounds=torch.tensor(1))
    assert case.round(0, 1, 2) == [0, 0, 0]
    case.absent = set()
    assert case.round(0, 1, 2) == [0, 0, 1]


def test_the_knee() -> None:
    assert knee(np.array([1.0, 1.1, 1.2, 5.0])) == 1.2
    assert knee(np.array([2.0, 2.0, 2.0])) == 2.0
    assert knee(np.array([1.0, 4.0, 5.0])) == 5.0  # nothing is below the line


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 15))
def test_groups_are_those_of_dbscan_whose_outliers_are_alone(seed: int, clients: int) -> None:
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(clients, 2)) + 4 * rng.integers(0, 3, (clients, 1))
    distance = np.linalg.norm(points[:, None] - points, axis=2) + np.diag([np.inf] * clients)
    eps = knee(np.sort(distance.min(1)))
    expected = DBSCAN(eps=np.nextafter(eps, np.inf) * (1 + 1e-12), min_samples=2).fit_predict(
        points
    )
    outliers = expected == -1
    expected[outliers] = expected.max() + 1 + np.arange(outliers.sum())
    groups = group_by_knee(points)
    assert (groups[:, None] == groups).tolist() == (expected[:, None] == expected).tolist()


@pytest.mark.parametrize(
    "settings", [{"gain": -0.1}, {"first_round": 0}, {"first_round": 5, "last_round": 4}]
)
def test_bad_settings(settings: Any) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field.startswith("method.")):
        FLUX(**settings)


def test_a_loss_of_numbers_is_refused() -> None:
    objective = Objective(nn.Linear(1, 1), lambda outputs, y: (outputs[:, 0] - y) ** 2)
    method = FLUX().with_local_config(LocalTraining(objective))
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "local.loss"):
        method.init(Case().fed, objective.params(), key=0)
