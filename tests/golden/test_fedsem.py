"""FedSEM worked by hand.

The model is one number w, the loss (w - y)², so a step with lr = 0.25 is w <- (w + y) / 2. The four
clients have targets y = 0, 10, 16, 24 and 4, 1, 4, 1 samples. From w = 0 they get to 0, 5, 8, 12.
The best two groups are {0, 5}, {8, 12}: the squared distances to their means have the sum 12.5 + 8
= 20.5 (24.7 for {0}, {5, 8, 12}; 32.7 for {0, 5, 8}, {12}). Weighted by examples, the centers are
(4 · 0 + 5) / 5 = 1 and (4 · 8 + 12) / 5 = 8.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedclade import Simulator
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.data import Clients, from_arrays
from fedclade.methods.fedsem import FedSEM, FedSEMState

CLIENTS = [(4, 0.0), (1, 10.0), (4, 16.0), (1, 24.0)]


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, 0] - y) ** 2


def with_targets(clients: Sequence[tuple[int, float]]) -> Clients:
    return from_arrays([(torch.ones(n, 1), torch.full((n,), y)) for n, y in clients])


class Case:
    """FedSEM on clients, with the calls that a training run makes."""

    def __init__(
        self,
        method: FedSEM,
        clients: Clients,
        model: nn.Module | None = None,
        lr: float = 0.25,
        absent: Sequence[int] = (),
    ) -> None:
        model = model or nn.Linear(1, 1, bias=False)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        objective = Objective(model, squared)
        self.method = method.with_local_config(LocalTraining(objective, lr=lr, batch_size=10))
        self.absent = set(absent)
        self.fed = Simulator(clients, faults=self._answer)
        self.state = self._typed(self.method.init(self.fed, objective.params(), key=0))

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def _typed(self, state: object) -> FedSEMState:
        assert isinstance(state, FedSEMState)
        return state

    def round(self, *cohort: int) -> FedSEMState:
        self.state = self._typed(
            self.method.round(self.fed, self.state, torch.tensor(cohort), key=1)
        )
        return self.state

    def add_clients(self, *ids: int) -> FedSEMState:
        self.state = self._typed(
            self.method.add_clients(self.fed, self.state, torch.tensor(ids), key=2)
        )
        return self.state

    def centers(self) -> list[float]:
        return self.state.models["weight"].flatten().tolist()


def four(clusters: int = 2, absent: Sequence[int] = ()) -> Case:
    return Case(FedSEM(clusters), with_targets(CLIENTS), absent=absent)


def test_the_one_off_phase_is_k_means_and_the_centers_are_means_by_examples() -> None:
    case = four()
    assert case.state.cluster_ids.tolist() == [0, 0, 1, 1]
    assert case.centers() == pytest.approx([1.0, 8.8], abs=1e-6)
    assert case.state.first["weight"].flatten().tolist() == case.centers()
    assert case.state.start["weight"].tolist() == [[[0.0]]]


def test_a_client_joins_the_center_nearest_to_its_trained_weights() -> None:
    case = four()
    # From their centers the clients get to 0.5, 5.5 | 12.4, 16.4. Client 1 is 4.5 away from 1 and
    # 3.3 away from 8.8: it moves.
    assert case.round(0, 1, 2, 3).cluster_ids.tolist() == [0, 1, 1, 1]
    assert case.centers() == pytest.approx([0.5, (5.5 + 4 * 12.4 + 16.4) / 6], abs=1e-5)
    # Now it starts at 11.917 and gets to 10.96: it stays.
    case.round(1)
    assert case.state.cluster_ids.tolist() == [0, 1, 1, 1]
    assert case.centers() == pytest.approx([0.5, (71.5 / 6 + 10) / 2], abs=1e-5)


def test_a_center_that_no_client_joined_stays() -> None:
    case = four()
    assert case.round(1).cluster_ids.tolist() == [0, 1, 1, 1]
    # Client 1 trained from the first center and joined the second.
    assert case.centers() == pytest.approx([1.0, 5.5], abs=1e-6)
    case.round(3, 2)
    assert case.centers() == pytest.approx(
        [1.0, (4 * (5.5 + 16) / 2 + (5.5 + 24) / 2) / 5], abs=1e-5
    )


def test_a_cluster_without_clients_stays() -> None:
    case = four()
    case.state = replace(case.state, cluster_ids=torch.ones(4, dtype=torch.int64))
    assert case.round(2, 3).cluster_ids.tolist() == [1, 1, 1, 1]
    assert case.centers() == pytest.approx([1.0, (4 * 12.4 + 16.4) / 5], abs=1e-5)
    # From 13.2 client 0 gets to 6.6, which is 5.6 away from 1 and 6.6 away from 13.2: it joins the
    # cluster without clients.
    assert case.round(0).cluster_ids.tolist() == [0, 1, 1, 1]
    assert case.centers() == pytest.approx([6.6, 13.2], abs=1e-5)


def test_an_absent_client_keeps_its_center() -> None:
    case = four()
    case.absent = {1}
    assert case.round(0, 1).cluster_ids.tolist() == [0, 0, 1, 1]
    assert case.centers() == pytest.approx([0.5, 8.8], abs=1e-6)
    case.absent = {0, 1, 2, 3}
    before = case.centers()
    case.round(0, 1, 2, 3)
    assert case.centers() == before


def test_a_client_that_missed_the_one_off_phase_is_unassigned() -> None:
    case = four(absent=[1])
    assert case.state.cluster_ids.tolist() == [0, UNKNOWN, 1, 1]
    assert case.centers() == pytest.approx([0.0, 8.8], abs=1e-6)
    case.absent = set()
    # From w = 0 it gets to 5, which is 5 away from 0 and 3.8 away from 8.8.
    assert case.add_clients(1).cluster_ids.tolist() == [0, 1, 1, 1]
    assert case.centers() == pytest.approx([0.0, 8.8], abs=1e-6)


def test_a_late_client_trains_from_the_initial_model_and_joins_a_first_center() -> None:
    case = four()
    case.round(0, 1, 2, 3)  # centers 0.5 and 11.917
    case.fed = Simulator(with_targets([*CLIENTS, (1, 12.0), (1, 9.6)]), faults=case._answer)
    # From the initial model they get to 6 and 4.8. The first centers were 1 and 8.8. (Of the
    # current centers 0.5 is nearer to both; and from 0.5 both would get nearer to 8.8.)
    assert case.add_clients(5, 4).cluster_ids.tolist() == [0, 1, 1, 1, 1, 0]


def test_if_no_client_is_assigned_new_clients_are_clustered() -> None:
    case = four(absent=[0, 1, 2, 3])
    assert case.state.cluster_ids.tolist() == [UNKNOWN] * 4
    assert case.centers() == [0.0]
    case.absent = {3}
    assert case.add_clients(3, 0, 1).cluster_ids.tolist() == [0, 1, UNKNOWN, UNKNOWN]
    assert case.centers() == pytest.approx([0.0, 5.0], abs=1e-6)
    case.absent = set()
    assert case.add_clients(2, 3).cluster_ids.tolist() == [0, 1, 1, 1]


def test_there_are_at_most_as_many_centers_as_different_weights() -> None:
    assert four(clusters=9).centers() == pytest.approx([0.0, 5.0, 8.0, 12.0], abs=1e-6)
    case = Case(FedSEM(3), with_targets([(1, 8.0), (2, 8.0), (1, 2.0)]))
    assert case.state.cluster_ids.tolist() == [0, 0, 1]
    assert case.centers() == pytest.approx([4.0, 1.0], abs=1e-6)


class Two(nn.Module):
    """w₀ x₀ + w₁ x₁, where w₁ is the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Parameter(torch.zeros(1)), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk * x[:, :1] + self.head(x[:, 1:])


