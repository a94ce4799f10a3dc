"""CFL worked by hand.

A client with target t = (a, b) has the samples x = (1, 0), y = a and x = (0, 1), y = b. The model
is w, the loss (w · x - y)², so a full-batch step with lr = 1 is w <- t: the update of every client
is t - w.
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
from fedclade.methods.cfl import CFL, CFLState

# Four groups, not in the order of their clients. Their mean is 0, the initial model: the root is
# stationary in the first round.
TARGETS = [(-3, 1), (3, 1), (-3, -1), (3, -1), (3, 1), (-3, 1), (3, -1), (-3, -1)]
EAGER = CFL(eps1=0.01, eps2=0.1)


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, 0] - y) ** 2


def with_targets(targets: Sequence[tuple[float, float]]) -> Clients:
    return from_arrays(
        [(torch.eye(2), torch.tensor(target, dtype=torch.float32)) for target in targets]
    )


class Case:
    """CFL on clients, with the calls that a training run makes."""

    def __init__(self, method: CFL, clients: Clients, lr: float = 1.0, inputs: int = 2) -> None:
        model = nn.Linear(inputs, 1, bias=False)
        nn.init.zeros_(model.weight)
        objective = Objective(model, squared)
        self.method = method.with_local_config(LocalTraining(objective, lr=lr, batch_size=10))
        self.absent: set[int] = set()
        self.fed = Simulator(clients, faults=self._answer)
        self.state = self._typed(self.method.init(self.fed, objective.params(), key=0))

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def _typed(self, state: object) -> CFLState:
        assert isinstance(state, CFLState)
        return state

    def round(self, *cohort: int) -> CFLState:
        ids = torch.tensor(cohort or range(len(self.fed.sizes)))
        self.state = self._typed(self.method.round(self.fed, self.state, ids, key=1))
        return self.state

    def add_clients(self, *ids: int) -> CFLState:
        self.state = self._typed(
            self.method.add_clients(self.fed, self.state, torch.tensor(ids), key=2)
        )
        return self.state

    def served(self, ids: Sequence[int]) -> list[tuple[float, ...]]:
        rows = self.method.assign_models(self.state, torch.tensor(ids)).gather({})["weight"]
        return [tuple(row) for row in rows[:, 0].tolist()]

    def model_at(self, node: int) -> list[float]:
        model: list[list[float]] = self.method.model_at(self.state, node)["weight"].tolist()
        return model[0]


def test_a_split_and_its_children() -> None:
    # x = 1, lr = 0.1 from w = 0: updates 0.2 y = 0.4, -0.2 and 0.2 with 1, 3 and 1 samples: their
    # weighted mean is 0.
    clients = from_arrays(
        [(torch.ones(n, 1), torch.full((n,), y)) for n, y in ((1, 2.0), (3, -1.0), (1, 1.0))]
    )
    case = Case(EAGER, clients, lr=0.1, inputs=1)
    state = case.round()
    assert state.cluster_ids.tolist() == [1, 2, 1]
    assert state.parent.tolist() == [-1, 0, 0]
    assert case.model_at(0) == [0.0]  # the inner node keeps its model
    # (0.4 + 0.2) / 2
    assert [w for (w,) in case.served([0, 1, 2])] == pytest.approx([0.3, -0.2, 0.3])
    case.round()
    # Clients 0 and 2: 0.3 + 0.2 (2 - 0.3) = 0.64 and 0.3 + 0.2 (1 - 0.3) = 0.44. Client 1: -0.2 +
    # 0.2 (-1 + 0.2) = -0.36
    assert [w for (w,) in case.served([0, 1, 2])] == pytest.approx([0.54, -0.36, 0.54])


@pytest.mark.parametrize(
    "method",
    [CFL(eps1=0.0, eps2=0.1), CFL(eps1=0.01, eps2=4.0), CFL(eps1=0.01, eps2=0.1, gamma_max=0.95)],
)
def test_no_split_without_all_three_conditions(method: CFL) -> None:
    # ‖mean‖ = 0 is not below 0. The longest update is sqrt(10) = 3.16. sqrt((1 + 0.8) / 2) = 0.949
    # is not above 0.95.
    case = Case(method, with_targets(TARGETS))
    assert case.round().cluster_ids.tolist() == [0] * 8


def test_the_noise_bound_is_that_of_the_paper() -> None:
    # The most similar pair across the sides is (3, 1) and (-3, 1): cos = -0.8, and 0.94 <
    # sqrt((1 + 0.8) / 2) = 0.949
    case = Case(CFL(eps1=0.01, eps2=0.1, gamma_max=0.94), with_targets(TARGETS))
    assert len(case.round()) == 3


def test_clients_keep_their_ids_at_every_level() -> None:
    case = Case(EAGER, with_targets(TARGETS))
    state = case.round()
    # By the sign of the first coordinate.
    assert state.cluster_ids.tolist() == [1, 2, 1, 2, 2, 1, 2, 1]
    assert (case.model_at(1), case.model_at(2)) == ([-3.0, 0.0], [3.0, 0.0])
    # Both children are stationary immediately: their clients' updates are (0, ±1).
    state = case.round()
    assert state.parent.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert state.cluster_ids.tolist() == [3, 5, 4, 6, 5, 3, 6, 4]
    assert case.served(range(8)) == [tuple(map(float, target)) for target in TARGETS]
    assert (case.model_at(0), case.model_at(1), case.model_at(2)) == (
        [0.0, 0.0],
        [-3.0, 0.0],
        [3.0, 0.0],
    )
    assert [state.members(node).tolist() for node in range(3)] == [
        list(range(8)),
        [0, 2, 5, 7],
        [1, 3, 4, 6],
    ]
    assert (state.children(0), state.children(1), state.children(6)) == ([1, 2], [3, 4], [])
    assert len(case.round()) == 7  # all updates are 0


def test_groups_of_two_may_be_split_and_single_clients_never() -> None:
    case = Case(EAGER, with_targets([(0, 1), (0, -1)]))
    assert case.round().cluster_ids.tolist() == [1, 2]
    assert len(case.round()) == 3
    case = Case(CFL(eps1=0.01, eps2=0.1, min_size=3), with_targets([(0, 1), (0, -1)]))
    assert case.round().cluster_ids.tolist() == [0, 0]


def test_an_absent_client_follows_its_latest_update_in_the_node() -> None:
    case = Case(CFL(eps1=1.0, eps2=0.1), with_targets([(3, 1), (3, 1), (-3, 1), (-3, 1), (3, -2)]))
    case.absent = {4}
    # From (0, 0): updates (3, 1), (-3, 1); the norm of their mean (0, 1) is not below eps1.
    case.round(1, 2, 4)
    case.round(0, 3)  # from (0, 1): updates (3, 0), (-3, 0): stationary
    # The latest update of client 1 is (3, 1), that of client 2 is (-3, 1). Client 4 has none.
    assert case.state.cluster_ids.tolist() == [1, 1, 2, 2, UNKNOWN]


def test_new_clients_descend_the_tree() -> None:
    early, late = with_targets(TARGETS), with_targets([*TARGETS, (-3, -1), (3, 1), (-1, 5)])
    case = Case(EAGER, early)
    case.round()
    case.round()
    case.fed = Simulator(late, faults=case._answer)
    state = case.add_clients(9, 8, 10)
    # At the root (-1, 5) is most similar to (-3, 1). In that child its update is (2, 5), which is
    # most similar to (0, 1).
    assert state.cluster_ids.tolist() == [3, 5, 4, 6, 5, 3, 6, 4, 4, 5, 3]
    case.absent = {9}
    case.state = replace(
        state, cluster_ids=state.cluster_ids.index_fill(0, torch.tensor([8, 9]), UNKNOWN)
    )
    assert case.add_clients(8, 9).cluster_ids.tolist()[8:] == [4, UNKNOWN, 3]


def diverging(check_after: int) -> Case:
    """Two clients with one sample each and lr = 0.1. Client 0, (1, 4): w <- 0.8 w + 0.8. Client 1,
    (4, -1): w <- -2.2 w - 0.8.
    """
    clients = from_arrays(
        [(torch.full((1, 1), x), torch.full((1,), y)) for x, y in ((1.0, 4.0), (4.0, -1.0))]
    )
    case = Case(CFL(eps1=0.01, eps2=0.1, check_after=check_after), clients, lr=0.1, inputs=1)
    assert case.round().cluster_ids.tolist() == [1, 2]  # updates 0.8 and -0.8
    case.round()
    assert [w for (w,) in case.served([0, 1])] == pytest.approx([1.44, 0.96])
    return case


def test_a_split_that_raises_the_training_loss_is_reverted_and_not_tried_again() -> None:
    case = diverging(check_after=2)
    # Losses at the split, w = 0: 16 + 1 = 17. Now: (1.44 - 4)² + (3.84 + 1)² = 6.55 + 23.43.
    state = case.round()
    assert (state.cluster_ids.tolist(), state.parent.tolist(), state.frozen.tolist()) == (
        [0, 0],
        [-1],
        [True],
    )
    assert (len(state.cached), state.cached_at.tolist()) == (0, [])
    # The model at the split, which is stationary.
    assert [w for (w,) in case.served([0, 1])] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert len(case.round()) == 1


@pytest.mark.parametrize("check_after", [0, 1])
def test_a_split_is_validated_once(check_after: int) -> None:
    # After one round: (0.8 - 4)² + (-3.2 + 1)² = 10.24 + 4.84 is less than 17: the split is
    # permanent.
    case = diverging(check_after)
    assert len(case.round()) == 3
    assert case.state.frozen.tolist() == [check_after == 1, False, False]
