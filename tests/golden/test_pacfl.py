"""PACFL with three clients worked by hand.

The samples of each client are on a line through the origin, so with p = 1 its subspace is the line:

client 0: (2, 0), (4, 0)                    line (1, 0)
client 1: (-4, 3), (-8, 6), twice each      line (0.8, -0.6)
client 2: (3, 4), (6, 8)                    line (0.6, 0.8)

The angles are arccos 0.8 = 36.87° between 0 and 1, arccos 0.6 = 53.13° between 0 and 2, and 90°
between 1 and 2.

The model is one number w, the loss (w - y)², y = 2, 4, 6: a step with lr = 0.25 is w <- (w + y) /
2.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import acos, degrees, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedclade import PACFL, InvalidInputError, Simulator
from fedclade.clustering.principal_angles import angles_between, group_by_angles, place_new
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.data import Clients, from_arrays
from fedclade.methods.pacfl import PACFLState

Points = Sequence[tuple[float, float]]
POINTS: list[Points] = [
    [(2.0, 0.0), (4.0, 0.0)],
    [(-4.0, 3.0), (-8.0, 6.0), (-4.0, 3.0), (-8.0, 6.0)],
    [(3.0, 4.0), (6.0, 8.0)],
]
A, B = degrees(acos(0.8)), degrees(acos(0.6))


class Constant(nn.Module):
    """w, for any inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return 0 * x[:, 0] + self.weight


def with_points(points: Sequence[Points]) -> Clients:
    return from_arrays(
        [
            (torch.tensor(rows), torch.full((len(rows),), 2.0 * (client + 1)))
            for client, rows in enumerate(points)
        ]
    )


class Case:
    def __init__(self, absent: Sequence[int] = (), **settings: Any) -> None:
        objective = Objective(Constant(), lambda outputs, y: (outputs - y) ** 2)
        local = LocalTraining(objective, lr=0.25, batch_size=10)
        self.method = PACFL(**{"p": 1, "threshold": 40.0, **settings}).with_local_config(local)
        self.absent = set(absent)
        self.join(POINTS)
        self.state: PACFLState = self.method.init(self.fed, objective.params(), key=0)

    def join(self, points: Sequence[Points]) -> None:
        self.fed = Simulator(with_points(points), faults=self._answer)

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def round(self, *cohort: int) -> list[float]:
        self.state = self.method.round(self.fed, self.state, torch.tensor(cohort), key=1)
        return self.served()

    def add_clients(self, *ids: int) -> list[int]:
        self.state = self.method.add_clients(self.fed, self.state, torch.tensor(ids), key=2)
        return self.groups()

    def groups(self) -> list[int]:
        return self.state.cluster_ids.tolist()

    def served(self) -> list[float]:
        known = torch.nonzero(self.state.cluster_ids != UNKNOWN).flatten()
        models: Tree = self.method.assign_models(self.state, known).gather({})
        return models["weight"].flatten().tolist()


def near(*numbers: float) -> Any:
    return pytest.approx(numbers, abs=1e-4)


def test_each_client_sends_its_line() -> None:
    basis = Case().state.basis[:, 0]
    lines = torch.tensor([(1.0, 0.0), (0.8, -0.6), (0.6, 0.8)])
    assert (basis * lines).sum(1).abs().tolist() == near(1, 1, 1)


@pytest.mark.parametrize(
    ("threshold", "groups"),
    [(36.0, [0, 1, 2]), (37.0, [0, 0, 1]), (71.0, [0, 0, 1]), (72.0, [0, 0, 0])],
)
def test_merges_below_the_threshold(threshold: float, groups: list[int]) -> None:
    # 0 and 1 merge at 36.87°, and 2 joins them at (53.13° + 90°) / 2 = 71.57°.
    assert Case(threshold=threshold).groups() == groups


def test_fedavg_inside_each_group() -> None:
    case = Case()
    # From 0 they get to 1, 2 and 3, with 2, 4 and 2 samples.
    assert case.round(0, 1, 2) == near((2 * 1 + 4 * 2) / 6, (2 * 1 + 4 * 2) / 6, 3.0)
    case.absent = {1}
    assert case.round(0, 1) == near((10 / 6 + 2) / 2, (10 / 6 + 2) / 2, 3.0)


def test_a_given_number_of_groups() -> None:
    assert [Case(clusters=k).groups() for k in (1, 2, 7)] == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]


def test_a_late_client_joins_the_nearest_group_or_opens_one() -> None:
    case = Case(absent=[1, 2])
    assert case.groups() == [0, UNKNOWN, UNKNOWN]
    case.round(0)
    case.absent = set()
    # 1 is 36.87° from client 0. 2 is 53.13° away: a new group, with the nearest group's model.
    assert case.add_clients(2, 1) == [0, 0, 1]
    assert case.served() == near(1.0, 1.0, 1.0)
    assert case.round(2) == near(1.0, 1.0, 3.5)
    # Two more clients on the line of client 2, and one on a diagonal: 8.13° from it.
    case.join([*POINTS, [(1.5, 2.0)], [(-3.0, -4.0)], [(1.0, 1.0)]])
    assert case.add_clients(3, 4, 5) == [0, 0, 1, 1, 1, 1]