@pytest.mark.parametrize(
    ("method", "cluster", "centers"),
    [
        (FedSEM(2, "all"), [0, 1, 0], [[0.0, 1.5], [10.0, 0.0]]),
        # The mean is still that of the whole model.
        (FedSEM(2, "last"), [0, 0, 1], [[5.0, 0.0], [0.0, 3.0]]),
    ],
)
def test_distances_on_all_parameters_or_on_the_last_layer(
    method: FedSEM, cluster: list[int], centers: list[list[float]]
) -> None:
    # With the samples (1, 0), y = a and (0, 1), y = b and lr = 1 a step is w <- (a, b).
    targets = [(0.0, 0.0), (10.0, 0.0), (0.0, 3.0)]
    case = Case(
        method,
        from_arrays([(torch.eye(2), torch.tensor(target)) for target in targets]),
        Two(),
        lr=1.0,
    )
    for _ in range(2):
        assert case.state.cluster_ids.tolist() == cluster
        models = case.state.models
        assert torch.cat([models["trunk"], models["head.weight"][:, 0]], 1).tolist() == centers
        case.round(2, 0, 1)  # E-step and M-step change nothing


def test_bytes() -> None:
    case = four()
    # The one-off phase: all clients, one float32 each way.
    assert (case.fed.traffic.up, case.fed.traffic.down) == (4 * 4, 4 * 4)
    case.round(0, 2)
    assert (case.fed.traffic.up, case.fed.traffic.down) == (6 * 4, 6 * 4)
