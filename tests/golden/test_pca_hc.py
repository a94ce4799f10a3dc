"""PCA+kM+HC with three clients worked by hand.

Each client has two different points in the plane. With k = 2 its centers are their projections on
the line through both:

client 0: (1, 2), (5, 2)  mean (3, 2), axis (1, 0),      projections -2, 2
client 1: (4, 0), (4, 6)  mean (4, 3), axis (0, 1),      projections -3, 3; it has each point twice
client 2: (0, 0), (6, 8)  mean (3, 4), axis (0.6, 0.8),  projections -5, 5

Best matchings: A_01 = sqrt(1 + 1) / 2, A_02 = sqrt(9 + 9) / 2, A_12 = sqrt(4 + 4) / 2. Clients 0
and 1 are merged first.

The model is one number w, the loss (w - y)², y = 2, 4, 6: a step with lr = 0.25 is w <- (w + y) /
2.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import Simulator
from fedclade.clustering.set_distances import distances
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.data import Clients, from_arrays
from fedclade.methods.pca_hc import PCAHC, PCAHCState
from fedclade.programs.pca_centroid_signature import pca_basis

POINTS = [
    [(1.0, 2.0), (5.0, 2.0)],
    [(4.0, 0.0), (4.0, 6.0), (4.0, 0.0), (4.0, 6.0)],
    [(0.0, 0.0), (6.0, 8.0)],
]
# Its mean is 0 and its axes are those of the plane: projections are the points themselves.
PROBE = torch.tensor([(10.0, 0.0), (-10.0, 0.0), (0.0, 1.0), (0.0, -1.0)])


class Constant(nn.Module):
    """w, for any inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return 0 * x[:, 0] + self.weight


def with_points(points: Sequence[Sequence[tuple[float, float]]]) -> Clients:
    return from_arrays(
        [
            (torch.tensor(params), torch.full((len(params),), 2.0 * (client + 1)))
            for client, params in enumerate(points)
        ]
    )


class Case:
    def __init__(self, absent: Sequence[int] = (), **settings: Any) -> None:
        objective = Objective(Constant(), lambda outputs, y: (outputs - y) ** 2)
        method = PCAHC(**{"clusters": 2, "k": 2, "components": 3, **settings})
        self.method = method.with_local_config(LocalTraining(objective, lr=0.25, batch_size=10))
        self.absent = set(absent)
        self.fed = Simulator(with_points(POINTS), faults=self._answer)
        self.state = self._typed(self.method.init(self.fed, objective.params(), key=0))

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def _typed(self, state: object) -> PCAHCState:
        assert isinstance(state, PCAHCState)
        return state

    def round(self, *cohort: int) -> list[float]:
        self.state = self._typed(
            self.method.round(self.fed, self.state, torch.tensor(cohort), key=1)
        )
        return self.served()

    def add_clients(self, *ids: int) -> list[int]:
        self.state = self._typed(
            self.method.add_clients(self.fed, self.state, torch.tensor(ids), key=2)
        )
        return self.state.cluster_ids.tolist()

    def served(self) -> list[float]:
        known = torch.arange(3)[self.state.cluster_ids[:3] != UNKNOWN]
        models: Tree = self.method.assign_models(self.state, known).gather({})
        return models["weight"].flatten().tolist()

    def centers(self, client: int) -> list[list[float]]:
        return sorted(self.state.centres[client].tolist())


def near(*numbers: float) -> Any:
    return pytest.approx(numbers, abs=1e-5)


def test_each_client_projects_on_its_own_axes() -> None:
    case = Case()
    # Two points have one axis: the other components are zeros.
    for client, place in enumerate((2.0, 3.0, 5.0)):
        low, high = case.centers(client)
        assert (low, high) == (near(-place, 0, 0), near(place, 0, 0))
    assert case.state.counts.tolist() == [2, 2, 2]


def test_groups_are_wards() -> None:
    case = Case()
    A = distances(case.state.centres.numpy(), case.state.counts.numpy())
    assert [A[0, 1], A[0, 2], A[1, 2]] == near(sqrt(2) / 2, sqrt(18) / 2, sqrt(8) / 2)
    assert case.state.cluster_ids.tolist() == [0, 0, 1]
    assert Case(clusters=1).state.cluster_ids.tolist() == [0, 0, 0]
    assert Case(clusters=7).state.cluster_ids.tolist() == [0, 1, 2]


