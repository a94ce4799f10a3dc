"""pFedGraph with three clients worked by hand.

The model is a point w of the plane from 0, the loss ‖w - y‖² with y = (2, 0), (4, 0) and (0, 2):
a step with lr = 0.25 is w <- (w + y) / 2. The models after a step are (1, 0), (2, 0) and (0, 1):
the cosine of clients 0 and 1 is 1, and 0 with client 2.

With α = 0.8 and equal sizes, client 0 projects (1/3, 1/3, 1/3) + (1, 1, 0) / 1.6 on the simplex:
(0.9583, 0.9583, 0.3333) - 0.4583 = (0.5, 0.5, < 0). Client 2: (0.3333, 0.3333, 0.9583) - 0.2083 =
(0.125, 0.125, 0.75).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedclade import InvalidInputError, PFedGraph, Simulator
from fedclade.clustering.collaboration_graph import collaboration_weights, project_to_simplex
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.pytree import Tree
from fedclade.data import from_arrays

TARGETS = ((2.0, 0.0), (4.0, 0.0), (0.0, 2.0))


class Point(nn.Module):
    """w, for any inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return 0 * x + self.weight


class Case:
    def __init__(
        self,
        absent: Sequence[int] = (),
        targets: Sequence[tuple[float, float]] = TARGETS,
        sizes: Sequence[int] = (1, 1, 1),
        epochs: int = 1,
        **settings: Any,
    ) -> None:
        objective = Objective(Point(), lambda outputs, y: ((outputs - y) ** 2).sum(-1))
        local = LocalTraining(objective, lr=0.25, batch_size=10, epochs=epochs)
        self.method = PFedGraph(**settings).with_local_config(local)
        self.absent = set(absent)
        samples = [
            (torch.zeros(n, 2), torch.tensor([y] * n)) for n, y in zip(sizes, targets, strict=True)
        ]
        self.fed = Simulator(from_arrays(samples), faults=self._answer)
        self.fed.init_client_state(self.method.initial_client_state(objective.params()))
        self.state = self.method.init(self.fed, objective.params(), key=0)

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def round(self, *cohort: int) -> list[list[float]]:
        self.state = self.method.round(self.fed, self.state, torch.tensor(cohort), key=1)
        self.fed.client_state.commit(1)
        return self.served()

    def used(self) -> list[list[float]]:
        """The model that each client uses."""
        ids = torch.arange(3)
        models = self.fed.models_of(
            self.method.assign_models(self.state, ids), ids, self.method.personalization_program()
        )
        return [[float(value) for value in row] for row in models["weight"]]

    def served(self) -> list[list[float]]:
        models = self.method.assign_models(self.state, torch.arange(3)).gather({})
        return [[float(value) for value in row] for row in models["weight"]]


def near(*points: tuple[float, float]) -> Any:
    return [pytest.approx(list(point), abs=1e-6) for point in points]


def test_clients_take_from_similar_clients() -> None:
    case = Case(lam=0.0)
    assert case.round(0, 1, 2) == near((1.5, 0), (1.5, 0), (0.375, 0.75))
    assert (case.fed.traffic.up, case.fed.traffic.down) == (3 * 8, 3 * 8)
    # Of the second round: (1.75, 0), (2.75, 0), (0.1875, 1.375). The cosine of client 2 with the
    # others is 0.135: it projects (0.4178, 0.4178, 0.9583) = (0.1532, 0.1532, 0.6937) + 0.2646.
    cosine = 0.1875 / (0.1875**2 + 1.375**2) ** 0.5
    tau = (2 * (1 / 3 + cosine / 1.6) + (1 / 3 + 1 / 1.6) - 1) / 3
    other, own = 1 / 3 + cosine / 1.6 - tau, 1 / 3 + 1 / 1.6 - tau
    assert case.round(0, 1, 2)[2:] == near((other * 4.5 + own * 0.1875, own * 1.375))


def test_large_clients_count_more() -> None:
    # p = (1, 1, 2) / 4. Client 0: (0.875, 0.875, 0.5) - 5/12; client 2: (0.25, 0.25, 1.125) - 5/24.
    served = Case(sizes=(1, 1, 2)).round(0, 1, 2)
    assert served == near((1.375, 1 / 12), (1.375, 1 / 12), (0.125, 11 / 12))


