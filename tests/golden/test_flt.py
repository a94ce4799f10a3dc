"""FLT with three clients worked by hand.

The model is one number w, the loss (w x - y)^2. From w = 0 one step with lr = 0.1 gives 0.4, 0.8
and 1.2. A step is w <- w - 0.2 (w - 2) on client 0, w - 0.2 (w - 4) on client 1 and w - 0.4 (2 w -
3) on client 2. Clients have 1, 2 and 3 samples.

The encoder reads a second column. It has the same number in all samples of a client (0.0, 0.9,
1.8), which is the client's only center. With gamma = 1 client 1 is related to both others, and they
are not related to each other: Ã = [[1, 1, 0], [1, 1, 1], [0, 1, 1]].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import Simulator
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.data import from_arrays
from fedclade.methods.flt import FLT, FLTState

# (examples, x of the model, y, the client's center)
CLIENTS = [(1, 1.0, 2.0, 0.0), (2, 1.0, 4.0, 0.9), (3, 2.0, 3.0, 1.8)]


class FirstColumn(nn.Module):
    """w times the first column. Only the encoder uses the second column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0] * self.weight


class SecondColumn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:]


class Case:
    def __init__(self, silent: Sequence[int] = (), **settings: Any) -> None:
        objective = Objective(FirstColumn(), lambda outputs, y: (outputs - y) ** 2)
        method = FLT(**{"manifold": "none", "k": 2, "encoder_module": SecondColumn(), **settings})
        self.method = method.with_local_config(LocalTraining(objective, lr=0.1, batch_size=10))
        self.silent = set(silent)
        clients = from_arrays(
            [(torch.tensor([[x, at]] * n), torch.full((n,), y)) for n, x, y, at in CLIENTS]
        )
        self.fed = Simulator(
            clients, faults=lambda key, client, reply: None if client in self.silent else reply
        )
        self.state = self._flt(self.method.init(self.fed, objective.params(), key=0))

    def round(self, *cohort: int) -> list[float]:
        self.state = self._flt(self.method.round(self.fed, self.state, torch.tensor(cohort), key=1))
        return self.served()

    def add_clients(self, *ids: int) -> None:
        self.state = self._flt(
            self.method.add_clients(self.fed, self.state, torch.tensor(ids), key=2)
        )

    def served(self) -> list[float]:
        known = torch.arange(3)[self.state.cluster_ids[:3] != UNKNOWN]
        models: Tree = self.method.assign_models(self.state, known).gather({})
        return models["weight"].flatten().tolist()

    @staticmethod
    def _flt(state: Any) -> FLTState:
        assert isinstance(state, FLTState)
        return state


def near(*numbers: float) -> Any:
    return pytest.approx(numbers, abs=1e-6)


def test_the_signature_of_equal_samples_is_one_center() -> None:
    case = Case()
    assert case.state.counts.tolist() == [1, 1, 1]
    assert case.state.centres[:, 0, 0].tolist() == near(0.0, 0.9, 1.8)
    assert case.state.centres[:, 1].abs().sum() == 0
    assert case.state.cluster_ids.tolist() == [0, 0, 0]
    assert case.state.mixing[case.state.row].int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]


def test_case_1_mixes_by_rows() -> None:
    # w = 0.4, 0.8, 1.2 with n = 1, 2, 3
    assert Case().round(0, 1, 2) == near((0.4 + 1.6) / 3, (0.4 + 1.6 + 3.6) / 6, (1.6 + 3.6) / 5)


def test_case_1_uses_the_last_model_of_an_absent_client() -> None:
    case = Case()
    w0, w1, w2 = case.round(0, 1, 2)
    case.silent = {2}  # in the cohort, but without a reply; client 1 is not in the cohort
    v0 = w0 - 0.2 * (w0 - 2)
    assert case.round(0, 2) == near(
        (v0 + 2 * w1) / 3, (v0 + 2 * w1 + 3 * w2) / 6, (2 * w1 + 3 * w2) / 5
    )


def test_case_1_may_leave_absent_clients_out() -> None:
    case = Case(absent="skip")
    w0, _, w2 = case.round(0, 1, 2)
    v0 = w0 - 0.2 * (w0 - 2)
    # Client 2 is not related to a client that replied: it keeps its model.
    assert case.round(0) == near(v0, v0, w2)