def test_wards_groups_are_not_a_chain() -> None:
    # With centers at -t and t, the distance of two clients is |t - t'| / sqrt(2). In units of
    # 1 / sqrt(2), 1 and 2 merge at 1, and so do 3.2 and 4.2. Then {3.2, 4.2} and 5.6 merge at
    # sqrt(4 / 3) 1.9 = 2.2, before {1, 2} and {3.2, 4.2} at sqrt(2) 2.2 = 3.1. (The widest gap is
    # below 5.6.)
    clients = with_points([[(-t, 0.0), (t, 0.0)] for t in (1.0, 2.0, 3.2, 4.2, 5.6)])
    assert PCAHC(clusters=2, k=2).init(
        Simulator(clients), {"w": torch.zeros(1)}, key=0
    ).cluster_ids.tolist() == [0, 0, 1, 1, 1]


def test_fedavg_inside_each_group() -> None:
    case = Case()
    # From 0 they get to 1, 2 and 3, with 2, 4 and 2 samples.
    assert case.round(0, 1, 2) == near((2 * 1 + 4 * 2) / 6, (2 * 1 + 4 * 2) / 6, 3.0)
    case.absent = {1}
    assert case.round(0, 1) == near((10 / 6 + 2) / 2, (10 / 6 + 2) / 2, 3.0)


def test_a_shared_basis_keeps_the_points() -> None:
    case = Case(basis="shared", probe=PROBE)
    assert case.centers(0) == [near(1, 2, 0), near(5, 2, 0)]
    assert case.centers(2) == [near(0, 0, 0), near(6, 8, 0)]
    # A_01 = sqrt(30) / 2, A_02 = sqrt(5 + 37) / 2, A_12 = sqrt(16 + 8) / 2: now 1 and 2 are the
    # nearest pair.
    A = distances(case.state.centres.numpy(), case.state.counts.numpy())
    assert [A[0, 1], A[0, 2], A[1, 2]] == near(sqrt(30) / 2, sqrt(42) / 2, sqrt(24) / 2)
    assert case.state.cluster_ids.tolist() == [0, 1, 1]


def test_a_late_client_joins_the_nearest_known_one() -> None:
    case = Case(absent=[2])
    assert case.state.cluster_ids.tolist() == [0, 1, UNKNOWN]
    assert case.state.counts.tolist() == [2, 2, 0]
    case.round(0, 1)
    case.absent = set()
    assert case.add_clients(2) == [0, 1, 1]  # A_12 < A_02
    assert case.state.counts.tolist() == [2, 2, 2]
    assert case.served() == near(1.0, 2.0, 2.0)
    # A fourth client joins: ±2.4 along its own axis, nearest to client 0. The state must grow
    # first.
    case.fed = Simulator(with_points([*POINTS, [(0.0, 9.0), (0.0, 4.2)]]), faults=case._answer)
    assert case.add_clients(3) == [0, 1, 1, 0]


def test_a_late_client_is_projected_on_the_basis_of_the_others() -> None:
    case = Case(absent=[2], basis="shared", probe=PROBE)
    case.absent = set()
    case.method = PCAHC(
        clusters=2, k=2, components=3, basis="shared", probe=PROBE + 100
    ).with_local_config(case.method.local)
    assert case.add_clients(2) == [0, 1, 1]
    assert case.centers(2) == [near(0, 0, 0), near(6, 8, 0)]


def test_if_no_client_is_assigned_new_clients_are_clustered() -> None:
    case = Case(absent=[0, 1, 2])
    assert case.state.cluster_ids.tolist() == [UNKNOWN] * 3
    case.absent = set()
    assert case.add_clients(2, 1, 0) == [0, 0, 1]


def test_a_client_with_one_sample_has_no_axis() -> None:
    case = Case(absent=[2])
    case.fed = Simulator(with_points([*POINTS[:2], [(70.0, 1.0)]]))
    case.add_clients(2)
    assert case.state.counts.tolist() == [2, 2, 1]
    assert case.centers(2) == [[0.0, 0.0, 0.0]] * 2
    assert case.state.cluster_ids.tolist() == [0, 1, 0]  # 2 away from client 0, 3 from client 1


def test_the_sign_of_an_axis() -> None:
    # Along (3, -4) / 5 the points are at -5, 0 and 5. The sign makes the larger loading positive.
    basis = pca_basis(torch.tensor([(-2.0, 5.0), (1.0, 1.0), (4.0, -3.0)]), 2)
    assert basis["mean"].tolist() == near(1.0, 1.0)
    assert basis["axes"].tolist() == [near(-0.6, 0.8), [0.0, 0.0]]


def test_bytes() -> None:
    case = Case()
    # k × components numbers and the count
    assert (case.fed.traffic.up, case.fed.traffic.down) == (3 * (2 * 3 * 4 + 8), 0)
    case = Case(basis="shared", probe=PROBE)
    # three axes and the mean, of two numbers each
    assert case.fed.traffic.down == 3 * (3 + 1) * 2 * 4
    case.round(0, 1)
    assert case.fed.traffic.down == 3 * (3 + 1) * 2 * 4 + 2 * 4