def test_a_large_alpha_gives_the_mean() -> None:
    mean = (1.0, 1 / 3)
    served = Case(alpha=1e6).round(0, 1, 2)
    assert served == [pytest.approx(mean, abs=1e-5)] * 3


def test_directions_with_a_cosine_above_0_9_count_as_equal() -> None:
    updates = torch.tensor([(1.0, 0.0), (0.95, (1 - 0.95**2) ** 0.5), (0.0, -1.0)])
    shares = collaboration_weights(updates, torch.ones(3), 0.8)
    assert shares[0].tolist() == pytest.approx([0.5, 0.5, 0], abs=1e-9)


def test_absent_clients_keep_their_models_and_new_ones_use_the_mean() -> None:
    case = Case()
    # Only clients 0 and 1: a = (0.5, 0.5). Client 2 never trained: the mean of their models.
    assert case.round(0, 1) == near((1.5, 0), (1.5, 0), (1.5, 0))
    case.absent = {1}
    # 0 alone: (1.5 + 2) / 2.
    assert case.round(0, 1) == near((1.75, 0), (1.5, 0), (1.75, 0))


def test_a_client_uses_its_trained_model_or_the_mixture() -> None:
    case, mixture = Case(absent=[1]), Case(absent=[1], use="mixture")
    for run in (case, mixture):
        run.round(0, 1, 2)
    # Models (1, 0) and (0, 1), their mean (0.5, 0.5) for client 1, and shares (0.8125, 0.1875).
    assert case.used() == near((1, 0), (0.5, 0.5), (0, 1))
    assert mixture.used() == near((0.8125, 0.1875), (0.5, 0.5), (0.1875, 0.8125))


def test_the_regularizer_turns_a_model_to_its_neighbors() -> None:
    """In the authors' code it has the other sign."""

    def trained(lam: float) -> Tensor:
        case = Case(lam=lam, epochs=2)
        # The received models of the first round are 0, which has no direction. The trained ones are
        # 0.75 y, so client 2 then has 0.125 (1.5 + 3, 0) + 0.75 (0, 1.5).
        assert case.round(0, 1, 2)[2:] == near((0.5625, 1.125))
        return torch.tensor(case.round(2)[2])

    received = torch.tensor([0.5625, 1.125])
    w, y, lam = received.clone(), torch.tensor(TARGETS[2]), 0.5
    for _ in range(2):
        leaf = w.clone().requires_grad_()
        cosine = torch.cosine_similarity(leaf, received, dim=0)
        (gradient,) = torch.autograd.grad(((leaf - y) ** 2).sum() - lam * cosine, leaf)
        w = w - 0.25 * gradient
    assert trained(lam).tolist() == pytest.approx(w.tolist(), abs=1e-6)
    toward = [torch.cosine_similarity(trained(lam), received, dim=0) for lam in (0.0, 0.5)]
    assert toward[0] < toward[1]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0.05, 5.0))
def test_no_other_shares_cost_less(seed: int, clients: int, alpha: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    updates = torch.randn(clients, 4, generator=generator, dtype=torch.float64)
    sizes = torch.rand(clients, generator=generator, dtype=torch.float64) + 0.1
    shares = collaboration_weights(updates, sizes, alpha)
    assert bool((shares >= 0).all())
    assert shares.sum(1).tolist() == pytest.approx([1.0] * clients)
    unit = updates / updates.norm(dim=1, keepdim=True)
    cosines = unit @ unit.T
    d, p = -torch.where(cosines > 0.9, 1.0, cosines), sizes / sizes.sum()

    def cost(rows: Tensor) -> Tensor:
        return (rows * d[:, None]).sum(-1) + alpha * ((rows - p) ** 2).sum(-1)

    others = torch.rand(clients, 200, clients, generator=generator, dtype=torch.float64) ** 4
    others = others / others.sum(-1, keepdim=True)
    assert bool((cost(shares[:, None]) <= cost(others) + 1e-9).all())


def test_projection_of_points_of_the_simplex() -> None:
    rows = torch.tensor([(0.2, 0.3, 0.5), (1.0, 0.0, 0.0), (5.0, 5.0, -9.0)])
    expected = [[0.2, 0.3, 0.5], [1, 0, 0], [0.5, 0.5, 0]]
    assert project_to_simplex(rows).tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


@pytest.mark.parametrize("settings", [{"alpha": 0.0}, {"lam": -0.1}])
def test_bad_settings(settings: Any) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field.startswith("method.")):
        PFedGraph(**settings)