def test_case_2_is_fedavg_over_the_clients_of_a_group_that_replied() -> None:
    case = Case(aggregation="clusters", gamma=0.95, silent=[0])
    # 0.9 apart: all three are in one component
    assert case.state.cluster_ids.tolist() == [UNKNOWN, 0, 0]
    case.silent = set()
    case.add_clients(0)
    assert case.state.cluster_ids.tolist() == [0, 0, 0]
    assert case.round(0, 1) == near(*[(0.4 + 1.6) / 3] * 3)


def test_the_identity_trains_each_client_alone() -> None:
    case = Case(gamma=0.5)
    assert case.state.cluster_ids.tolist() == [0, 1, 2]
    assert case.round(0, 1, 2) == near(0.4, 0.8, 1.2)
    assert case.round(1) == near(0.4, 0.8 - 0.2 * (0.8 - 4), 1.2)


def test_a_late_client_gets_its_own_relations() -> None:
    case = Case(silent=[2])
    assert case.state.row[2] == UNKNOWN
    # n = 1, 2: the two are related.
    w0, w1 = case.round(0, 1)[:2]
    assert (w0, w1) == near((0.4 + 1.6) / 3, (0.4 + 1.6) / 3)
    case.silent = set()
    case.add_clients(2)
    # As in a one-off phase with all three: 1.8 is related to 0.9, but not to 0.0.
    assert case.state.mixing[case.state.row].int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    assert case.state.cluster_ids.tolist() == [0, 0, 0]
    # It starts with the model of the only client that it is related to. Its last model counts in
    # the next round, although it is not in the cohort.
    assert case.served() == near(w0, w1, w1)
    v0 = w0 - 0.2 * (w0 - 2)
    assert case.round(0) == near((v0 + 2 * w1) / 3, (v0 + 2 * w1 + 3 * w1) / 6, w1)


def test_a_late_client_starts_with_the_mean_of_its_related_clients() -> None:
    case = Case(silent=[1])  # 0.0 and 1.8 are not related
    w0, w2 = case.round(0, 2)
    assert (w0, w2) == near(0.4, 1.2)
    case.silent = set()
    case.add_clients(1)
    assert case.state.mixing[case.state.row].int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    # The groups of the others stay, although client 1 connects them. It is as near to both; the
    # first of them counts.
    assert case.state.cluster_ids.tolist() == [0, 0, 1]
    assert case.served() == near(0.4, (0.4 + 3 * 1.2) / 4, 1.2)


def test_a_late_client_without_relations_starts_like_the_nearest_and_stays_alone() -> None:
    case = Case(silent=[2])
    w0, w1 = case.round(0, 1)[:2]
    lonely = replace(case.method, gamma=0.5)
    case.silent = set()
    state = case._flt(lonely.add_clients(case.fed, case.state, torch.tensor([2]), key=2))
    assert state.mixing[state.row].int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert state.cluster_ids.tolist() == [0, 0, 1]
    served = lonely.assign_models(state, torch.arange(3)).gather({})["weight"].flatten()
    assert served.tolist() == near(w0, w1, w1)


def test_two_late_clients_are_related_to_each_other() -> None:
    case = Case(silent=[1, 2])
    (w0,) = case.round(0)
    case.silent = set()
    case.add_clients(1, 2)
    assert case.state.mixing[case.state.row].int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    assert case.state.cluster_ids.tolist() == [0, 0, 0]
    # Client 2 is related to no known client: the nearest is client 0.
    assert case.served() == near(w0, w0, w0)


@pytest.mark.parametrize("late", [[0], [1], [2], [0, 1], [0, 2], [1, 2]])
def test_stages_end_with_the_relations_of_one_phase(late: list[int]) -> None:
    case = Case(silent=late)
    case.silent = set()
    for client in late:
        case.add_clients(client)
    assert case.state.mixing[case.state.row].int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]


def test_a_one_off_phase_without_replies() -> None:
    case = Case(silent=[0, 1, 2])
    assert case.state.cluster_ids.tolist() == [UNKNOWN] * 3
    case.silent = set()
    case.add_clients(2, 0, 1)
    assert case.state.mixing[case.state.row].int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    assert case.round(0, 1, 2) == near((0.4 + 1.6) / 3, (0.4 + 1.6 + 3.6) / 6, (1.6 + 3.6) / 5)


def test_a_round_without_replies_changes_nothing() -> None:
    case = Case()
    before = case.round(0, 1, 2)
    case.silent = {0, 1, 2}
    assert case.round(0, 1, 2) == before