def test_new_clients_far_from_all_groups_are_grouped_among_themselves() -> None:
    to_known = np.array([[50.0, 60.0], [70.0, 55.0], [80.0, 50.0], [20.0, 85.0]])
    among = np.array([[0, 60, 60, 60], [60, 0, 5, 60], [60, 5, 0, 60], [60, 60, 60, 0]])
    groups, parents = place_new(to_known, among, np.array([0, 1]), "average", 40.0)
    assert groups.tolist() == [2, 3, 3, 0]
    assert parents.tolist() == [0, 1]


def test_with_a_given_number_no_group_is_opened() -> None:
    case = Case(absent=[2], clusters=1)
    case.absent = set()
    assert case.add_clients(2) == [0, 0, 0]


def test_if_no_client_is_known_new_clients_are_grouped() -> None:
    case = Case(absent=[0, 1, 2])
    case.absent = set()
    assert case.add_clients(2, 0) == [0, UNKNOWN, 1]


# ---- the angle, and defects of the authors' code (FIELD.md 1.1)


PLANE = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
DIAGONAL = np.array([[sqrt(0.5), sqrt(0.5), 0.0], [0.0, 0.0, 1.0]])


def one(left: Any, right: Any, angle: Any = "smallest") -> float:
    return float(angles_between(left[None], right[None], angle)[0, 0])


def test_the_smallest_angle_is_that_of_the_subspaces_not_of_the_vectors() -> None:
    # The diagonal is in the plane. It is 45° from both vectors of the plane.
    assert one(PLANE, DIAGONAL) < 1e-4
    elementwise = np.degrees(np.arccos(np.abs(PLANE @ DIAGONAL.T))).min()
    assert elementwise == pytest.approx(45.0)


@pytest.mark.parametrize("angle", ["smallest", "sum"])
def test_the_sign_of_a_singular_vector_does_not_matter(angle: Any) -> None:
    tilted = np.array([[0.8, 0.0, 0.6], [0.0, 1.0, 0.0]])
    for first, second in product((1, -1), repeat=2):
        signed = tilted * np.array([[first], [second]])
        # arccos 0.8 and 0° between the vectors of equal rank; a line is shared
        assert one(PLANE, signed, angle) == pytest.approx(A if angle == "sum" else 0, abs=1e-4)
    assert one(PLANE[:1], -tilted[:1], angle) == pytest.approx(A, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_the_smallest_angle_is_that_of_the_closest_directions(seed: int, p: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(5, p)))[0].T for _ in range(2))
    rotation = np.linalg.qr(rng.normal(size=(p, p)))[0]
    angle = one(left, right)
    assert one(rotation @ left, right) == pytest.approx(angle, abs=1e-5)
    assert one(right, left) == pytest.approx(angle, abs=1e-5)
    # No pair of directions of the two subspaces is closer.
    x, y = rng.normal(size=(50, p)) @ left, rng.normal(size=(50, p)) @ right
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    cosines = np.abs((x * y).sum(1)) / lengths
    assert np.degrees(np.arccos(np.minimum(cosines, 1))).min() >= angle - 1e-5


def test_average_linkage_weighs_clients_not_subgroups() -> None:
    # 0 and 1 merge, then 2 joins them. The distance of {0, 1, 2} to 3 is (9 + 9 + 3) / 3 = 7, where
    # the authors' mean of the two merged columns is (9 + 3) / 2 = 6.
    angles = np.array([[0, 1, 2, 9], [1, 0, 2, 9], [2, 2, 0, 3], [9, 9, 3, 0]], float)
    for threshold, groups in ((6.9, [0, 0, 0, 1]), (7.1, [0, 0, 0, 0])):
        assert group_by_angles(angles, "average", threshold, None).tolist() == groups


def test_a_client_with_few_samples_has_few_vectors() -> None:
    case = Case(p=3)
    assert case.state.basis.shape == (3, 3, 2)
    assert case.state.basis.norm(dim=2).tolist() == [near(1, 0, 0)] * 3
    assert case.groups() == [0, 0, 1]


def test_bytes() -> None:
    case = Case()
    assert (case.fed.traffic.up, case.fed.traffic.down) == (3 * 2 * 4, 0)
    case.round(0, 1)
    assert (case.fed.traffic.up, case.fed.traffic.down) == (3 * 2 * 4 + 2 * 4, 2 * 4)


@pytest.mark.parametrize(
    "settings", [{"p": 0}, {"threshold": 0.0}, {"clusters": 0}, {"angle": "largest"}]
)
def test_bad_settings(settings: Any) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field.startswith("method.")):
        PACFL(**settings)
